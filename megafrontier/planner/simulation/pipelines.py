"""A step of a pipeline: some of its ranks on the clock, and their actions in the whole table.

A rank alone shows how long each of its actions takes, and what it holds. When an action begins
depends on other ranks, which `pipeline.simulate` computes for the table that training runs.
"""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.config import Config
from megafrontier.pipeline.division import Division
from megafrontier.pipeline.simulate import StageCosts
from megafrontier.pipeline.simulate import simulate as run_table
from megafrontier.pipeline.table import Action, ActionKind
from megafrontier.pipeline.transfers import with_transfers
from megafrontier.plan.footprint import GIB
from megafrontier.plan.resolve import RunPlan
from megafrontier.planner.simulation.rank import Counted, Simulated
from megafrontier.planner.simulation.rates import Rates

ROUNDS = 2
"""Micro-batches that are simulated, as a multiple of the stages: those in flight, and as many that
find them so."""
Actions = dict[tuple[int, ActionKind], list[dict[str, float]]]
"""By stage and kind, the differences of all counts over each action."""


def combine(
    config: Config, plan: RunPlan, rates: Rates, counted: dict[int, Counted], micro_batches: int
) -> Simulated:
    """The step of all ranks of a pipeline.

    counted: steps of some ranks of the pipeline, `Division.distinct_ranks`.
    micro_batches: of a real step.
    """
    division = plan.division
    actions = {rank: _actions(each) for rank, each in counted.items()}
    costs = _costs(division, actions)
    is_early = not next(iter(counted.values())).trainer.engine.delays_early_messages
    rows = with_transfers(division.table(micro_batches), is_early)
    transfer = _transfer_seconds(config, plan, rates)
    overlaps = config.partition.overlap != "none"
    table = run_table(rows, costs, transfer_seconds=transfer, overlap=overlaps)
    tail = max(
        each.marks[-1]["seconds"] - each.marks[-2]["seconds"] + _excess(actions[rank])
        for rank, each in counted.items()
    )
    steps = {}
    for rank, each in counted.items():
        more = micro_batches - each.loader.micro_batches
        usual = [_medians(of) for of in actions[rank].values()]
        step = each.result(config, partial(_extend, usual, more))
        ahead = _held_ahead(division, rank, actions[rank], each.loader.micro_batches, micro_batches)
        for memory in step.memories:
            memory["activations"] += ahead / GIB
        steps[rank] = step
    fullest = max(steps.values(), key=lambda step: step.gib)
    return replace(fullest, seconds=table.seconds + tail, bubble=table.bubble)


def _held_ahead(
    division: Division, rank: int, actions: Actions, simulated: int, micro_batches: int
) -> float:
    """Bytes that a rank holds more at most if a step has so many micro-batches: more of them are in
    flight then."""

    def most(number: int) -> float:
        held = [0.0]
        for action in division.table(min(number, ROUNDS * division.stages))[rank]:
            held.append(held[-1] + changes[action.stage, action.kind])
        return max(held)

    changes = {key: _medians(of)["held"] for key, of in actions.items()}
    return max(0.0, most(micro_batches) - most(simulated))


def _actions(counted: Counted) -> Actions:
    row = counted.trainer.runner.row(counted.loader.micro_batches)  # type: ignore[attr-defined]
    done = (item for item in row if isinstance(item, Action))
    found: Actions = defaultdict(list)
    for action, before, after in zip(done, counted.marks[:-2], counted.marks[1:-1], strict=True):
        changes: dict[str, float] = {name: after[name] - before[name] for name in after}
        found[action.stage, action.kind].append(changes)
    return found


def _medians(changes: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(each.get(name, 0.0) for each in changes) for name in changes[-1]}


def _excess(actions: Actions) -> float:
    """Seconds beyond those of usual actions: first ones wait for what the last step published, and
    the last backward of a stage also sums its gradients over the replicas."""
    seconds = [[each["seconds"] for each in of] for of in actions.values()]
    return sum(sum(of) - len(of) * median(of) for of in seconds)


def _extend(usual: list[dict[str, float]], more: int, total: dict[str, float]) -> dict[str, float]:
    """The totals of a step with `more` micro-batches, each with one of the `usual` actions."""
    return {
        name: value + more * sum(each.get(name, 0.0) for each in usual)
        for name, value in total.items()
    }


def _costs(division: Division, actions: dict[int, Actions]) -> list[StageCosts]:
    """Of every stage. Stages of ranks that were not simulated are like one that was, by the number
    of their blocks."""
    known = {}
    for of in actions.values():
        for stage in {stage for stage, _ in of}:
            known[stage] = _costs_of(stage, of)
    inner = [stage for stage in known if 0 < stage < division.stages - 1] or list(known)
    found = []
    for stage, blocks in enumerate(division.layers):
        like = min(inner, key=lambda other: abs(division.layers[other] - blocks))
        share = blocks / division.layers[like]
        found.append(known.get(stage) or _scaled(known[like], share))
    return found


def _costs_of(stage: int, actions: Actions) -> StageCosts:
    def seconds(*kinds: ActionKind) -> float:
        return sum(
            _medians(actions[stage, kind])["seconds"]
            for kind in kinds
            if actions.get((stage, kind))
        )

    inputs = seconds(ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    return StageCosts(seconds(ActionKind.FORWARD), inputs, seconds(ActionKind.BACKWARD_WEIGHT))


def _scaled(costs: StageCosts, share: float) -> StageCosts:
    return StageCosts(
        costs.forward * share, costs.backward_input * share, costs.backward_weight * share
    )


def _transfer_seconds(config: Config, plan: RunPlan, rates: Rates) -> float:
    """Of a hidden state over the slowest border between two stages."""
    ranks = plan.shape.pipeline_ranks(0)
    levels = {plan.levels.level_between(*pair) for pair in pairwise(ranks)}
    splits = plan.shape.splits
    elements = config.train.micro_batch * config.model.sequence_length * config.model.hidden
    elements //= splits.tensor * splits.context

    def seconds(level: int) -> float:
        codec = plan.activations.codec(level, DTYPES[config.train.precision])
        size = codec.message_bytes(elements)
        return rates.links[plan.levels.names[level]].seconds(size, 1)

    return max(map(seconds, levels))
