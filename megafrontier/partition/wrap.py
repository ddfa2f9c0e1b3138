"""How a model is divided into units, and the changes and checks that its modules need."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.param_spec import ParamSpec, spec_of
from megafrontier.partition.unit import ROOT, InitialSlice, Named, Unit

_MARK = "_megafrontier_is_sharded"
SUMMED_BYTES = 1 << 24


def split_into_units(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> Iterator[tuple[str, nn.Module, list[Named]]]:
    """(unit name, module, parameters) of each unit: first the root, with all parameters that no
    block has to itself, then the blocks. Units without elements are left out.

    Raises UserError for a parameter that is frozen, complex or has a hook, and for a block that is
    not part of the model, lies inside another block, or has the name of another.
    """
    _refuse_overlap(blocks)
    owners: dict[str, set[str]] = {}
    names = dict(model.named_parameters())
    by_identity = {id(parameter): name for name, parameter in names.items()}
    for block, module in blocks:
        for parameter in module.parameters():
            if id(parameter) not in by_identity:
                raise UserError(f"block {block!r} holds a parameter that is not in the model")
            owners.setdefault(by_identity[id(parameter)], set()).add(block)
    for name, parameter in names.items():
        if not parameter.requires_grad:
            raise UserError(f"parameter {name}: frozen, every parameter must require a gradient")
        if parameter.is_complex():
            raise UserError(f"parameter {name}: complex, need its torch.view_as_real")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UserError(f"parameter {name}: has a hook, need it registered after `shard`")
    for identity in _held_outside(model, [module for _, module in blocks]):
        owners.setdefault(by_identity[identity], set()).add(ROOT)
    # A parameter that several blocks share must be unsharded while any of them runs.
    root = [(n, p) for n, p in names.items() if ROOT in owners[n] or len(owners[n]) > 1]
    if _has_elements(root):
        yield ROOT, model, root
    for block, module in blocks:
        own = [(n, p) for n, p in names.items() if owners[n] == {block}]
        if _has_elements(own):
            yield block, module, own


def _has_elements(parameters: Sequence[tuple[str, nn.Parameter]]) -> bool:
    return any(parameter.numel() > 0 for _, parameter in parameters)


def _held_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """Ids of the parameters of modules that can be reached without passing through a block."""
    seen = {id(block) for block in blocks}
    found: set[int] = set()
    rest = [model]
    while rest:
        module = rest.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.update(id(p) for p in module._parameters.values() if p is not None)
            rest += module.children()
    return found


def _refuse_overlap(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    names: set[str] = set()
    by_module = {id(block): name for name, block in blocks}
    for name, block in blocks:
        if name == ROOT:
            raise UserError(f"block {name!r}: reserved for parameters outside of blocks")
        if name in names or by_module[id(block)] != name:
            raise UserError(f"block {name!r}: given twice, need each block and each name once")
        names.add(name)
        for module in block.modules():
            if module is not block and id(module) in by_module:
                inner = by_module[id(module)]
                raise UserError(f"block {inner!r}: lies in block {name!r}, need one of them")


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


def refuse_different(model: nn.Module, hierarchy: Hierarchy) -> None:
    """Raises UserError, on all ranks, with the first parameter or buffer whose values differ
    between ranks: replicas would never be equal, and shards would belong to different models."""
    named = [(f"parameter {name}", p.detach()) for name, p in model.named_parameters()]
    named += [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
    named = [(name, tensor) for name, tensor in named if not tensor.is_meta]
    if hierarchy.size == 1 or not named:
        return
    sums = torch.stack([_byte_sum(tensor).to(hierarchy.device) for _, tensor in named])
    largest, negated = hierarchy.world.maximum(torch.cat([sums, -sums])).view(2, -1)
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

    A module may still use an old parameter, from a list of its own for example. The first backward
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
            parameter.register_post_accumulate_grad_hook(partial(_refuse_old, name))


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


def refuse_weights(outputs: Iterable[torch.Tensor], unit: Unit) -> None:
    """Raises UserError if an output of a block is a view of its weights, which will be resharded
    before it is used."""
    if unit.is_persistent:
        return
    weights = unit.full.untyped_storage().data_ptr()
    for tensor in outputs:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() == weights:
            raise UserError(
                f"block {unit.name!r}: returns a view of its own parameter, need a copy (.clone())"
            )


def in_backward() -> bool:
    """Whether autograd runs a backward now, so that a forward is a recomputation."""
    task: int = torch._C._current_graph_task_id()  # as torch.utils.checkpoint does
    return task != -1
