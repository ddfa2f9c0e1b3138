"""What a report shows of `log.tensor_norms`, of corpora and of clipping."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from megafrontier.report.read import Metrics, Run

LAST = 100
"""Steps at the end of a run whose median is shown."""
BY_BLOCK = {
    "grad_norm_blocks": "gradient norm",
    "update_norm_blocks": "update norm",
    "attention_logit_bound": "bound of logits",
}


def measured_rows(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Titles and a cell for each run, without titles that no run has a cell for."""
    rows = {"clipped steps": [_clipped(run) for run in runs]}
    rows["clipped heads: last steps, most"] = [_clipped_heads(run) for run in runs]
    for name in _names(runs, "corpus_loss"):
        rows[f"corpus {name}"] = [_corpus(run, name) for run in runs]
    for kind in _names(runs, "grad_norm_kinds"):
        rows[f"norms of {kind}: gradient, update"] = [_norms(run, kind) for run in runs]
    return {title: cells for title, cells in rows.items() if any(cells)}


def has_blocks(run: Run) -> bool:
    """Whether a run has measured anything by block."""
    return any(metric in line for line in run.steps for metric in BY_BLOCK)


def by_block(run: Run, metric: str) -> dict[str, float]:
    """A metric of each block, as medians over the last measured steps."""
    found = {name: _last(run, metric, name) for name in _names([run], metric)}
    return {name: value for name, value in found.items() if value is not None}


def draw_blocks(axes: Sequence[Any], runs: Sequence[Run], looks: Sequence[dict[str, Any]]) -> None:
    """Draw each metric of `BY_BLOCK` over the blocks, one line for each run."""
    names = list(dict.fromkeys(name for run in runs for name in _names([run], "grad_norm_blocks")))
    for axis, (metric, title) in zip(axes, BY_BLOCK.items(), strict=True):
        for run, look in zip(runs, looks, strict=True):
            values = by_block(run, metric)
            places = [names.index(name) for name in values]
            axis.plot(places, list(values.values()), **look, marker="o", ms=3)
        axis.set_ylabel(title)
        axis.set_yscale("log")
    every = -(-len(names) // 16)
    axes[-1].set_xticks(range(0, len(names), every), names[::every], rotation=30, ha="right")


def _values(run: Run, metric: str) -> list[Metrics]:
    return [line[metric] for line in run.steps if metric in line]


def _names(runs: Sequence[Run], metric: str) -> list[str]:
    return list(dict.fromkeys(name for run in runs for of in _values(run, metric) for name in of))


def _last(run: Run, metric: str, name: str) -> float | None:
    found = [of[name] for of in _values(run, metric)[-LAST:] if of.get(name) is not None]
    return median(found) if found else None


def _clipped(run: Run) -> str:
    values = run.series("clipped")[1]
    return f"{sum(values) / len(values):.1%}" if values else ""


def _clipped_heads(run: Run) -> str:
    values = run.series("clipped_heads")[1]
    return f"{median(values[-LAST:]):g}, {max(values):g}" if values else ""


def _corpus(run: Run, name: str) -> str:
    """The tokens of a corpus in all steps, and its loss in the last ones."""
    loss = _last(run, "corpus_loss", name)
    tokens = sum(of.get(name, 0) for of in _values(run, "corpus_tokens"))
    return "" if loss is None else f"{tokens:,.0f} tokens, loss {loss:.4f}"


def _norms(run: Run, kind: str) -> str:
    both = [_last(run, f"{of}_norm_kinds", kind) for of in ("grad", "update")]
    shown = ", ".join("–" if value is None else f"{value:.3g}" for value in both)
    return shown if both != [None, None] else ""
