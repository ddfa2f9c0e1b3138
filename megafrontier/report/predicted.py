"""Rows of a report that set what `plan` predicts beside what was measured."""

from collections.abc import Callable, Sequence

from megafrontier.common.errors import UserError
from megafrontier.config import load_machine
from megafrontier.report.read import Run, all_levels

Pair = tuple[float, float | None, str]
"""Predicted and measured, and their unit."""
Shorten = Callable[[float, str], str]


def predicted_rows(runs: Sequence[Run], short: Shorten) -> dict[str, list[str]]:
    """Step, bytes and waits as predicted, by title. Empty cells for runs that cannot be planned.

    short: writes a number with a unit.
    """
    found = [_predict(run) for run in runs]
    rows: dict[str, list[str]] = {}
    for level in (None, *all_levels(runs)):
        for title in ("seconds per step", "sent per step", "waited per step"):
            name = f"{level}: {title}" if level else title
            cells = [_cell(each.get((level, title)), short) for each in found]
            if any(cells):
                rows[f"{name}, predicted (measured)"] = cells
    return rows


def _cell(pair: Pair | None, short: Shorten) -> str:
    if pair is None:
        return ""
    predicted, measured, unit = pair
    beside = "" if measured is None else f" ({short(measured, unit)})"
    return short(predicted, unit) + beside


def _predict(run: Run) -> dict[tuple[str | None, str], Pair]:
    """By level (None: all) and title. A machine file without rates gives bytes alone."""
    # They import torch.
    from megafrontier.plan.resolve import resolve_plan
    from megafrontier.planner.layers import simulate_blocks
    from megafrontier.planner.simulation.rates import UNKNOWN, Rates

    newest = run.steps[-1]
    ranks = run.ranks(newest.get("tokens_per_second"), newest.get("tflops_per_device"))
    if run.config is None or ranks is None:
        return {}
    try:
        plan = resolve_plan(run.config, ranks)
        try:
            rates = Rates.of(load_machine(run.config.machine))
        except UserError:
            rates = UNKNOWN
        step = simulate_blocks(run.config, plan, rates)
    except UserError:
        return {}
    found: dict[tuple[str | None, str], Pair] = {}
    if rates is not UNKNOWN:
        found[None, "seconds per step"] = step.seconds, run.median("step_seconds"), "s"
    for level, sent in step.sent.items():
        found[level, "sent per step"] = sent, run.traffic(level, "bytes"), "B"
        if rates is not UNKNOWN:
            found[level, "waited per step"] = step.exposed[level], run.waited(level), "s"
    return found
