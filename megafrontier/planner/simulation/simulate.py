"""A training step on the clock: of the whole run, from one rank or from some of a pipeline's."""

from dataclasses import replace
from functools import partial

from megafrontier.config import Config
from megafrontier.plan.resolve import RunPlan
from megafrontier.planner.simulation.pipelines import ROUNDS, combine
from megafrontier.planner.simulation.rank import Marks, Prepare, Simulated, run_rank
from megafrontier.planner.simulation.rates import UNKNOWN, Rates
from megafrontier.planner.simulation.routing import RoutingKind, worst_routing

MICRO_BATCHES = 3
"""Simulated in a step by default: a first one, a usual one and a last one. Each further one is as
the usual one."""


def simulate(
    config: Config,
    plan: RunPlan,
    rates: Rates | None = None,
    prepare: Prepare | None = None,
    micro_batches: int | None = None,
) -> Simulated:
    """One optimizer step, after one that was not counted, on the rank that holds the most.

    rates: default: those of the plan's machine file.
    prepare: changes each trainer before its steps.
    micro_batches: simulated one by one at most. Default: 3; of a pipeline, as many as fill it
    twice, because fewer do not show its memory.

    Of a mixture of experts: with uniform routing, and the memory with the worst routing too.

    Raises UserError for a machine file that lacks a rate.
    """
    rates = rates or Rates.of(plan.machine)
    step = _simulate(config, plan, rates, prepare, micro_batches, "uniform")
    if config.model.moe is None:
        return step
    if plan.division.ranks == 1:
        micro_batches = min(micro_batches or MICRO_BATCHES, 2)  # the third needs no other memory
    worst = _simulate(config, plan, UNKNOWN, prepare, micro_batches, worst_routing(config))
    return replace(step, worst_memories=worst.memories)


def _simulate(
    config: Config,
    plan: RunPlan,
    rates: Rates,
    prepare: Prepare | None,
    micro_batches: int | None,
    routing: RoutingKind,
) -> Simulated:
    division = plan.division
    if division.ranks == 1:
        most = micro_batches or MICRO_BATCHES
        counted = run_rank(config, plan, rates, 0, most, prepare, routing)
        more = counted.loader.all - counted.loader.micro_batches
        return counted.result(config, partial(_with_micro_batches, counted.marks, more))
    ranks = plan.shape.pipeline_ranks(0)
    most = micro_batches or ROUNDS * division.stages
    steps = {
        place: run_rank(config, plan, rates, ranks[place], most, prepare, routing)
        for place in division.distinct_ranks()
    }
    return combine(config, plan, rates, steps, next(iter(steps.values())).loader.all)


def _with_micro_batches(marks: Marks, more: int, total: dict[str, float]) -> dict[str, float]:
    """The totals with `more` micro-batches like the second one."""
    if not more:
        return total
    before, after = marks[1:3]
    return {name: value + more * (after[name] - before[name]) for name, value in total.items()}
