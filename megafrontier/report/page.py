"""One HTML page that holds everything: a table of the runs and the pictures."""

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path

from megafrontier.common.errors import UserError
from megafrontier.report.draw import draw_loss, draw_throughput, draw_traffic, last_smooth
from megafrontier.report.read import Run, all_levels, levels_of, read_runs, strategy_of
from megafrontier.report.style import level_colours, run_look, short

_PICTURES = {
    "loss": ("Loss", "Training loss of every step (faint) and smoothed; diamonds: validation."),
    "throughput": ("Throughput", "Every step (faint) and smoothed, with the median of all steps."),
    "traffic": (
        "Traffic per level",
        "What one rank hands to the collectives of each level in one step (mean over ranks, "
        "median over steps), and the time they take. Compute may hide part of that time.",
    ),
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #666; --line: #ddd; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --soft: #a0a0a0; --line: #3a3a3a; --back: #161616; }
}
body { margin: 0 auto; max-width: 1080px; padding: 1.5rem; background: var(--back);
       color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0; }
p { color: var(--soft); margin: .2rem 0 .6rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem 0 .35rem 1.8rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; } td:first-child, thead th { color: var(--soft); font-weight: 500; }
thead th.run { color: var(--ink); font-weight: 600; }
i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .45em;
    outline: 1px solid var(--soft); }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px;
      outline: 1px solid var(--line); }
"""


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Draw run directories into `out`: three PNG files and the report.html that embeds them.

    Default `out`: the run's own directory for one run, ./report for several. Returns the page.
    Raises UserError for directories without metrics, a missing matplotlib, and an `out` that
    cannot be written.
    """
    loaded = read_runs(runs)
    folder = out or (Path(runs[0]) if len(runs) == 1 else Path("report"))
    page = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_loss(loaded, folder / "loss.png")
        draw_throughput(loaded, folder / "throughput.png")
        draw_traffic(loaded, folder / "traffic.png")
        page.write_text(_page(loaded, folder), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot write the report: {error.strerror}") from error
    return page


def _page(runs: Sequence[Run], folder: Path) -> str:
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    pictures = "\n".join(_picture(folder, name) for name in _PICTURES)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}: megafrontier report</title>
<style>{_STYLE}</style></head>
<body><h1>{html.escape(title)}</h1>
<div class="wide">{_table(runs)}</div>
{pictures}
</body></html>
"""


def _picture(folder: Path, name: str) -> str:
    title, caption = _PICTURES[name]
    data = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
    image = f'<img alt="{title}" src="data:image/png;base64,{data}">'
    return f"<h2>{title}</h2><p>{caption}</p>{image}"


def _table(runs: Sequence[Run]) -> str:
    """A column a run, so that numbers to compare stand side by side and names have room."""
    heads = "".join(
        f'<th class="run">{_swatch(run_look(i)["color"])}{html.escape(run.label)}</th>'
        for i, run in enumerate(runs)
    )
    rows = [_row(html.escape(title), runs, cell) for title, cell in _ROWS.items()]
    levels = all_levels(runs)
    colours = level_colours(levels)
    for level in levels:
        title = f"{_swatch(colours[level])}{html.escape(level)}: sent per step"
        rows.append(_row(title, runs, _sent(level)))
    return f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(title: str, runs: Sequence[Run], cell: Callable[[Run], str]) -> str:
    cells = "".join(f"<td>{html.escape(cell(run)) or '–'}</td>" for run in runs)
    return f"<tr><td>{title}</td>{cells}</tr>"


def _swatch(colour: str) -> str:
    return f'<i style="background:{colour}"></i>'


def _sent(level: str) -> Callable[[Run], str]:
    def cell(run: Run) -> str:
        sent = run.traffic(level, "bytes")
        return "" if sent is None else short(sent, "B")

    return cell


def _steps(run: Run) -> str:
    last = run.steps[-1]["step"]
    planned = f" of {run.config.train.steps}" if run.config else ""
    skipped = f", {len(run.skipped)} skipped" if run.skipped else ""
    return f"{last}{planned}{skipped}"


def _parameters(run: Run) -> str:
    if run.config is None:
        return ""
    from megafrontier.model.flops import parameter_count

    return short(parameter_count(run.config.model))


def _train_loss(run: Run) -> str:
    losses = run.series("loss")[1]
    return f"{last_smooth(losses):.4f}" if losses else ""


def _middle(key: str, show: Callable[[float], str]) -> Callable[[Run], str]:
    def cell(run: Run) -> str:
        value = run.middle(key)
        return "" if value is None else show(value)

    return cell


def _peak_memory(run: Run) -> str:
    values = run.series("memory_gib")[1]
    return f"{max(values):.2f} GiB" if values else ""


_ROWS: dict[str, Callable[[Run], str]] = {
    "strategy": lambda run: strategy_of(run.config) if run.config else "",
    "levels": lambda run: levels_of(run.config) if run.config else "",
    "parameters": _parameters,
    "steps": _steps,
    "train loss, smoothed": _train_loss,
    "validation loss": lambda run: f"{run.evaluations[-1][1]:.4f}" if run.evaluations else "",
    "tokens per second, median": _middle("tokens_per_second", short),
    "time of a step, median": _middle("step_seconds", lambda value: short(value, "s")),
    "MFU, median": _middle("mfu", lambda value: f"{value:.1%}"),
    "peak memory of one rank": _peak_memory,
}
