"""A model as the engine sees it: which unit owns which parameter, and how to replace them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition.unit import ROOT, InitialSlice, Named, Unit

_MARK = "_megafrontier_is_sharded"
SUMMED_BYTES = 1 << 24


def assign(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> Iterator[tuple[str, nn.Module, list[Named]]]:
    """(unit name, module, its parameters) of those that have any: the root unit, of all that no
    block has to itself, first.

    Raises UserError for a parameter that is frozen, complex or has a hook, which would be lost, and
    for a block that is not part of the model, lies in another one, or has another's name.
    """
    _refuse_tangled(blocks)
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
    # What several blocks share, or a block with the rest, must be whole while any of them runs.
    root = [(n, p) for n, p in names.items() if ROOT in owners[n] or len(owners[n]) > 1]
    if _has_elements(root):
        yield ROOT, model, root
    for block, module in blocks:
        own = [(n, p) for n, p in names.items() if owners[n] == {block}]
        if _has_elements(own):  # else it runs as it is
            yield block, module, own


def _has_elements(parameters: Sequence[tuple[str, nn.Parameter]]) -> bool:
    return any(parameter.numel() > 0 for _, parameter in parameters)


def _held_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """The parameters, by identity, of modules that can be reached without passing a block."""
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


def _refuse_tangled(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    names: set[str] = set()
    by_module = {id(block): name for name, block in blocks}
    for name, block in blocks:
        if name == ROOT:
            raise UserError(f"block {name!r}: the name of what no block owns, need another")
        if name in names or by_module[id(block)] != name:
            raise UserError(f"block {name!r}: given twice, need each once and by its own name")
        names.add(name)
        for module in block.modules():
            if module is not block and id(module) in by_module:
                inner = by_module[id(module)]
                raise UserError(f"block {inner!r}: lies in block {name!r}, need one of them")


def refuse_sharded(model: nn.Module) -> None:
    """Raises UserError for a model that has been sharded, or is a part or a copy of one: it holds
    no values, and the hooks of the first engine."""
    if any(getattr(module, _MARK, False) for module in model.modules()):
        raise UserError("model: sharded already, need one that is built anew")


def mark_sharded(model: nn.Module, modules: Iterable[nn.Module], is_whole: bool) -> None:
    """Let `refuse_sharded` know it, and unless `is_whole`, every rank's parameters are the masters,
    refuse copies, and state dicts of these modules: what parameters hold is shown, not kept."""
    for module in model.modules():
        setattr(module, _MARK, True)
        if not is_whole:
            module.__deepcopy__ = _refuse_copy  # type: ignore[assignment]
    for module in () if is_whole else modules:
        module.register_state_dict_pre_hook(_refuse_state_dict)
        module.register_load_state_dict_pre_hook(_refuse_state_dict)


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        f"state dict of a sharded {type(module).__name__}: its parameters are views of what the "
        "engine gathers; the values are the shards in engine.units, `published` and `master`; "
        'open_checkpoint(path).tensor("weight", name) has each whole'
    )


def _refuse_copy(_memo: Any) -> NoReturn:
    raise RuntimeError(
        "deepcopy of a sharded model: its parameters are views of what the engine gathers, and a "
        "copy's would stay as they are; take averages of the masters in engine.units"
    )


def own_values(model: nn.Module) -> InitialSlice:
    """The parameters' present values; asking for one on the meta device raises UserError."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def initial(name: str, _shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        if values[name].is_meta:
            raise UserError(f"parameter {name}: on the meta device, need `initial` for its values")
        return values[name].reshape(-1)[start:stop].float()

    return initial


def refuse_different(model: nn.Module, hierarchy: Hierarchy) -> None:
    """Raises UserError, on all ranks, naming the first parameter or buffer of which ranks bring
    other values: replicas would stay different, and shards be pieces of several models."""
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
            f"{named[different[0]][0]}: ranks bring other values; seed them alike before "
            "the model is built, or give `initial`"
        )


def _byte_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of its bytes: exact, and the same in any order. In parts, for torch makes int64 of all
    that it is given to sum."""
    if tensor.layout is not torch.strided:
        sparse = tensor.to_sparse_coo().coalesce()
        return _byte_sum(sparse.indices()) + _byte_sum(sparse.values())
    parts = tensor.contiguous().view(-1).view(torch.uint8).split(SUMMED_BYTES)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring a model's buffers to the device. Raises UserError for one without values."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer.is_meta:
                    raise UserError(f"buffer {name}: on the meta device, need one with values")
                module._buffers[name] = buffer.to(device)


def replace_parameters(model: nn.Module, units: Iterable[Unit]) -> None:
    """Put the units' parameters in place of the model's, wherever a module holds one. What uses one
    of the old ones all the same, by a list of its own say, is told in its first backward: it would
    never be trained."""
    old = dict(model.named_parameters())
    new = {
        id(old[entry.name]): parameter
        for unit in units
        for entry, parameter in zip(unit.layout.entries, unit.parameters, strict=True)
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                # One without elements may have no unit: it stays.
                module._parameters[name] = new.get(id(parameter), parameter)
    for name, parameter in old.items():
        if id(parameter) in new:
            parameter.register_post_accumulate_grad_hook(partial(_refuse_old, name))


def _refuse_old(name: str, _parameter: nn.Parameter) -> NoReturn:
    raise RuntimeError(
        f"parameter {name}: a gradient for the one from before `shard`, which put another in its "
        "place; need it taken from its module, not from a list or variable that was set before"
    )


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in a module's output, however nested in dicts, lists, tuples and dataclasses."""
    found: list[torch.Tensor] = []
    rest = [output]
    opened: set[int] = set()  # a container may hold itself, or one that holds it
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


class Copy(torch.autograd.Function):
    """A copy of a tensor that saves something for its backward, as a block that computes does: so a
    checkpoint around several blocks runs them again at the same moment on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors  # this is what runs a checkpoint's part again
        return gradients[0]


def bases_of(tensors: Iterable[torch.Tensor], given: Iterable[object]) -> list[torch.Tensor]:
    """The bases of those outputs of a block that are views of the block's own results, not of its
    inputs, whose autograd nodes are `given`. An in-place operation on such a view takes the view
    out of the graph but not its base, so the hook belongs on the base."""
    inputs = [None, *given]
    return [
        tensor._base
        for tensor in tensors
        if tensor._base is not None
        and tensor.grad_fn is not None
        and not any(tensor._base.grad_fn is node for node in inputs)
        and _leads_to(tensor.grad_fn, tensor._base.grad_fn, inputs)
    ]


def _leads_to(node: Any, base: Any, inputs: Sequence[object]) -> bool:
    """Whether a view's autograd node comes to that of its base by nodes of one input each: views of
    views."""
    while node is not base:
        if any(node is one for one in inputs) or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return True


def refuse_views(tensors: Iterable[torch.Tensor], unit: Unit) -> None:
    """Raises UserError for one of a block's outputs that lies in its weights: they are away when it
    is used."""
    if unit.is_persistent:
        return
    weights = unit.full.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() == weights:
            raise UserError(
                f"block {unit.name!r} returns a view of its own parameter, need a copy (.clone())"
            )


def in_backward() -> bool:
    """Whether autograd runs a backward here, in which forward is recomputed."""
    task: int = torch._C._current_graph_task_id()  # torch's own checkpointing asks this, too
    return task != -1
