"""Rows of a report about the experts of a mixture."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from megafrontier.report.read import Run

LAST = 100
"""Steps at the end of a run whose median is shown."""


def expert_rows(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Titles and a cell for each run; nothing if no run has experts."""
    if not any("expert_tokens" in line for run in runs for line in run.steps):
        return {}
    ratios = {
        "fullest expert, tokens over the mean": "expert_imbalance",
        "fullest expert rank, tokens over the mean": "expert_rank_imbalance",
    }
    rows = {title: [_of_blocks(run, key) for run in runs] for title, key in ratios.items()}
    rows["share of tokens of each expert"] = [_shares(run) for run in runs]
    rows["router entropy, nats"] = [_of_blocks(run, "router_entropy") for run in runs]
    rows["dropped tokens"] = [_dropped(run) for run in runs]
    return rows


def _last(run: Run, key: str) -> list[Any]:
    return [line[key] for line in run.steps[-LAST:] if key in line]


def _of_blocks(run: Run, key: str) -> str:
    """The median over steps of the blocks' mean and of the largest: `1.21, worst block 1.46`."""
    values = _last(run, key)
    if not values:
        return ""
    mean = median(sum(blocks) / len(blocks) for blocks in values)
    worst = min if key == "router_entropy" else max
    return f"{mean:.3g}, worst block {median(worst(blocks) for blocks in values):.3g}"


def _shares(run: Run) -> str:
    """The smallest and the largest share over the last steps: `0.098 to 0.15`."""
    values = _last(run, "expert_tokens")
    if not values:
        return ""
    totals = [sum(tokens) for tokens in zip(*values, strict=True)]
    return f"{min(totals) / sum(totals):.2g} to {max(totals) / sum(totals):.2g}"


def _dropped(run: Run) -> str:
    values = [line["dropped_tokens"] for line in run.steps if "dropped_tokens" in line]
    return f"{sum(values):.0f}" if values else ""
