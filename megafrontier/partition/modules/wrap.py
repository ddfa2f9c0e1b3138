"""How a model is divided into units, and the changes and checks that its modules need."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.param_spec import ParamSpec, set_spec, spec_of
from megafrontier.partition.unit import ROOT, InitialSlice, Named, Unit

_MARK = "_megafrontier_is_sharded"
SUMMED_BYTES = 1 << 24


@dataclass(eq=False)
class WrappedBlock:
    """A module whose parameters are unsharded together: its own, without those of inner blocks."""

    name: str
    module: nn.Module
    parent: "WrappedBlock | None"
    """The block around this one; the root if there is none."""
    parameters: list[Named] = field(default_factory=list)

    def around(self) -> "Iterator[WrappedBlock]":
        """The blocks around this one, innermost first, and the root."""
        block = self.parent
        while block is not None:
            yield block
            block = block.parent

    @property
    def depth(self) -> int:
        """How many blocks lie around this one."""
        return sum(1 for _ in self.around())

    @property
    def has_elements(self) -> bool:
        return any(parameter.numel() > 0 for _, parameter in self.parameters)


def divide(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> list[WrappedBlock]:
    """The root, which holds all parameters that no block has to itself or whose spec says so, and
    the blocks, each after those around it. Blocks without elements are left out.

    Raises UserError for a parameter that is complex, for a block that is not part of the model or
    has the name of another, and for a parameter that a block shares with a block inside it.
    """
    root = WrappedBlock(ROOT, model, None)
    found = _nest(root, blocks)
    owners: dict[int, list[WrappedBlock]] = {}
    inner = {id(block.module) for block in found}
    for block in (root, *found):
        for identity in _held_outside(block.module, inner - {id(block.module)}):
            owners.setdefault(identity, []).append(block)
    known = {id(parameter) for parameter in model.parameters()}
    for block in found:
        if any(id(parameter) not in known for parameter in block.module.parameters()):
            raise UserError(f"block {block.name!r} holds a parameter that is not in the model")
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise UserError(f"parameter {name}: complex, need its torch.view_as_real")
        owner = _owner(name, owners[id(parameter)], root)
        if spec_of(name, parameter).in_root:
            owner = root
        owner.parameters.append((name, parameter))
    return [block for block in (root, *found) if block.has_elements]


def _owner(name: str, owners: Sequence[WrappedBlock], root: WrappedBlock) -> WrappedBlock:
    """The block of a parameter. One that several blocks share must be unsharded while any of them
    runs, and belongs to the root."""
    for block in owners:
        for other in owners:
            if other.parent is block and block is not root:
                raise UserError(
                    f"block {other.name!r}: shares parameter {name} with block {block.name!r} "
                    "around it, need it in one of them"
                )
    return owners[0] if len(owners) == 1 else root


def _nest(root: WrappedBlock, blocks: Sequence[tuple[str, nn.Module]]) -> list[WrappedBlock]:
    """The blocks, each after those around it and otherwise in the order given."""
    _refuse_namesakes(blocks)
    rest = [(name, module, {id(m) for m in module.modules()}) for name, module in blocks]

    def inside(
        parent: WrappedBlock, candidates: Sequence[tuple[str, nn.Module, set[int]]]
    ) -> list[WrappedBlock]:
        found: list[WrappedBlock] = []
        for name, module, _ in candidates:
            around = [c for c in candidates if c[1] is not module and id(module) in c[2]]
            if not around:
                block = WrappedBlock(name, module, parent)
                held = {id(m) for m in module.modules()} - {id(module)}
                found += [block, *inside(block, [c for c in candidates if id(c[1]) in held])]
        return found

    found = inside(root, rest)
    for block in found:
        if sum(other.module is block.module for other in found) > 1:
            raise UserError(f"block {block.name!r}: lies in two blocks, need it in one of them")
    return found


def _held_outside(model: nn.Module, blocks: set[int]) -> set[int]:
    """Ids of the parameters of modules that can be reached without passing through a block, given
    by its id."""
    seen = set(blocks)
    found: set[int] = set()
    rest = [model]
    while rest:
        module = rest.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.update(id(p) for p in module._parameters.values() if p is not None)
            rest += module.children()
    return found


def _refuse_namesakes(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    names: set[str] = set()
    by_module = {id(block): name for name, block in blocks}
    for name, block in blocks:
        if name == ROOT:
            raise UserError(f"block {name!r}: reserved for parameters outside of blocks")
        if name in names or by_module[id(block)] != name:
            raise UserError(f"block {name!r}: given twice, need each block and each name once")
        names.add(name)


def refuse_sharded(model: nn.Module) -> None:
    """Raises UserError if a model has been sharded, or is a part or a copy of one that has: it
    holds no values, and it has the hooks of another engine."""
    if any(getattr(module, _MARK, False) for module in model.modules()):
        raise UserError("model: sharded already, need a new one")


def mark_sharded(model: nn.Module, holds_masters: bool) -> None:
    """Mark a model for `refuse_sharded`, and refuse copies of it unless its parameters are the
    masters on every rank."""
    for module in model.modules():
        setattr(module, _MARK, True)
        if not holds_masters:
            module.__deepcopy__ = _refuse_copy  # type: ignore[assignment]


def _refuse_copy(_memo: Any) -> NoReturn:
    raise RuntimeError(
        "deepcopy of a sharded model: its parameters are views of buffers, and a copy would not be "
        "trained; need model.state_dict(), or the masters in engine.units to average weights"
    )


def current_values(model: nn.Module) -> InitialSlice:
    """The present values of the parameters. Raises UserError if one is on the meta device."""
    values = {spec_of(name, p).name: p.detach() for name, p in model.named_parameters()}
    for name, value in values.items():
        if value.is_meta:
            raise UserError(f"parameter {name}: on the meta device, need `initial` for its values")

    def initial(spec: ParamSpec, start: int, stop: int) -> torch.Tensor:
        return values[spec.name].reshape(-1)[start:stop].float()

    return initial


def refuse_different(model: nn.Module, mesh: Mesh | Hierarchy) -> None:
    """Raises UserError, on all ranks, with the first parameter or buffer whose values differ
    between ranks: replicas would never be equal, and shards would belong to different models."""
    named = [
        (f"parameter {name}", parameter.detach())
        for name, parameter in model.named_parameters()
        if (spec := spec_of(name, parameter)).local_shape == spec.shape
    ]
    named += [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
    named = [(name, tensor) for name, tensor in named if not tensor.is_meta]
    if mesh.world.size == 1 or not named:
        return
    sums = torch.stack([_byte_sum(tensor).to(mesh.device) for _, tensor in named])
    largest, negated = mesh.world.maximum(torch.cat([sums, -sums])).view(2, -1)
    different = torch.nonzero(largest != -negated).flatten().tolist()
    if different:
        raise UserError(
            f"{named[different[0]][0]}: values differ between ranks; use the same seed on every "
            "rank before the model is built, or give `initial`"
        )


def _byte_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's bytes, which is exact in any order."""
    if tensor.layout is not torch.strided:
        sparse = tensor.to_sparse_coo().coalesce()
        return _byte_sum(sparse.indices()) + _byte_sum(sparse.values())
    # In parts, because torch converts its whole argument to int64 before it sums.
    parts = tensor.contiguous().view(-1).view(torch.uint8).split(SUMMED_BYTES)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers to the device. Raises UserError for a buffer without values."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer.is_meta:
                    raise UserError(f"buffer {name}: on the meta device, need one with values")
                module._buffers[name] = buffer.to(device)


def replace_parameters(model: nn.Module, units: Iterable[Unit]) -> None:
    """Put the parameters of the units into the modules, in place of the model's own.

    Hooks of an old parameter go to the new one, and run before the engine takes its gradient. A
    module may still use an old parameter, from a list of its own for example. The first backward
    then raises RuntimeError, because that parameter would never be trained.
    """
    old = dict(model.named_parameters())
    new = {
        id(old[entry.name]): parameter
        for unit in units
        for entry, parameter in zip(unit.layout.entries, unit.parameters, strict=True)
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                # A parameter without elements may belong to no unit and stays.
                module._parameters[name] = new.get(id(parameter), parameter)
    for name, parameter in old.items():
        if id(parameter) in new:
            set_spec(new[id(parameter)], spec_of(name, parameter))
        if id(parameter) in new and parameter.requires_grad:
            _move_hooks(parameter, new[id(parameter)])
            parameter.register_post_accumulate_grad_hook(partial(_refuse_old, name))


def _move_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    for hook in list((old._backward_hooks or {}).values()):
        new.register_hook(hook)
    for hook in list((old._post_accumulate_grad_hooks or {}).values()):
        new.register_post_accumulate_grad_hook(hook)
    for hooks in (old._backward_hooks, old._post_accumulate_grad_hooks):
        if hooks:
            hooks.clear()


def _refuse_old(name: str, _parameter: nn.Parameter) -> NoReturn:
    raise RuntimeError(
        f"parameter {name}: `shard` has replaced it, but the old one is still used; need it read "
        "from its module, not from a list or variable set before"
    )


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in a module's output, nested in dicts, lists, tuples and dataclasses."""
    found: list[torch.Tensor] = []
    rest = [output]
    opened: set[int] = set()  # because containers may hold each other
    while rest:
        item = rest.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif (parts := _parts_of(item)) and id(item) not in opened:
            opened.add(id(item))
            rest += parts
    return found


def _parts_of(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, (list, tuple)):
        return list(item)
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in fields(item)]
    return []


def forbid_inplace(tensors: Iterable[torch.Tensor]) -> None:
    """Let autograd raise RuntimeError when one of these tensors is a view and is changed in place:
    such a change drops the view from the graph, and the engine's hook with it."""
    for tensor in tensors:
        if tensor._is_view():
            # Autograd refuses the same for `unbind` and its like, and says what to do instead.
            refused = torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE
            torch._C._autograd._set_creation_meta(tensor, refused)


def refuse_weights(outputs: Iterable[torch.Tensor], block: str, unit: Unit) -> None:
    """Raises UserError if an output of a block is a view of its weights, which will be resharded
    before it is used."""
    if unit.is_persistent:
        return
    weights = unit.full.untyped_storage()._cdata  # an address, though there are no data on meta
    for tensor in outputs:
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata == weights:
            raise UserError(
                f"block {block!r}: returns a view of its own parameter, need a copy (.clone())"
            )


def in_backward() -> bool:
    """Whether autograd runs a backward now, so that a forward is a recomputation."""
    task: int = torch._C._current_graph_task_id()  # as torch.utils.checkpoint does
    return task != -1
