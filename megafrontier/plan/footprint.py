"""What a rank of a run holds, by formula: state, buffers and host memory.

Note [Formulas of memory]
A rank's engine on the meta device tells the same, and the tests compare the two. But to build it
and to run a step takes 0.1 to 1.5 s, and `plan` asks for the memory of 100 to 1,300 layouts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from megafrontier.checkpoint.local.node_folder import MEMORY_SHARE
from megafrontier.comm.delta import delta_levels
from megafrontier.comm.streams import Policy
from megafrontier.comm.wires.registry import DTYPES
from megafrontier.comm.wires.wire import Wire, Wires
from megafrontier.config import Config
from megafrontier.model.gpt import GPT
from megafrontier.optim.groups import OPTIMIZERS
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Splits
from megafrontier.parallel.param_spec import ParamSpec, spec_of
from megafrontier.partition import Placement
from megafrontier.partition.modules.wrap import divide
from megafrontier.partition.rules import StateRules
from megafrontier.partition.unit import ROOT
from megafrontier.pipeline.division import Division, keep_stages
from megafrontier.plan.resolve import RunPlan, optimizer_groups
from megafrontier.splits.experts import split_experts
from megafrontier.splits.tensor import split_tensors

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
    units = rank_units(config, plan, rank)
    return max(_state_gib(config, plan, own, in_first_forward) for own in units)


def held_gib(config: Config, plan: RunPlan, units: Sequence[UnitSize]) -> tuple[float, float]:
    """GiB of state and buffers of a rank with these units, by formula, as `state_gib`: of a whole
    step, and of its first forward."""
    buffers = _buffer_gib(config, plan, units)
    whole, first = (_state_gib(config, plan, units, is_first) for is_first in (False, True))
    return whole + buffers, first + buffers


def _state_gib(
    config: Config, plan: RunPlan, units: Sequence[UnitSize], in_first_forward: bool
) -> float:
    left_out = {"host"}
    if in_first_forward and plan.machine.device.is_accelerator:
        left_out.add("gradients")
    states = rank_state_bytes(config, plan, units)
    return sum(size for state, size in states.items() if state not in left_out) / GIB


def rank_units(config: Config, plan: RunPlan, rank: int | None = None) -> list[list[UnitSize]]:
    """The units of a rank of a pipeline, or of each one that may hold most."""
    splits, division = plan.shape.splits, plan.division
    ranks = division.distinct_ranks() if rank is None else [rank]
    return [unit_sizes(config, splits, division, each) for each in ranks]


def rank_state_bytes(config: Config, plan: RunPlan, units: Sequence[UnitSize]) -> Counter[str]:
    """Bytes of a rank's state for these units of its own, by kind.

    Weights have the computing type; gradients are fp32; the optimizer has `master_itemsize` bytes
    for an element. If the masters are unsharded and weights fp32, the weights are the masters. With
    error feedback, errors are bf16. Offloaded, the optimizer's bytes, and 4 an element for what
    crosses, are in `host`.
    """
    itemsize = DTYPES[config.train.precision].itemsize
    numels: Counter[tuple[tuple[str, ...], str]] = Counter()
    for unit in units:
        numels[unit.axes, unit.optimizer] += unit.numel
    total: Counter[str] = Counter()
    for (axes, name), numel in numels.items():
        levels, rules = plan.shape.over(axes), plan.of(axes)
        place, optimizer = rules.placement.on(levels), OPTIMIZERS[name]
        shards = [numel // prod(levels.sizes[:depth]) for depth in range(len(levels.sizes) + 1)]
        own = shards[place.optimizer] * master_itemsize(config, name)
        is_away = plan.is_offloaded and optimizer.may_be_on_host
        are_masters = itemsize == 4 and place.optimizer == 0 and not is_away
        has_weights = place.has_copy and not are_masters
        total["weights"] += shards[place.backward_weights] * itemsize * has_weights
        total["gradients"] += shards[place.gradients] * 4
        total["optimizer"] += own * (not is_away)
        total["host"] += (own + shards[place.optimizer] * 4) * is_away
        total["host"] += optimizer.host_bytes(numel, config.optimizer)
        total["host"] += shards[place.optimizer] * 4 * config.evaluate.average
        total["errors"] += sum(shards[level] * 2 for level in rules.feedback_levels(levels))
    return total


def master_itemsize(config: Config, optimizer: str) -> int:
    """Bytes of a rank for each element that it updates: the fp32 master, the states of the
    optimizer and of the exchange between sites, and an average of the weights."""
    sites = 0 if config.sites is None else config.sites.state_itemsize
    return OPTIMIZERS[optimizer].element_bytes() + sites + (4 if config.optimizer.ema else 0)


def stored_itemsize(config: Config, plan: RunPlan, rules: StateRules, optimizer: str) -> int:
    """Bytes in a checkpoint of each element of a unit with `rules`: `master_itemsize`, the
    published weight with delta wires, and the bf16 error with error feedback."""
    published = DTYPES[config.train.precision].itemsize if plan.have_deltas else 0
    return master_itemsize(config, optimizer) + published + 2 * rules.error_feedback


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
            total += _unit_buffer_bytes(numels, root, placement, dtype.itemsize, prefetch)
            root = 0
        if OPTIMIZERS[optimizer].needs_whole_matrices:
            total += OPTIMIZERS[optimizer].buffer_bytes(_matrices(config, plan, optimizer))
    return total / GIB


def _message_bytes(
    config: Config, plan: RunPlan, axes: tuple[str, ...], units: Sequence[UnitSize]
) -> int:
    """Bytes of the buffers of messages, of the units that are sharded over `axes`."""
    levels, rules, partition = plan.shape.over(axes), plan.of(axes), config.partition
    placement, when = rules.placement.on(levels), (partition.overlap, partition.prefetch)
    messages = _MessageBuffers(placement, levels, rules.wires, rules.dtype, *when)
    return messages.held_bytes([u.numel for u in units if u.block == ROOT or u.axes == axes])


def _matrices(config: Config, plan: RunPlan, optimizer: str) -> Iterator[tuple[ParamSpec, int]]:
    """The parameters of an optimizer, as for `UnitOptimizer.buffer_bytes`."""
    for spec in optimizer_groups(config).by_optimizer()[optimizer]:
        if spec.kind == "expert":
            count = spec.shape[0] // plan.shape.splits.expert
            spec = replace(spec, shape=(count, *spec.shape[1:]), box=())
        depth = plan.of(spec.axes).placement.optimizer
        yield spec, prod(plan.shape.over(spec.axes).sizes[:depth])


def host_gib(config: Config, plan: RunPlan, memory: float | None = None) -> float:
    """GiB of host memory that each rank holds, by formula: offloaded states, copies for
    `evaluate.average`, and snapshots, which are not kept in a host with `memory` for each rank of
    which they would take too much. Of a pipeline: the rank that holds most."""
    units = rank_units(config, plan)
    states = max(rank_state_bytes(config, plan, own)["host"] for own in units) / GIB
    snapshots = snapshot_gib(config, plan) if keeps_in_memory(config) else 0.0
    is_too_much = memory is not None and snapshots > MEMORY_SHARE * memory
    return states + (0.0 if is_too_much else snapshots)


def snapshot_gib(config: Config, plan: RunPlan) -> float:
    """GiB of a node for each rank's snapshots, by formula: two of its shards, and two of those of
    which it keeps copies. 0 without `checkpoint.local.every`."""
    local, per_host = config.checkpoint.local, plan.machine.device.ranks_per_host
    copies = local.copies if per_host is None or plan.levels.ranks > per_host else 0
    units = rank_units(config, plan)
    most = max(_stored_bytes(config, plan, own) for own in units)
    return 2 * (1 + copies) * most / GIB if local.every else 0.0


def keeps_in_memory(config: Config) -> bool:
    """Whether snapshots are to be in the memory of the nodes, as far as the config says it."""
    folder = config.checkpoint.local.folder
    return folder == "auto" or folder.startswith("/dev/shm")


def _stored_bytes(config: Config, plan: RunPlan, units: Sequence[UnitSize]) -> float:
    """Bytes of a rank's part of a checkpoint."""
    total = 0.0
    for unit in units:
        levels, rules = plan.shape.over(unit.axes), plan.of(unit.axes)
        shards = prod(levels.sizes[: rules.placement.on(levels).optimizer])
        total += unit.numel / shards * stored_itemsize(config, plan, rules, unit.optimizer)
    return total


def fits_host(config: Config, plan: RunPlan) -> bool:
    """Whether the host has the memory, as far as the machine file states it."""
    memory = plan.machine.device.host_memory_gib
    return memory is None or host_gib(config, plan, memory) <= memory


def _unit_buffer_bytes(
    numels: Sequence[int], root: int, placement: Placement, itemsize: int, prefetch: int | None
) -> int:
    """Bytes of a rank's `UnitBufferPool` after a step of several micro-batches.

    numels: elements of each block's unit, in the order in which they run.
    root: elements of the root unit, 0 if there is none. Its gradient is taken to be in use during
        all of backward. (If it comes last and is as long as a block's, it reuses that buffer.)
    prefetch: units gathered ahead, None without overlap. One more unit is unsharded than that, and
        two more full gradients exist.
    """
    ahead = min(prefetch or 0, max(len(numels) + bool(root) - 1, 0))
    weights = gradients = 0
    if not placement.is_persistent:
        buffers = range(min(ahead + 1, len(numels)))
        weights = root + sum(max(numels[first :: ahead + 1]) for first in buffers)
    if placement.gradients:
        waiting = 1 if prefetch is None else ahead + 2
        sizes = Counter(numels)
        gradients = root + sum(numel * min(count, waiting) for numel, count in sizes.items())
    return (weights + gradients) * itemsize


@dataclass(frozen=True)
class _MessageBuffers:
    """Predicts the memory of messages: each stream's `Workspace`, and the `BufferPool` of deltas
    that are passed on to another level.

    `placement` is `Placement.on` the levels, `dtype` the computing type.
    """

    placement: Placement
    levels: Levels
    wires: Wires
    dtype: torch.dtype
    policy: Policy
    prefetch: int

    def held_bytes(self, numels: Sequence[int]) -> int:
        """Bytes after a step of units of `numels` elements, in the order in which they run."""
        largest: dict[tuple[int, str], int] = {}
        for level, purpose, size in self._workspaces(max(numels)):
            key = (level if self.policy == "full" else 0), purpose
            largest[key] = max(largest.get(key, 0), size)
        return sum(largest.values()) + self._passed_on(numels)

    def _workspaces(self, numel: int) -> Iterator[tuple[int, str, int]]:
        """(level, purpose, bytes) of all collectives of a unit of `numel` elements."""
        placement, deltas = self.placement, self._delta_levels
        yield from self._delta(numel, deltas)
        dtype = self.dtype if placement.gradients else torch.float32
        for level, size in enumerate(self.levels.sizes):
            if size == 1:
                continue
            shard = numel // prod(self.levels.sizes[: level + 1])
            if level < placement.optimizer and level not in deltas:
                yield from self._gather(level, self.wires.gather[level], shard, self.dtype)
            yield from self._reduce(level, shard, dtype)
            dtype = torch.float32
            if level >= placement.optimizer:  # the sum comes back to all replicas
                yield from self._gather(level, self.wires.reduce[level], shard, dtype)

    @property
    def _delta_levels(self) -> list[int]:
        start, stop = self.placement.optimizer, self.placement.backward_weights
        return delta_levels(self.wires, self.levels.sizes, start, stop)

    def _delta(self, numel: int, deltas: Sequence[int]) -> Iterator[tuple[int, str, int]]:
        own = numel // prod(self.levels.sizes[: self.placement.optimizer])
        previous: Wire | None = None
        for level in reversed(deltas):
            wire = self.wires.gather[level]
            rows = prod(self.levels.sizes[level + 1 : self.placement.optimizer])
            if previous is None or previous.codec != wire.codec:
                yield level, "change", 4 * own * rows
                yield level, "sent", wire.codec.message_bytes(own) * rows
            if previous is None and self.dtype is not torch.float32:
                yield level, "rounded", own * self.dtype.itemsize
            if level == deltas[0]:
                size = rows * self.levels.sizes[level]
                yield level, "received", wire.codec.message_bytes(own) * size
            previous = wire

    def _gather(
        self, level: int, wire: Wire, shard: int, dtype: torch.dtype
    ) -> Iterator[tuple[int, str, int]]:
        if not wire.codec.sends_unchanged(dtype):
            yield level, "sent", wire.codec.message_bytes(shard)
            yield level, "received", wire.codec.message_bytes(shard) * self.levels.sizes[level]

    def _reduce(self, level: int, shard: int, dtype: torch.dtype) -> Iterator[tuple[int, str, int]]:
        wire, size = self.wires.reduce[level], self.levels.sizes[level]
        rows = size - wire.codec.is_quantized
        yield level, "received", wire.codec.message_bytes(shard) * rows
        if not wire.codec.sends_unchanged(dtype):
            yield level, "sent", wire.codec.message_bytes(shard) * rows
        if wire.codec.is_quantized and dtype is not torch.float32:
            yield level, "own", shard * dtype.itemsize

    def _passed_on(self, numels: Sequence[int]) -> int:
        """For each size of unit, as many buffers as units of that size are published at a time."""
        if not self._delta_levels[1:]:
            return 0
        window = {"none": 1, "safe": self.prefetch + 1, "full": 2 * self.prefetch + 2}[self.policy]
        most: Counter[int] = Counter()
        for first in range(len(numels)):
            most |= Counter(numels[first : first + window])
        sizes, depth = self.levels.sizes, self.placement.optimizer
        owners = prod(sizes[:depth])
        return sum(
            count
            * self.wires.gather[level].codec.message_bytes(numel // owners)
            * prod(sizes[level:depth])
            for numel, count in most.items()
            for level in self._delta_levels[1:]
        )
