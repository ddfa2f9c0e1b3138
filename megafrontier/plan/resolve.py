"""What a configuration means on a given number of ranks: levels, placement, wires and splits."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.common.errors import need
from megafrontier.config import Config, ExpertsPartitionConfig, MachineConfig, load_machine
from megafrontier.data.sampling.batches import BatchSizes
from megafrontier.model.attention.kinds import blocks_with_logits, need_feature
from megafrontier.model.flops import parameter_specs
from megafrontier.model.kernels.float8 import MULTIPLE
from megafrontier.model.moe.experts import EXPERT_AXES
from megafrontier.optim.groups import OptimizerGroups, check_optimizers
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import DATA_PARALLEL, MeshShape, Splits
from megafrontier.partition import Placement
from megafrontier.partition.placement import reason_for_copy
from megafrontier.partition.presets import (
    auto_activations,
    choose_wires,
    has_error_feedback,
    work_wires,
)
from megafrontier.partition.rules import StateRules, Update
from megafrontier.pipeline.division import Division
from megafrontier.splits.context import check_context_split
from megafrontier.splits.experts import check_expert_split
from megafrontier.splits.tensor import check_tensor_split

_MOST_MICRO_BATCHES = 2**16
"""Of a rank in a step. Schedules are tables that list each of them."""


ALIKE = 2.0
"""Tokens cross two levels at once if the inner one is at most this many times as fast."""


@dataclass(frozen=True)
class RunPlan:
    """The mesh of a number of ranks on the machine, how state is sharded and sent on its levels,
    and the division of the model over a pipeline."""

    machine: MachineConfig
    shape: MeshShape
    default: StateRules
    """The rules of parameters that no split cuts, on the levels over which they are replicated."""
    experts: StateRules
    """Those of experts, on their levels."""
    division: Division
    activations: WorkWires = UNCHANGED
    """The wires of activations."""
    tokens: WorkWires = UNCHANGED
    """The wires of tokens of an expert split."""
    joined: tuple[int, ...] = ()
    """Levels that these cross together with the next one further out."""

    @property
    def is_offloaded(self) -> bool:
        """Whether masters and the optimizer's states are in host memory."""
        return self.default.update == "on_host"

    @property
    def levels(self) -> Levels:
        """The machine's levels, which hold all ranks."""
        return self.shape.levels

    @property
    def data_levels(self) -> Levels:
        """The levels over which a parameter that no split cuts is replicated."""
        return self.shape.over(DATA_PARALLEL)

    def of(self, axes: Sequence[str]) -> StateRules:
        """The rules of parameters that are replicated over these axes."""
        return self.experts if "expert_data" in axes else self.default

    @property
    def have_deltas(self) -> bool:
        """Whether any parameter is published as deltas."""
        return self.default.wires.have_deltas or self.experts.wires.have_deltas


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
    default = StateRules(
        placement,
        wires,
        DTYPES[precision],
        error_feedback,
        _update(config),
        measures_norms=True,
    )
    experts = default if config.model.moe is None else _plan_experts(config, shape, default)
    joined = _joined(config.parallel.dispatch, machine, shape.over(("expert",)))
    plan = RunPlan(machine, shape, default, experts, division, activations, tokens, joined)
    check_optimizers(config.optimizer, ranks)
    _check_copy(plan, precision)
    return plan


def _update(config: Config) -> Update:
    if config.partition.offload.optimizer == "cpu":
        return "on_host"
    return "overlapped" if config.partition.overlap_update else "at_once"


def _check_copy(plan: RunPlan, precision: str) -> None:
    """Raises UserError if `partition.weights_copy` is false and would save nothing."""
    if plan.default.placement.has_copy:
        return
    states = (plan.default, DATA_PARALLEL), (plan.experts, EXPERT_AXES)
    here = [state.placement.on(plan.shape.over(axes)) for state, axes in states]
    reason = reason_for_copy(here, precision, plan.have_deltas)
    need(reason is None, "partition.weights_copy", "false", reason or "")


def _border_rates(machine: MachineConfig, shape: MeshShape) -> dict[str, float | None]:
    """GB/s of one rank over each level that a pipeline crosses; None: not known."""
    levels = shape.over(("pipeline",))
    crossed = (n for n, size in zip(levels.names, levels.sizes, strict=True) if size > 1)
    return {name: machine.levels[name].gigabytes_per_second for name in crossed}


def _joined(dispatch: str, machine: MachineConfig, levels: Levels) -> tuple[int, ...]:
    """The levels that tokens cross together with the next one further out (`parallel.dispatch`)."""
    active = [level for level, size in enumerate(levels.sizes) if size > 1]
    rates = [machine.levels[name].gigabytes_per_second for name in levels.names]

    def are_alike(level: int, outer: int) -> bool:
        fast, slow = rates[level], rates[outer]
        return fast is not None and slow is not None and fast <= ALIKE * slow

    return tuple(
        inner
        for level, outer in pairwise(active)
        if dispatch == "flat" or (dispatch == "auto" and are_alike(level, outer))
        for inner in range(level, outer)
    )


def _plan_experts(config: Config, shape: MeshShape, default: StateRules) -> StateRules:
    """The rules of experts; `default` are those of the rest."""
    given, key = config.partition.experts or ExpertsPartitionConfig(), "partition.experts"
    levels, common = shape.over(EXPERT_AXES), config.partition
    placement = Placement.from_config(given, levels, key, default.placement)
    chosen, prefix = (common.wires, "partition") if given.wires is None else (given.wires, key)
    if given.wires is not None:
        for move, value in (("activations", chosen.activations), ("tokens", chosen.tokens)):
            fits = f"leave it out: partition.wires.{move} holds for all blocks"
            need(not value, f"{key}.wires.{move}", value, fits)
    wires = choose_wires(chosen, placement, levels, config.train.precision, prefix)
    feedback = replace(common, wires=chosen)
    has_feedback = has_error_feedback(feedback, wires, placement, levels)
    return replace(default, placement=placement, wires=wires, error_feedback=has_feedback)


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
    check_tensor_split(config.model, tensor)
    check_context_split(config.model, context)
    fits = "need auto, or parallel.expert above 1"
    is_chosen = parallel.dispatch == "auto" or splits.expert > 1
    need(is_chosen, "parallel.dispatch", parallel.dispatch, fits)
    clip, fits = config.optimizer.qk_clip, "need 0, or a block with full attention"
    need(not clip or bool(blocks_with_logits(config.model)), "optimizer.qk_clip", f"{clip:g}", fits)
    if config.data.document_mask:
        need_feature(config.model, "documents", "data.document_mask", True, "need false")
    tokens = config.train.micro_batch * config.model.sequence_length // context
    where = "a micro-batch" if context == 1 else "a context rank's part of a micro-batch"
    fits = f"need a number that divides the {tokens} tokens of {where}"
    need(tokens % tensor == 0, "parallel.tensor", parallel.tensor, fits)
    precision, own = config.train.linear_precision, tokens // tensor
    fits = f"need null, or a multiple of {MULTIPLE} tokens a rank of a micro-batch ({own})"
    need(precision is None or own % MULTIPLE == 0, "train.linear_precision", precision, fits)


def optimizer_groups(config: Config) -> OptimizerGroups:
    """The optimizer group of every parameter. Raises UserError for groups that do not fit."""
    return OptimizerGroups(config.optimizer, parameter_specs(config.model).values())


def micro_batches_of(config: Config, plan: RunPlan) -> int:
    """Micro-batches of each rank in a step, after the warm-up of the batch.

    Raises UserError if a batch does not divide, or is too large.
    """
    train, size = config.train, plan.shape.over(("data",)).ranks
    if not train.elastic:
        BatchSizes.of(train).check(train.micro_batch, size)
    number = -(-train.global_batch // (train.micro_batch * size))
    fits = f"need at most {_MOST_MICRO_BATCHES * train.micro_batch * size} on {size} data ranks"
    need(number <= _MOST_MICRO_BATCHES, "train.global_batch", train.global_batch, fits)
    return number
