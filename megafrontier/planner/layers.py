"""A step of a deep model from steps of two shallow ones: every further block costs the same."""

from dataclasses import replace
from math import lcm
from typing import Any

from megafrontier.config import Config
from megafrontier.plan.resolve import RunPlan, resolve_plan
from megafrontier.planner.simulation.rank import Simulated
from megafrontier.planner.simulation.rates import Rates
from megafrontier.planner.simulation.simulate import MICRO_BATCHES, simulate
from megafrontier.planner.sites import add_sites

FEWEST = 4
"""Blocks of the smaller model at least: more than are prefetched and published ahead."""


def shallow_layers(config: Config) -> tuple[int, int]:
    """Blocks of the two models. They differ from each other and from the whole model by whole
    periods, in which blocks of each kind and the buffers of unsharded units come once around."""
    model, partition = config.model, config.partition
    buffers = 1 if partition.overlap == "none" else partition.prefetch + 1
    period = lcm(model.attention.period, model.moe.every if model.moe else 1, buffers)
    least = FEWEST + (model.moe.first if model.moe else 0)
    fewer = least + (model.layers - least) % period
    return fewer, fewer + period


def simulate_blocks(config: Config, plan: RunPlan, rates: Rates | None = None) -> Simulated:
    """`simulate` of a rank, in a time that does not depend on the number of blocks, unless their
    modes of activation checkpointing differ. Of a pipeline, whose ranks have few blocks, it is the
    number of micro-batches that does not count. `rates`: default: those
    of the plan's machine file.

    Raises UserError as `simulate`.
    """
    layers = config.model.layers
    counts = shallow_layers(config)
    differ = len(set(config.checkpointing)) > 1
    if plan.division.ranks > 1:
        step = simulate(config, plan, rates, micro_batches=MICRO_BATCHES)
        return add_sites(config, plan, step)
    if layers <= counts[1] or differ:
        return add_sites(config, plan, simulate(config, plan, rates))
    fewer, more = (_with_layers(config, count, plan.levels.ranks, rates) for count in counts)
    times = (layers - counts[0]) / (counts[1] - counts[0])
    return add_sites(config, plan, _between(fewer, more, times))


def _with_layers(config: Config, layers: int, ranks: int, rates: Rates | None) -> Simulated:
    shallow = replace(config, model=replace(config.model, layers=layers))
    return simulate(shallow, resolve_plan(shallow, ranks), rates)


def _between(fewer: Any, more: Any, times: float) -> Any:
    """The value on the line through two, which may lie in a dataclass or a mapping."""
    if isinstance(fewer, Simulated):
        names = ["seconds", "flops", "sent", "exposed", "computing", "memories"]
        names += ["worst_memories"] * (more.worst_memories is not None)
        pairs = {name: (getattr(fewer, name), getattr(more, name)) for name in names}
        return replace(more, **{name: _between(*pair, times) for name, pair in pairs.items()})
    if isinstance(fewer, list):
        return [_between(*pair, times) for pair in zip(fewer, more, strict=True)]
    if isinstance(fewer, dict):
        return {name: _between(fewer[name], more[name], times) for name in fewer}
    return fewer + times * (more - fewer)
