"""The pictures of a report and the HTML page that embeds them."""

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import numpy as np

from megafrontier.common.errors import UserError
from megafrontier.config import Config
from megafrontier.report.certificates import certificate_rows
from megafrontier.report.experts import expert_rows
from megafrontier.report.goodput import draw_spans, goodput_rows
from megafrontier.report.measured import BY_BLOCK, draw_blocks, has_blocks, measured_rows
from megafrontier.report.predicted import predicted_rows
from megafrontier.report.read import Run, all_levels, levels_of, read_runs, strategy_of

KINDS = ("weights", "gradients", "activations", "tokens")
"""The kinds of `comm.ledger`, without its import of torch."""
FEW_POINTS = 20
"""Fewer points than this are drawn with markers and not smoothed."""
# Okabe and Ito's palette, which is readable with any colour vision. Its yellow is too pale.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
RUN_DASHES = ("-", "--", "-.", ":")
CAPTIONS = {
    "loss": "Training loss of every step (faint) and smoothed; diamonds: validation.",
    "throughput": "Every step (faint) and smoothed.",
    "traffic": "What one rank sends over each level in one step (mean over ranks, median over "
    "steps), and the time that the collectives take. Computation may hide part of that time.",
    "blocks": "Norms of gradients and updates, and the bound of attention's logits, of each block: "
    "medians over the last measured steps.",
    "goodput": "What the run's time was spent on, from its first launch to its newest step. Steps "
    "done again were lost by a failure. Bars too short to be seen are drawn as steps above.",
}
STYLE = """
body { margin: 0 auto; max-width: 1080px; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif; }
div { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .35rem 0 .35rem 1.8rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
p { color: #666; margin: .2rem 0 .6rem; } img { width: 100%; height: auto; }
"""
PLOT_STYLE = {
    "text.parse_math": False,  # a run's name may contain any character
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.formatter.useoffset": False,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 150,
}


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Draw run directories into `out`: PNG files and the report.html that embeds them.

    Default `out`: the run's own directory for one run, ./report for several. Returns the page.
    Raises UserError for directories without metrics, a missing matplotlib, and an `out` that
    cannot be written.
    """
    runs = read_runs(directories)
    folder = out or (Path(directories[0]) if len(runs) == 1 else Path("report"))
    page = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_loss(runs, folder / "loss.png")
        draw_throughput(runs, folder / "throughput.png")
        draw_traffic(runs, folder / "traffic.png")
        if _is_drawn("blocks", runs):
            draw_norms(runs, folder / "blocks.png")
        if _is_drawn("goodput", runs):
            draw_goodput(runs, folder / "goodput.png")
        page.write_text(_page(runs, folder), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot write the report: {error.strerror}") from error
    return page


def pyplot() -> Any:
    """matplotlib.pyplot without a screen, in the style of the report.

    Raises UserError if matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "report: needs the package matplotlib: pip install megafrontier[report]"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(PLOT_STYLE)
    return plt


def run_look(index: int) -> dict[str, Any]:
    """Colour and dashes of run number `index` in every picture. 28 runs look different."""
    dashes = RUN_DASHES[index // len(RUN_COLOURS) % len(RUN_DASHES)]
    return {"color": RUN_COLOURS[index % len(RUN_COLOURS)], "linestyle": dashes}


def level_colours(levels: Sequence[str]) -> dict[str, Any]:
    """Colours of levels, fastest first: slower levels are darker."""
    scale = pyplot().get_cmap("viridis_r")
    last = max(len(levels) - 1, 1)
    return {level: scale(0.15 + 0.8 * i / last) for i, level in enumerate(levels)}


def draw_loss(runs: Sequence[Run], path: Path) -> None:
    """Training and validation loss. Below them learning rate and gradient norm."""
    figure, (top, *below) = _panels([4.2, 1.2, 1.2])
    for index, run in enumerate(runs):
        colour = run_look(index)["color"]
        if run.evaluations:
            top.plot(*zip(*run.evaluations, strict=True), "D", color=colour, ms=4, zorder=3)
    _draw_series(top, runs, "loss", is_smoothed=True)
    top.set_ylabel("loss (nats per token)")
    for axis, key, title in zip(below, ("lr", "grad_norm"), ("lr", "grad norm"), strict=True):
        _draw_series(axis, runs, key, is_smoothed=False)
        axis.set_ylabel(title)
    _finish_panels(figure, [_loss_label(run) for run in runs])
    _save(figure, path)


def draw_throughput(runs: Sequence[Run], path: Path) -> None:
    """Tokens per second, seconds per step, and MFU (or TFLOP/s if the peak is unknown)."""
    has_mfu = any(run.series("mfu")[1] for run in runs)
    titles = {"tokens_per_second": "tokens per second", "step_seconds": "seconds per step"}
    titles |= {"mfu": "MFU"} if has_mfu else {"tflops_per_device": "TFLOP/s per device"}
    figure, axes = _panels([2.2] * len(titles))
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        _draw_series(axis, runs, key, is_smoothed=True)
        axis.set_title(title)
        axis.yaxis.set_major_formatter(lambda value, _: short(value))
    _finish_panels(figure, [run.label for run in runs])
    _save(figure, path)


def draw_traffic(runs: Sequence[Run], path: Path) -> None:
    """Bytes that one rank sends over each level in a step, and the seconds that they take."""
    levels = all_levels(runs)
    height = 1.8 + (0.32 * len(levels) + 0.2) * len(runs)
    figure, axes = pyplot().subplots(
        ncols=2,
        figsize=(10, height),
        sharey=True,
        layout="constrained",
        gridspec_kw={"wspace": 0.1},
    )
    for axis, quantity, unit in zip(axes, ("bytes", "seconds"), ("B", "s"), strict=True):
        _draw_bars(axis, runs, levels, quantity, unit)
    axes[0].set_title("sent by one rank in one step")
    axes[1].set_title("time in one step")
    axes[0].set_yticks(range(len(runs)), [fill(run.label, 24) for run in runs])
    axes[0].invert_yaxis()
    handles, names = axes[0].get_legend_handles_labels()
    if levels:
        figure.legend(handles, names, loc="outside lower center", ncols=5)
    else:
        figure.suptitle("No traffic: no level was crossed.")
    _save(figure, path)


def _is_drawn(picture: str, runs: Sequence[Run]) -> bool:
    """Whether a picture of `CAPTIONS` has something to show."""
    shows = {"blocks": has_blocks, "goodput": lambda run: bool(run.spans)}
    return picture not in shows or any(map(shows[picture], runs))


def draw_norms(runs: Sequence[Run], path: Path) -> None:
    """What the runs have measured by block."""
    figure, axes = _panels([1.8] * len(BY_BLOCK))
    draw_blocks(axes, runs, [run_look(i) for i in range(len(runs))])
    _add_legend(figure, [run.label for run in runs])
    _save(figure, path)


def draw_goodput(runs: Sequence[Run], path: Path) -> None:
    """What the time of each run was spent on."""
    figure, axes = pyplot().subplots(
        ncols=2,
        figsize=(10, 2.0 + 0.5 * len(runs)),
        sharey=True,
        layout="constrained",
        gridspec_kw={"wspace": 0.1, "width_ratios": [1.6, 1]},
    )
    draw_spans(figure, axes, runs)
    _save(figure, path)


def _draw_bars(
    axis: Any, runs: Sequence[Run], levels: Sequence[str], quantity: str, unit: str
) -> None:
    colours = level_colours(levels)
    height = 0.8 / max(len(levels), 1)
    for number, level in enumerate(levels):
        rows = [row + (number - (len(levels) - 1) / 2) * height for row in range(len(runs))]
        values = [run.traffic(level, quantity) for run in runs]
        lengths = [value or 0.0 for value in values]
        bars = axis.barh(rows, lengths, 0.9 * height, color=colours[level], label=level)
        texts = ["" if value is None else short(value, unit) for value in values]
        axis.bar_label(bars, texts, padding=3, fontsize=9)
    axis.xaxis.set_major_formatter(lambda value, _: short(value, unit))
    axis.locator_params(axis="x", nbins=4)
    axis.margins(x=0.18)  # room for the texts at the ends of the bars
    axis.grid(axis="y", visible=False)


def _panels(heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """Axes of these heights in inches, one below the other, over one axis of steps."""
    figure, axes = pyplot().subplots(
        len(heights),
        figsize=(10, 1.2 + sum(heights)),
        height_ratios=heights,
        sharex=True,
        layout="constrained",
    )
    return figure, list(axes)


def _draw_series(axis: Any, runs: Sequence[Run], key: str, is_smoothed: bool) -> None:
    """One line for each run. The view leaves out the most extreme 1 % if they would flatten it."""
    drawn: list[float] = []
    for index, run in enumerate(runs):
        look = run_look(index)
        steps, values = run.series(key)
        drawn += values
        if len(steps) < FEW_POINTS:
            axis.plot(steps, values, **look, marker="o", ms=4)
        elif is_smoothed:
            axis.plot(steps, values, color=look["color"], alpha=0.25, linewidth=0.8)
            axis.plot(steps, smooth(values), **look, linewidth=1.8)
        else:
            axis.plot(steps, values, **look, linewidth=1.2)
    if len(drawn) >= 2 * FEW_POINTS:
        low, high = np.percentile(drawn, [1, 99])
        margin = 0.15 * (high - low) or 0.05 * abs(high) or 1.0
        bottom, top = axis.get_ylim()
        axis.set_ylim(max(bottom, low - margin), min(top, high + margin))


def smooth(values: Sequence[float]) -> list[float]:
    """Moving median over up to 101 points, centred on each point. Few values stay as they are.

    The window shrinks at both ends, so that the fast fall at the start of a training stays visible.
    """
    if len(values) < FEW_POINTS:
        return list(values)
    reach, last = min(max(len(values) // 80, 3), 50), len(values) - 1
    reaches = [min(reach, max(i, 3), max(last - i, 3)) for i in range(len(values))]
    return [median(values[max(0, i - r) : i + r + 1]) for i, r in enumerate(reaches)]


def _last_loss(run: Run, digits: int) -> str:
    """The newest smoothed training loss."""
    losses = run.series("loss")[1][-FEW_POINTS:]
    return f"{smooth(losses)[-1]:.{digits}f}" if losses else ""


def _loss_label(run: Run) -> str:
    parts = [f"train {loss}"] if (loss := _last_loss(run, 3)) else []
    parts += [f"validation {run.evaluations[-1][1]:.3f} ◆"] if run.evaluations else []
    parts += [f"{len(run.skipped)} skipped"] if run.skipped else []
    return f"{run.label}:  {', '.join(parts)}"


def _finish_panels(figure: Any, labels: Sequence[str]) -> None:
    """Whole steps on the shared x axis, and a legend of the runs below it."""
    from matplotlib.ticker import MaxNLocator

    axis = figure.axes[-1]
    axis.set_xlabel("optimizer step")
    axis.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    _add_legend(figure, labels)


def _add_legend(figure: Any, labels: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    texts = [fill(label, 105) for label in labels]
    handles = [Line2D([], [], **run_look(i), linewidth=1.8) for i in range(len(labels))]
    figure.legend(handles, texts, loc="outside lower center")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path)
    pyplot().close(figure)


def _page(runs: Sequence[Run], folder: Path) -> str:
    title = html.escape(runs[0].label if len(runs) == 1 else f"{len(runs)} runs")
    names = [name for name in CAPTIONS if _is_drawn(name, runs)]
    pictures = "\n".join(_picture(folder, name) for name in names)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{title}: megafrontier report</title>\n<style>{STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n<div>{_table(runs)}</div>\n{pictures}\n</body></html>\n"
    )


def _picture(folder: Path, name: str) -> str:
    data = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
    image = f'<img alt="{name}" src="data:image/png;base64,{data}">'
    return f"<h2>{name.capitalize()}</h2><p>{CAPTIONS[name]}</p>{image}"


def _table(runs: Sequence[Run]) -> str:
    """One column for each run, so that numbers to compare stand side by side."""
    rows = {title: [cell(run) for run in runs] for title, cell in ROWS.items()}
    rows |= goodput_rows(runs)
    rows |= measured_rows(runs)
    rows |= expert_rows(runs)
    for title in dict.fromkeys(title for run in runs for title in run.results):
        results = [run.results.get(title) for run in runs]
        rows[title] = ["" if value is None else f"{value:.4f}" for value in results]
    for level in all_levels(runs):
        sent = [_shown(run.traffic(level, "bytes"), "B") for run in runs]
        rows[f"{level}: sent per step"] = sent
        for kind in KINDS:
            shown = [_shown_kind(run, level, kind) for run in runs]
            if any(shown):
                rows[f"{level}: {kind}"] = shown
    rows |= predicted_rows(runs, short)
    rows |= certificate_rows(runs)
    heads = "".join(f"<th>{html.escape(run.label)}</th>" for run in runs)
    body = ""
    for title, shown in rows.items():
        cells = "".join(f"<td>{html.escape(cell) or '–'}</td>" for cell in shown)
        body += f"<tr><td>{html.escape(title)}</td>{cells}</tr>"
    return f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _shown_kind(run: Run, level: str, kind: str) -> str:
    """What a step moves over a level: `4 MB, 12 ms, 60% hidden`."""
    sent, seconds, hidden = (run.traffic(level, of, kind) for of in ("bytes", "seconds", "hidden"))
    if sent is None or seconds is None or hidden is None:
        return ""
    share = f", {hidden / seconds:.0%} hidden" if seconds else ""
    return f"{short(sent, 'B')}, {short(seconds, 's')}{share}"


def _shown(value: float | None, unit: str = "") -> str:
    return "" if value is None else short(value, unit)


def _steps(run: Run) -> str:
    planned = f" of {run.config.train.steps}" if run.config else ""
    skipped = f", {len(run.skipped)} skipped" if run.skipped else ""
    return f"{run.steps[-1]['step']}{planned}{skipped}"


def _parameters(config: Config) -> str:
    from megafrontier.model.flops import parameter_count  # imports torch

    return short(parameter_count(config.model))


ROWS: dict[str, Callable[[Run], str]] = {
    "strategy": lambda run: strategy_of(run.config) if run.config else "",
    "levels": lambda run: levels_of(run.config) if run.config else "",
    "parameters": lambda run: _parameters(run.config) if run.config else "",
    "steps": _steps,
    "train loss, smoothed": lambda run: _last_loss(run, 4),
    "validation loss": lambda run: f"{run.evaluations[-1][1]:.4f}" if run.evaluations else "",
    "tokens per second, median": lambda run: _shown(run.median("tokens_per_second")),
    "seconds per step, median": lambda run: _shown(run.median("step_seconds"), "s"),
    "MFU, median": lambda run: "" if (mfu := run.median("mfu")) is None else f"{mfu:.1%}",
    "peak memory of one rank, GiB": lambda run: _shown(
        max(run.series("memory_gib")[1], default=None)
    ),
}


def short(number: float, unit: str = "") -> str:
    """Three digits with a decimal prefix: `1.23 GB`, `45.6k`, `12 ms`, `0 B`."""
    prefixes = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")]
    if unit == "s" and number != 0:
        prefixes += [(1e-3, "m"), (1e-6, "µ")]
    # 999.5 would round to four digits, so it gets the next prefix.
    fitting = (pair for pair in prefixes if abs(number) >= 0.9995 * pair[0])
    scale, prefix = next(fitting, (prefixes[-1] if number and unit == "s" else (1.0, "")))
    return f"{number / scale:.3g}{' ' if unit else ''}{prefix}{unit}"
