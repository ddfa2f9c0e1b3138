"""`train.activation_checkpointing: auto`: a mode for each block, chosen by a memory budget.

What a block saves for backward is measured on the meta device, as the slope between two shallow
models, without a pipeline. The memory of a rank follows from the table of its schedule: each
micro-batch whose backward is not over holds what the blocks of its stage save.

Note [Order of modes]
Within a rank the first blocks have `block`, then `selective`, and the last ones `none`. Backward
frees what the last blocks save before it recomputes the first ones, so the two are not held at the
same time.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megafrontier.common.errors import UserError, need
from megafrontier.config import Config, load_machine
from megafrontier.model.recompute.checkpointing import Mode
from megafrontier.pipeline.table import Action, ActionKind
from megafrontier.plan.footprint import buffer_gib, state_gib
from megafrontier.plan.reserve import usable_gib
from megafrontier.plan.resolve import RunPlan, micro_batches_of, resolve_plan
from megafrontier.planner.layers import shallow_layers
from megafrontier.planner.simulation.rates import UNKNOWN
from megafrontier.planner.simulation.simulate import simulate

MODES: tuple[Mode, ...] = ("block", "selective", "none")
"""In the order in which the blocks of a rank have them."""
OPERATIONS = {"none": 1.0, "selective": 1.1, "block": 4 / 3, "offload": 4 / 3}
"""Of a block's step by mode, as a multiple of those without recomputation, estimated."""
ROUNDS = 2
"""Micro-batches of a pipeline that are looked at, as a multiple of its stages: those in flight, and
as many that find them so."""


class Saved(NamedTuple):
    """GiB that a micro-batch needs on a rank in one mode."""

    block: float
    """That each block saves for backward."""
    beside: float
    """That backward of a block and the head need beside what is saved."""


BlockCosts = Mapping[Mode, Saved]


def resolve_checkpointing(config: Config, ranks: int) -> tuple[Config, list[str]]:
    """The configuration with modes in place of `auto`, and a line that says which.

    The choice follows from configuration, machine and number of ranks, so all ranks choose alike.

    Raises UserError without a budget, and if a rank needs more with every block recomputed.
    """
    if config.train.activation_checkpointing != "auto":
        return config, []
    plan = resolve_plan(config, ranks)
    key, budget = memory_budget(config, plan)
    chosen, gib = fill_memory(config, plan, budget)
    fits = f"need at least {gib:.3g} on {ranks} ranks with every block recomputed"
    need(gib <= budget, key, f"{budget:.4g} GiB for activation_checkpointing: auto", fits)
    modes = describe_modes(chosen)
    return chosen, [f"auto: {modes}; {gib:.3g} GiB of tensors at most, budget {budget:.3g}"]


def describe_modes(config: Config) -> str:
    """How many blocks have which mode."""
    counts = Counter(config.checkpointing)
    modes = (f"{counts[mode]} {mode}" for mode in reversed(MODES) if counts[mode])
    return f"activation checkpointing of {len(config.checkpointing)} blocks: {', '.join(modes)}"


def memory_budget(config: Config, plan: RunPlan) -> tuple[str, float]:
    """The key that gives the most GiB that a rank may need with `auto`, and their number. Raises
    UserError without one."""
    if config.train.memory_gib is not None:
        return "train.memory_gib", config.train.memory_gib
    check_budget(config)
    return "machine.device.memory_gib", usable_gib(plan) or 0.0


def check_budget(config: Config) -> None:
    """Raises UserError without anything that limits the memory of a rank, for `auto`."""
    if config.train.memory_gib is None and load_machine(config.machine).device.memory_gib is None:
        fits = "need train.memory_gib or machine.device.memory_gib"
        raise UserError(f"train.activation_checkpointing: auto, {fits}")


def fill_memory(config: Config, plan: RunPlan, budget: float) -> tuple[Config, float]:
    """The configuration with the modes that fit into `budget` GiB and recompute least, all `block`
    if none fit, and the GiB of the rank that needs most."""
    modes: list[Mode] = ["block"] * config.model.trained_layers
    most = 0.0
    for rank in _ranks(config, plan):
        found = cheapest(len(rank.blocks), partial(rank.fits, budget))
        most = max(most, rank.gib(found))
        for block, mode in zip(rank.blocks, found, strict=True):
            modes[block] = mode
    given = modes[0] if len(set(modes)) == 1 else modes
    train = replace(config.train, activation_checkpointing=given, memory_gib=None)
    return replace(config, train=train), most


@dataclass(frozen=True)
class _Rank:
    """A rank of a pipeline."""

    state: float
    """GiB of state and buffers that it holds all the time."""
    gradients: float
    """GiB of gradients that backward of each block adds to them, and that stay until the update."""
    row: Sequence[Action]
    stages: Mapping[int, Sequence[int]]
    """The numbers of the blocks of each of its stages."""
    costs: BlockCosts

    @property
    def blocks(self) -> list[int]:
        return [block for blocks in self.stages.values() for block in blocks]

    def fits(self, budget: float, modes: Sequence[Mode]) -> bool:
        """Whether `gib` is at most `budget`."""
        return self.gib(modes) <= budget

    def gib(self, modes: Sequence[Mode]) -> float:
        """The most GiB of its tensors. `modes`: of `blocks`."""
        left = iter(modes)
        stages = {stage: [next(left) for _ in blocks] for stage, blocks in self.stages.items()}
        return self.state + _activations(self.row, stages, self.costs, self.gradients)


def _ranks(config: Config, plan: RunPlan) -> Iterator[_Rank]:
    division, model, costs = plan.division, config.model, _measure(config, plan)
    number = micro_batches_of(config, plan)
    table = division.table(min(number, ROUNDS * division.stages))
    for rank, row in enumerate(table):
        stages = {stage: [*division.blocks(stage)] for stage in division.stages_of(rank)}
        if division.stages - 1 in stages:  # with the block of `prediction`
            stages[division.stages - 1] += range(model.layers, model.trained_layers)
        state, whole = (state_gib(config, plan, f, rank) for f in (number == 1, False))
        each = (whole - state) / sum(map(len, stages.values()))
        yield _Rank(state + buffer_gib(config, plan, rank), each, row, stages, costs)


def cheapest(blocks: int, fits: Callable[[Sequence[Mode]], bool]) -> list[Mode]:
    """The modes of blocks, in the order of `MODES`, that fit and recompute least; all `block` if
    nothing fits. More `selective` in place of `none` must not need more memory."""
    best = _modes(blocks, 0, 0)
    for recomputed in range(blocks + 1):
        rest = blocks - recomputed
        rows = [partial(_modes, recomputed, n, rest - n) for n in range(rest + 1)]
        at = bisect_left(rows, True, key=lambda row: fits(row()))
        if at <= rest and operations(rows[at]()) < operations(best):
            best = rows[at]()
    return best


def operations(modes: Sequence[Mode]) -> float:
    """Of a step, as a multiple of those without recomputation, estimated."""
    return sum(OPERATIONS[mode] for mode in modes) / len(modes)


def _modes(*counts: int) -> list[Mode]:
    return [mode for mode, count in zip(MODES, counts, strict=True) for _ in range(count)]


_measured: dict[str, Saved] = {}
"""By configuration: a search asks for the same one several times."""


def _measure(config: Config, plan: RunPlan) -> BlockCosts:
    """What blocks need, on a rank with all the work of a pipeline."""
    ranks = plan.levels.ranks
    parallel = replace(config.parallel, pipeline=1, stages_per_rank=1, schedule="1f1b", layers=[])
    partition = config.partition
    if plan.division.ranks > 1:  # wires of borders would be refused
        partition = replace(partition, wires=replace(partition.wires, activations={}))
    # The ranks of the pipeline become data-parallel, with at least two micro-batches each.
    batch = 2 * config.train.micro_batch * ranks
    train = replace(config.train, memory_gib=None, global_batch=batch, batch_warmup=None)
    found: dict[Mode, Saved] = {}
    for mode in MODES:
        changed = replace(train, activation_checkpointing=mode)
        alone = replace(config, train=changed, parallel=parallel, partition=partition, sites=None)
        key = repr((alone, ranks))
        if key not in _measured:
            _measured[key] = _saved(alone, ranks)
        found[mode] = _measured[key]
    return found


def _saved(config: Config, ranks: int) -> Saved:
    """What each block and the rest need, from two shallow models."""
    fewer, more = shallow_layers(config)
    low, high = (_activation_gib(config, layers, ranks) for layers in (fewer, more))
    block = (high - low) / (more - fewer)
    others = config.model.trained_layers - config.model.layers
    return Saved(block, low - (fewer + others) * block)


def _activation_gib(config: Config, layers: int, ranks: int) -> float:
    small = replace(config, model=replace(config.model, layers=layers))
    plan = resolve_plan(small, ranks)
    # An accelerator has all gradients from the second one on.
    step = simulate(small, plan, UNKNOWN, micro_batches=1 + plan.machine.device.is_accelerator)
    return max(found["activations"] for found in (step.memory, step.worst_memory) if found)


def _activations(
    row: Sequence[Action],
    stages: Mapping[int, Sequence[Mode]],
    costs: BlockCosts,
    gradients: float,
) -> float:
    """The most GiB of activations that a rank of a pipeline holds, with the `gradients` that
    backward of each block adds. `row`: its actions. `stages`: the modes of the blocks of each of
    its stages."""
    saved = {stage: sum(costs[m].block for m in modes) for stage, modes in stages.items()}
    peaks = {stage: _peak(modes, costs, gradients) for stage, modes in stages.items()}
    # What gradients of weights need later is about what is saved without recomputation.
    late = {stage: len(modes) * costs["none"].block for stage, modes in stages.items()}
    held = most = 0.0
    for kind, stage, _ in row:
        match kind:
            case ActionKind.FORWARD:
                held += saved[stage]
                continue
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                held -= saved[stage]
                most = max(most, held + peaks[stage])
                held += len(stages[stage]) * gradients
                held += late[stage] * (kind is ActionKind.BACKWARD_INPUT)
            case ActionKind.BACKWARD_WEIGHT:
                held -= late[stage]
        most = max(most, held)
    return most


def _peak(modes: Sequence[Mode], costs: BlockCosts, gradients: float) -> float:
    """The most GiB of a stage's backward, which frees the last block first."""
    held = most = 0.0
    for index, mode in enumerate(modes):
        held += costs[mode].block
        added = (len(modes) - index) * gradients
        most = max(most, held + costs[mode].beside + added)
    return most
