"""What a configuration means on a given number of ranks: levels, placement, wires and memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.common.errors import UserError, need
from megafrontier.config import Config, ExpertsPartitionConfig, MachineConfig, load_machine
from megafrontier.data.sampling.batches import BatchSizes
from megafrontier.model.attention.kinds import need_feature
from megafrontier.model.flops import parameter_specs
from megafrontier.model.gpt import GPT
from megafrontier.model.kernels.float8 import MULTIPLE
from megafrontier.model.moe.experts import EXPERT_AXES
from megafrontier.optim.groups import OPTIMIZERS, OptimizerGroups, check_optimizers
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import DATA_PARALLEL, MeshShape, Splits
from megafrontier.parallel.param_spec import ParamSpec, spec_of
from megafrontier.partition import Placement, Wires
from megafrontier.partition.memory import MessageBuffers, unit_buffer_bytes
from megafrontier.partition.modules.wrap import divide
from megafrontier.partition.placement import reason_for_copy, state_bytes
from megafrontier.partition.presets import (
    auto_activations,
    choose_wires,
    has_error_feedback,
    work_wires,
)
from megafrontier.partition.unit import ROOT
from megafrontier.pipeline.division import Division, keep_stages
from megafrontier.splits.context import check_context_split
from megafrontier.splits.experts import check_expert_split, split_experts
from megafrontier.splits.tensor import check_tensor_split, split_tensors

GIB = 2**30
_MOST_MICRO_BATCHES = 2**16
"""Of a rank in a step. Schedules are tables that list each of them."""


class StatePlan(NamedTuple):
    """How the state of some parameters is sharded and sent."""

    placement: Placement
    wires: Wires
    error_feedback: bool

    @property
    def feedback_wires(self) -> Wires | None:
        """The wires of gradients, if messages have error feedback."""
        return self.wires if self.error_feedback else None


@dataclass(frozen=True)
class RunPlan:
    """The mesh of a number of ranks on the machine, the placement on its levels, the wire formats
    of each level, whether gradient messages carry error feedback, and the division of the model
    over a pipeline."""

    machine: MachineConfig
    shape: MeshShape
    placement: Placement
    wires: Wires
    error_feedback: bool
    experts: StatePlan
    """The same of experts, on the levels over which these are replicated."""
    division: Division
    activations: WorkWires = UNCHANGED
    """The wires of activations."""
    tokens: WorkWires = UNCHANGED
    """The wires of tokens of an expert split."""
    is_offloaded: bool = False
    """Whether masters and the optimizer's states are in host memory."""

    @property
    def levels(self) -> Levels:
        """The machine's levels, which hold all ranks."""
        return self.shape.levels

    @property
    def data_levels(self) -> Levels:
        """The levels over which a parameter that no split cuts is replicated."""
        return self.shape.over(DATA_PARALLEL)

    def of(self, axes: Sequence[str]) -> StatePlan:
        """That of parameters that are replicated over these axes."""
        if "expert_data" in axes:
            return self.experts
        return StatePlan(self.placement, self.wires, self.error_feedback)

    @property
    def have_deltas(self) -> bool:
        """Whether any parameter is published as deltas."""
        return self.wires.have_deltas or self.experts.wires.have_deltas


def resolve_plan(config: Config, ranks: int) -> RunPlan:
    """The plan of a run on `ranks` ranks.

    Raises UserError if the machine cannot hold the ranks, or splits, the placement or an optimizer
    do not fit.
    """
    machine = load_machine(config.machine)
    levels = Levels.resolve(machine.levels, ranks)
    shape = MeshShape(levels, Splits.resolve(levels, asdict(config.parallel)))
    division = Division.of(config.parallel, shape.splits.pipeline, config.model)
    _check_splits(config, shape.splits)
    precision = config.train.precision
    moved = config.partition.wires
    crossed = shape.over(("tensor", "context", "pipeline"))
    chosen = moved.activations
    if isinstance(chosen, str):
        chosen = auto_activations(_border_rates(machine, shape))
    activations = work_wires("activations", chosen, crossed, precision)
    tokens = work_wires("tokens", moved.tokens, shape.over(("expert",)), precision)
    levels = shape.over(DATA_PARALLEL)
    placement = Placement.from_config(config.partition, levels)
    wires = choose_wires(config.partition.wires, placement, levels, precision)
    error_feedback = has_error_feedback(config.partition, wires, placement, levels)
    rest = StatePlan(placement, wires, error_feedback)
    experts = rest if config.model.moe is None else _plan_experts(config, shape, placement)
    is_offloaded = config.partition.offload.optimizer == "cpu"
    check_optimizers(config.optimizer, ranks, is_offloaded)
    plan = RunPlan(machine, shape, *rest, experts, division, activations, tokens, is_offloaded)
    _check_copy(plan, precision)
    return plan


def _check_copy(plan: RunPlan, precision: str) -> None:
    """Raises UserError if `partition.weights_copy` is false and would save nothing."""
    if plan.placement.has_copy:
        return
    states = (plan.of(()), DATA_PARALLEL), (plan.experts, EXPERT_AXES)
    here = [state.placement.on(plan.shape.over(axes)) for state, axes in states]
    reason = reason_for_copy(here, precision, plan.have_deltas)
    need(reason is None, "partition.weights_copy", "false", reason or "")


def _border_rates(machine: MachineConfig, shape: MeshShape) -> dict[str, float | None]:
    """GB/s of one rank over each level that a pipeline crosses; None: not known."""
    levels = shape.over(("pipeline",))
    crossed = (n for n, size in zip(levels.names, levels.sizes, strict=True) if size > 1)
    return {name: machine.levels[name].gigabytes_per_second for name in crossed}


def _plan_experts(config: Config, shape: MeshShape, default: Placement) -> StatePlan:
    """The placement and wires of experts; `default` is the placement of the rest."""
    given, key = config.partition.experts or ExpertsPartitionConfig(), "partition.experts"
    levels, common = shape.over(EXPERT_AXES), config.partition
    placement = Placement.from_config(given, levels, key, default)
    chosen, prefix = (common.wires, "partition") if given.wires is None else (given.wires, key)
    if given.wires is not None:
        for move, value in (("activations", chosen.activations), ("tokens", chosen.tokens)):
            fits = f"leave it out: partition.wires.{move} holds for all blocks"
            need(not value, f"{key}.wires.{move}", value, fits)
    wires = choose_wires(chosen, placement, levels, config.train.precision, prefix)
    feedback = replace(common, wires=chosen)
    return StatePlan(placement, wires, has_error_feedback(feedback, wires, placement, levels))


def _check_splits(config: Config, splits: Splits) -> None:
    """Raises UserError for splits that the model cannot be divided by."""
    parallel, tensor, context = config.parallel, splits.tensor, splits.context
    if config.model.moe is not None:
        check_expert_split(config.model.moe.experts, splits.expert)
    fits = "need 1, or a model with experts (model.moe)"
    is_possible = splits.expert == 1 or config.model.moe is not None
    need(is_possible, "parallel.expert", parallel.expert, fits)
    moves = splits.expert > 1 and config.partition.overlap != "none"
    fits = "need 1, or parallel.expert above 1 and partition.overlap: safe or full"
    need(parallel.token_pieces == 1 or moves, "parallel.token_pieces", parallel.token_pieces, fits)
    if config.model.prediction is not None:
        fits = "need 1 with model.prediction"
        need(splits.pipeline == 1, "parallel.pipeline", splits.pipeline, fits)
    check_tensor_split(config.model, tensor)
    check_context_split(config.model, context)
    if config.data.document_mask:
        need_feature(config.model, "documents", "data.document_mask", True, "need false")
    tokens = config.train.micro_batch * config.model.sequence_length // context
    where = "a micro-batch" if context == 1 else "a context rank's part of a micro-batch"
    fits = f"need a number that divides the {tokens} tokens of {where}"
    need(tokens % tensor == 0, "parallel.tensor", parallel.tensor, fits)
    precision, own = config.train.linear_precision, tokens // tensor
    fits = f"need null, or a multiple of {MULTIPLE} tokens a rank of a micro-batch ({own})"
    need(precision is None or own % MULTIPLE == 0, "train.linear_precision", precision, fits)


class UnitSize(NamedTuple):
    """One rank's part of a unit: its elements, the axes over which their state is sharded, and the
    name of its optimizer."""

    block: str
    numel: int
    axes: tuple[str, ...]
    optimizer: str


def optimizer_groups(config: Config) -> OptimizerGroups:
    """The optimizer group of every parameter. Raises UserError for groups that do not fit."""
    return OptimizerGroups(config.optimizer, parameter_specs(config.model).values())


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


def check_memory(config: Config, plan: RunPlan) -> None:
    """Raises UserError if state, buffers and block inputs of a rank need more memory than the
    machine file's device has."""
    memory = plan.machine.device.memory_gib
    train, model = config.train, config.model
    # Backward needs the inputs of all blocks whatever else is recomputed.
    number = micro_batches_of(config, plan)
    blocks = plan.division.blocks_in_flight(number)
    elements = blocks * train.micro_batch * model.sequence_length * model.hidden
    elements //= plan.shape.splits.tensor * plan.shape.splits.context
    is_offloaded = "offload" in config.checkpointing
    inputs = 0.0 if is_offloaded else elements * DTYPES[train.precision].itemsize / GIB
    # The last forward of a step, and the end of its backward.
    forward = state_gib(config, plan, in_first_forward=number == 1), inputs
    # Offloaded gradients of a single micro-batch leave the device as soon as they are complete.
    leaves = plan.is_offloaded and number == 1
    state, inputs = max(forward, (state_gib(config, plan, leaves), 0.0), key=sum)
    buffers = buffer_gib(config, plan)
    required = state + buffers + inputs
    if memory is not None and required > memory:
        raise UserError(
            f"machine.device.memory_gib: {memory:g}, need at least {required:.3g} on "
            f"{plan.levels.ranks} ranks: state {state:.3g}, buffers {buffers:.3g}, inputs of the "
            f"blocks {inputs:.3g}; take {memory_advice(config)}"
        )


def micro_batches_of(config: Config, plan: RunPlan) -> int:
    """Micro-batches of each rank in a step, after the warm-up of the batch.

    Raises UserError if a batch does not divide, or is too large.
    """
    train, size = config.train, plan.shape.over(("data",)).ranks
    BatchSizes.of(train).check(train.micro_batch, size)
    number = train.global_batch // (train.micro_batch * size)
    fits = f"need at most {_MOST_MICRO_BATCHES * train.micro_batch * size} on {size} data ranks"
    need(number <= _MOST_MICRO_BATCHES, "train.global_batch", train.global_batch, fits)
    return number


def memory_advice(config: Config) -> str:
    """What to change if a training step needs more memory than there is."""
    train, modes = config.train, " and ".join(dict.fromkeys(config.checkpointing))
    return (
        f"a smaller train.micro_batch ({train.micro_batch}), more "
        f"train.activation_checkpointing ({modes}), weights and gradients "
        "sharded further (partition.weights, partition.gradients), or more ranks"
    )
