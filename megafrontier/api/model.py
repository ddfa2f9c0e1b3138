"""`shard` and what else acts on a sharded model. Its engine is found from the model."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.common.async_copy import DeviceTimer
from megafrontier.common.errors import UserError, need
from megafrontier.config import PartitionConfig
from megafrontier.config.building import build
from megafrontier.optim.gradients import clip_factor, global_norm
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Mesh, Splits
from megafrontier.partition import STRATEGIES, Engine, Placement
from megafrontier.partition import shard as shard_over
from megafrontier.partition.placement import STATES, reason_for_copy
from megafrontier.partition.presets import choose_wires, has_error_feedback
from megafrontier.partition.rules import Overlap, StateRules
from megafrontier.partition.unit import InitialSlice

M = TypeVar("M", bound=nn.Module)
_ATTRIBUTE = "_megafrontier_sharded"
Blocks = str | nn.Module | Sequence[str | nn.Module]


@dataclass(eq=False)
class ShardedModel:
    """The engine of a model, and its gradients once they are finished in a step."""

    engine: Engine
    divisor: int
    """What the sums of gradients over the ranks are divided by."""
    blocks: Sequence[str] = ()
    """The names of the blocks."""
    optimizer: object = None
    """The newest optimizer of the model."""
    gradients: list[torch.Tensor] | None = None
    is_offloaded: bool = False
    """Whether gradients and masters are in host memory when a step ends."""

    def __deepcopy__(self, _memo: object) -> None:
        """A copy of a model, where it is not refused, is a plain module."""

    def finish_gradients(self) -> list[torch.Tensor]:
        """This rank's gradient shards, one for each trained unit, reduced and divided."""
        if self.gradients is None:
            self.gradients = self.engine.finish_gradients()
            if self.is_offloaded:
                DeviceTimer(self.engine.hierarchy.device).wait()
            if self.divisor != 1:
                torch._foreach_div_(self.gradients, float(self.divisor))
        return self.gradients

    def end_step(self, skipped: bool) -> None:
        """Publish the masters and clear the gradients, after an update or instead of one."""
        self.gradients = None
        device = self.engine.hierarchy.device
        self.engine.finish_step(torch.tensor(float(skipped), device=device))

    def drop_gradients(self) -> None:
        """Clear the gradients without an update, if there are any."""
        if self.gradients is None and any(unit.is_finishing for unit in self.engine.units):
            self.finish_gradients()
        if self.gradients is not None:
            self.end_step(skipped=True)
        else:
            self.engine.clear_gradients()


def sharded(model: nn.Module) -> ShardedModel:
    """The engine of a sharded model. `model` may be a wrapper around it. Raises UserError for a
    model that is not sharded."""
    for module in model.modules():
        if isinstance(found := module.__dict__.get(_ATTRIBUTE), ShardedModel):
            return found
    raise UserError(f"model: a {type(model).__name__} that is not sharded, need one from `shard`")


def shard(
    model: M,
    mesh: Mesh,
    placement: str | Mapping[str, str] = "topo",
    blocks: Blocks = (),
    wires: str | Mapping[str, Any] = "exact",
    *,
    dtype: torch.dtype = torch.float32,
    reduce: Literal["mean", "sum"] = "mean",
    overlap: Literal["none", "safe", "full"] = "safe",
    prefetch: int = 1,
    weights_copy: bool = True,
    offload: bool = False,
    initial: InitialSlice | None = None,
) -> M:
    """Shard the state of any module over the levels of a mesh. Returns the module, whose class
    stays. Train it as in plain PyTorch, with these in place of torch's:

        optimizer = megafrontier.AdamW(model, lr=3e-4)  # or Muon, or Optimizer(model, torch…)
        loss = model(batch)  # this rank's part of the batch: mesh.data_rank of mesh.data_size
        loss.backward()
        megafrontier.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    Put the backward of every micro-batch but the last of a step into `no_sync(model)`. `model` in
    any of these functions may also be a wrapper, such as `torch.compile(model)`.

    placement: a name (ddp, zero1, zero2, zero3, mics, hpz, topo), or levels by state:
        `{"weights": "pair", "gradients": "node", "optimizer": "world"}`.
    blocks: glob patterns of module names (`*` does not match a dot), or modules. A block's weights
        are unsharded only while it runs; those outside of blocks for the whole pass. Blocks may lie
        inside others.
    wires: exact, zero++, low, or a dict as the key `partition.wires` takes.
    dtype: type of weights and gradients in computation. The optimizer updates fp32 masters.
    reduce: gradients are the mean over data-parallel ranks, or their sum.
    overlap: none, safe (one collective in flight) or full (one a level).
    prefetch: blocks gathered ahead of the one that runs.
    weights_copy: with False, gathers read the masters, and there is no copy of the weights in
        `dtype`. It needs weights and optimizer sharded through the same levels.
    offload: masters and states of the optimizer are in host memory, where it updates them. The
        matrices of `Muon` cross to the device for its iterations.
    initial: (spec, start, stop) → elements [start, stop) of a parameter's initial value, 1-D fp32,
        for a model on the meta device. `spec` has its `name` and `shape`.

    What differs from plain PyTorch, and why:

    * `shard` replaces the parameters. Make optimizers and param groups afterwards.
    * Parameters hold values only while their block runs, and NaN otherwise. `state_dict()` has the
      full fp32 masters on the CPU, `load_state_dict()` takes full tensors; all ranks call both.
    * `parameter.grad` is None. The engine moves each gradient to its shards at once. Therefore
      torch's own `clip_grad_norm_` does nothing. Hooks of parameters run before the move.
    * A parameter without a gradient is updated with zero, since its unit is reduced as a whole.
      Frozen parameters must be frozen before `shard`; they have no gradient and no optimizer state.
    * Every rank runs the same blocks in the same order, as every collective needs all ranks.

    Refused by name: fp16 (a loss scale is needed, use bfloat16), complex parameters, deepcopy,
    state dicts of parts of the model, torch's optimizers that look at more than one element (LBFGS,
    Adafactor, Muon: take `megafrontier.Muon`), values that differ between ranks before `shard`, a
    second backward of a step after one outside `no_sync`, in-place changes of a block's outputs
    that are views, blocks that return nothing new.

    Raises UserError for patterns that match nothing, blocks that are not in the model, are never
    called, or use parameters of a block inside them; for an unknown placement or wires; and for a
    mesh with splits, because there is no plan of how to split a module.
    """
    names = {kind: name for name, kind in DTYPES.items() if name != "fp16"}
    need(dtype in names, "dtype", dtype, f"need one of {', '.join(map(str, names))}")
    need(reduce in ("mean", "sum"), "reduce", reduce, "need mean or sum")
    if mesh.splits != Splits():
        raise UserError(f"mesh: {mesh.splits}, but {type(model).__name__} has no plan for splits")
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    hierarchy = mesh.hierarchy()
    options = {"overlap": overlap, "prefetch": prefetch, "weights_copy": weights_copy}
    config = _partition_config(placement, wires, options)
    rules = _resolve(config, hierarchy.levels, dtype, names[dtype])
    found_blocks = find_blocks(inner, blocks)
    engine = shard_over(
        inner,
        found_blocks,
        replace(rules, update="on_host" if offload else "at_once"),
        hierarchy,
        overlap=Overlap(config.overlap, config.prefetch),
        initial=initial,
    )
    divisor = hierarchy.size if reduce == "mean" else 1
    names_of_blocks = [name for name, _ in found_blocks]
    found = ShardedModel(engine, divisor, names_of_blocks, is_offloaded=offload)
    inner.__dict__[_ATTRIBUTE] = found
    return model


def no_sync(model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Backwards in the body are not the last of the optimizer step, so that their gradients need
    not cross the slow levels. With `enabled=False`, this does nothing."""
    return sharded(model).engine.no_sync(enabled)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients to a Euclidean norm of at most `max_norm`; all ranks call it before
    `optimizer.step()`. Returns their norm, float64 [], with each element counted once."""
    need(max_norm > 0, "max_norm", max_norm, "need a positive number")
    found = sharded(model)
    gradients = found.finish_gradients()
    counts = [unit.counts for unit in found.engine.trained_units]
    norm = global_norm(gradients, counts, found.engine.hierarchy.world)
    factor = clip_factor(norm, max_norm).float()
    torch._foreach_mul_(gradients, factor.cpu() if found.is_offloaded else factor)
    return norm


def find_blocks(model: nn.Module, blocks: Blocks) -> list[tuple[str, nn.Module]]:
    """The (name, module) of each block, in the model's order. Raises UserError as `shard` does."""
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    for block in [blocks] if isinstance(blocks, str | nn.Module) else blocks:
        found = {name for name, module in modules.items() if _is_meant(block, name, module)}
        if not found:
            lists = [n for n, m in modules.items() if isinstance(m, nn.ModuleList | nn.Sequential)]
            hint = f", need a pattern such as '{lists[0]}.*'" if lists else ""
            shown = repr(block) if isinstance(block, str) else f"a {type(block).__name__}"
            raise UserError(f"blocks: {shown} matches no module of the model{hint}")
        chosen |= found
    for name in chosen:
        if isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
            kind = type(modules[name]).__name__
            raise UserError(f"blocks: {name!r} is a {kind}, which is never called, need '{name}.*'")
    return [(name, module) for name, module in modules.items() if name in chosen]


def _is_meant(block: str | nn.Module, name: str, module: nn.Module) -> bool:
    if isinstance(block, nn.Module):
        return module is block
    parts, patterns = name.split("."), block.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _partition_config(
    placement: str | Mapping[str, str],
    wires: str | Mapping[str, Any],
    options: Mapping[str, Any],
) -> PartitionConfig:
    if isinstance(placement, str):
        known = ", ".join(STRATEGIES)
        need(placement in STRATEGIES, "placement", repr(placement), f"need one of {known}")
    values = {"strategy": placement} if isinstance(placement, str) else dict(placement)
    for name in sorted(values.keys() - {"strategy", *STATES}):
        raise UserError(f"placement: {name}: {values[name]}, need keys among {', '.join(STATES)}")
    chosen = {"preset": wires} if isinstance(wires, str) else dict(wires)
    return cast(PartitionConfig, build(PartitionConfig, {**values, **options, "wires": chosen}))


def _resolve(
    config: PartitionConfig, levels: Levels, dtype: torch.dtype, precision: str
) -> StateRules:
    try:
        placement = Placement.from_config(config, levels)
        wires = choose_wires(config.wires, placement, levels, precision)
        if not config.weights_copy:
            reason = reason_for_copy([placement.on(levels)], precision, wires.have_deltas)
            need(reason is None, "weights_copy", False, reason or "")
        has_feedback = has_error_feedback(config, wires, placement, levels)
        return StateRules(placement, wires, dtype, has_feedback)
    except UserError as error:
        raise UserError(str(error).replace("partition.", "")) from error
