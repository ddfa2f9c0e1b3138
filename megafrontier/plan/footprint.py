"""What a rank of a run holds and sends, by formula."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.config import Config
from megafrontier.model.gpt import GPT
from megafrontier.optim.groups import OPTIMIZERS
from megafrontier.parallel.mesh import Splits
from megafrontier.parallel.param_spec import ParamSpec, spec_of
from megafrontier.partition.memory import MessageBuffers, unit_buffer_bytes
from megafrontier.partition.modules.wrap import divide
from megafrontier.partition.placement import state_bytes
from megafrontier.partition.unit import ROOT
from megafrontier.pipeline.division import Division, keep_stages
from megafrontier.plan.resolve import RunPlan, optimizer_groups
from megafrontier.splits.experts import split_experts
from megafrontier.splits.tensor import split_tensors
from megafrontier.splits.traffic import tensor_bytes, token_bytes

GIB = 2**30


class UnitSize(NamedTuple):
    """One rank's part of a unit: its elements, the axes over which their state is sharded, and the
    name of its optimizer."""

    block: str
    numel: int
    axes: tuple[str, ...]
    optimizer: str


_sizes: dict[str, list[UnitSize]] = {}


def unit_sizes(
    config: Config, splits: Splits, division: Division | None = None, rank: int = 0
) -> list[UnitSize]:
    """The units of a rank's part of a model, those of the root first. `division`, `rank`: of a
    pipeline, and the rank's number in it."""
    if division is not None and division.ranks == 1:
        division = None
    # A start asks several times, and building a deep model takes tens of milliseconds. The key is a
    # string because a config may hold lists.
    key = repr((config.model, config.optimizer, splits, division, rank))
    if key not in _sizes:
        _sizes[key] = _measure_units(config, splits, division, rank)
    return _sizes[key]


def _measure_units(
    config: Config, splits: Splits, division: Division | None, rank: int
) -> list[UnitSize]:
    groups = optimizer_groups(config)
    with torch.device("meta"):
        model = GPT(config.model)
    if division is not None:
        keep_stages(model, division, rank)
    if splits.tensor > 1:
        split_tensors(model, 0, splits.tensor)
    if splits.expert > 1:
        split_experts(model, 0, splits.expert)
    numels: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for block in divide(model, model.units()):
        for name, parameter in block.parameters:
            spec = spec_of(name, parameter)
            optimizer, _ = groups.of(spec)
            numels[block.name, spec.axes, optimizer] += parameter.numel()
    return [UnitSize(block, n, axes, name) for (block, axes, name), n in numels.items()]


def state_gib(
    config: Config, plan: RunPlan, in_first_forward: bool = False, rank: int | None = None
) -> float:
    """GiB of state that each rank holds, by formula: weights, gradients, optimizer state and
    quantization errors. Of a pipeline: its rank `rank`, or the one that holds most.

    in_first_forward: what a step's first forward needs: an accelerator holds no gradients yet.

    Buffers (`buffer_gib`), activations and the allocator's overhead come on top.
    """
    left_out = {"host"}
    if in_first_forward and plan.machine.device.is_accelerator:
        left_out.add("gradients")

    def kept(units: Sequence[UnitSize]) -> int:
        states = rank_state_bytes(config, plan, units)
        return sum(size for state, size in states.items() if state not in left_out)

    return max(map(kept, rank_units(config, plan, rank))) / GIB


def rank_units(config: Config, plan: RunPlan, rank: int | None = None) -> list[list[UnitSize]]:
    """The units of a rank of a pipeline, or of each one that may hold most."""
    splits, division = plan.shape.splits, plan.division
    ranks = division.distinct_ranks() if rank is None else [rank]
    return [unit_sizes(config, splits, division, each) for each in ranks]


def rank_state_bytes(config: Config, plan: RunPlan, units: Sequence[UnitSize]) -> Counter[str]:
    """Bytes of a rank's state by kind (`placement.state_bytes`), for these units of its own."""
    itemsize = DTYPES[config.train.precision].itemsize
    numels: Counter[tuple[tuple[str, ...], str]] = Counter()
    for unit in units:
        numels[unit.axes, unit.optimizer] += unit.numel
    total: Counter[str] = Counter()
    for (axes, name), numel in numels.items():
        placement, wires = plan.of(axes).placement, plan.of(axes).feedback_wires
        levels, kept = plan.shape.over(axes), master_itemsize(config, name)
        is_away = plan.is_offloaded and OPTIMIZERS[name].may_update_late
        total.update(state_bytes(numel, placement, levels, itemsize, wires, kept, is_away))
        total["host"] += OPTIMIZERS[name].host_bytes(numel, config.optimizer)
    return total


def master_itemsize(config: Config, optimizer: str) -> int:
    """Bytes of a rank for each element that it updates: the fp32 master, the states of the
    optimizer and of the exchange between sites, and an average of the weights."""
    sites = 0 if config.sites is None else config.sites.state_itemsize
    return OPTIMIZERS[optimizer].element_bytes() + sites + (4 if config.optimizer.ema else 0)


def buffer_gib(config: Config, plan: RunPlan, rank: int | None = None) -> float:
    """GiB of the buffers that a rank's units share, by formula: unsharded weights, unreduced
    gradients, messages, and those of an optimizer that needs whole matrices. Of a pipeline: its
    rank `rank`, or the one that has most."""
    return max(_buffer_gib(config, plan, units) for units in rank_units(config, plan, rank))


def _buffer_gib(config: Config, plan: RunPlan, units: Sequence[UnitSize]) -> float:
    dtype = DTYPES[config.train.precision]
    prefetch = None if config.partition.overlap == "none" else config.partition.prefetch
    # Units of the root alone are few and small.
    several = list(dict.fromkeys(unit.axes for unit in units if unit.block != ROOT))
    total = max(_message_bytes(config, plan, axes, units) for axes in several)
    for optimizer in {unit.optimizer for unit in units}:
        own = [unit for unit in units if unit.optimizer == optimizer]
        root = sum(unit.numel for unit in own if unit.block == ROOT)
        for axes in several:
            numels = [unit.numel for unit in own if unit.block != ROOT and unit.axes == axes]
            placement = plan.of(axes).placement.on(plan.shape.over(axes))
            total += unit_buffer_bytes(numels, root, placement, dtype.itemsize, prefetch)
            root = 0
        if OPTIMIZERS[optimizer].needs_whole_matrices:
            total += OPTIMIZERS[optimizer].buffer_bytes(_matrices(config, plan, optimizer))
    return total / GIB


def _message_bytes(
    config: Config, plan: RunPlan, axes: tuple[str, ...], units: Sequence[UnitSize]
) -> int:
    """Bytes of the buffers of messages, of the units that are sharded over `axes`."""
    levels, state, partition = plan.shape.over(axes), plan.of(axes), config.partition
    prefetch = 0 if partition.overlap == "none" else partition.prefetch
    messages = MessageBuffers(
        state.placement.on(levels),
        levels,
        state.wires,
        DTYPES[config.train.precision],
        partition.overlap,
        prefetch,
    )
    return messages.held_bytes([u.numel for u in units if u.block == ROOT or u.axes == axes])


def _matrices(config: Config, plan: RunPlan, optimizer: str) -> Iterator[tuple[ParamSpec, int]]:
    """The parameters of an optimizer, as for `UnitOptimizer.buffer_bytes`."""
    for spec in optimizer_groups(config).by_optimizer()[optimizer]:
        if spec.kind == "expert":
            count = spec.shape[0] // plan.shape.splits.expert
            spec = replace(spec, shape=(count, *spec.shape[1:]), box=())
        depth = plan.of(spec.axes).placement.optimizer
        yield spec, prod(plan.shape.over(spec.axes).sizes[:depth])


def host_gib(config: Config, plan: RunPlan) -> float:
    """GiB of host memory that each rank holds, by formula. Of a pipeline: the rank that holds
    most."""
    units = rank_units(config, plan)
    return max(rank_state_bytes(config, plan, own)["host"] for own in units) / GIB


def fits_host(config: Config, plan: RunPlan) -> bool:
    """Whether the host has the memory, as far as the machine file states it."""
    memory = plan.machine.device.host_memory_gib
    return memory is None or host_gib(config, plan) <= memory


def tensor_traffic(config: Config, plan: RunPlan) -> list[int]:
    """Bytes that a rank sends over each level in a micro-batch to those that share its matrices."""
    train = config.train
    return tensor_bytes(
        config.model,
        plan.shape.over(("tensor",)),
        train.micro_batch * config.model.sequence_length // plan.shape.splits.context,
        DTYPES[train.precision],
        plan.activations,
        overlaps=config.partition.overlap != "none",
        chunk_tokens=train.loss_chunk_tokens,
        checkpointing=config.checkpointing,
        late_weights=plan.division.splits_backward,
    )


def token_traffic(config: Config, plan: RunPlan) -> list[int]:
    """Bytes that a rank sends over each level in a micro-batch to the experts of other ranks, in
    the mean."""
    train, splits = config.train, plan.shape.splits
    return token_bytes(
        config.model,
        plan.shape.over(("expert",)),
        train.micro_batch * config.model.sequence_length // (splits.context * splits.tensor),
        DTYPES[train.precision],
        plan.tokens,
        config.checkpointing,
    )
