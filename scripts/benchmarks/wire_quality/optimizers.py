"""Muon beside AdamW: the same training with each, loss over steps and over seconds.

    python -m scripts.benchmarks.wire_quality.optimizers CONFIG [--out DIR] [key=value …]

Trains CONFIG once with each optimizer (same seed, same batches) into DIR/OPTIMIZER and draws both
curves to DIR/muon.png. With Muon, matrices of blocks have a group of their own; all other
parameters keep AdamW. A run that is complete is not run again, and one that was stopped goes on. So
two shells may train one optimizer each at the same time (`--only`), under the same load. `--draw`
draws what the runs have so far.
"""

import argparse
from pathlib import Path
from statistics import fmean, median

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.report.draw import pyplot, run_look
from megafrontier.report.read import Run, read_runs
from scripts.benchmarks.wire_quality.__main__ import run_variant

MUON_LR = 0.005
MEAN = 10
VARIANTS = {
    "adamw": [],
    "muon": [f"optimizer.groups=[{{match: 'matrix:blocks.*', name: muon, lr: {MUON_LR}}}]"],
}


def draw(runs: list[Run], path: Path) -> None:
    """Training loss over steps, and over seconds: the steps at the median of their durations, since
    other work on the machine stretches single steps."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for index, run in enumerate(runs):
        steps, losses = means(run)
        seconds = median(run.series("step_seconds")[1])
        for panel, scale in zip(panels, (1.0, seconds), strict=True):
            times = [step * scale for step in steps]
            panel.plot(times, losses, **run_look(index), label=run.label)
    panels[0].set_ylabel(f"training loss, mean of {MEAN} steps")
    for panel, what in zip(panels, ("optimizer step", "seconds of training"), strict=True):
        panel.set_xlabel(what)
    panels[0].legend()
    figure.savefig(path)
    plt.close(figure)


def means(run: Run) -> tuple[list[float], list[float]]:
    """Middles of stretches of `MEAN` steps, and the mean training loss of each."""
    steps, losses = run.series("loss")
    starts = range(0, len(losses) - MEAN + 1, MEAN)
    middles, values = ([fmean(found[at : at + MEAN]) for at in starts] for found in (steps, losses))
    return middles, values


def table(runs: list[Run]) -> str:
    """Markdown: the training loss at quarters of the steps that all runs have, each the mean of
    `MEAN` steps, the last validation losses, and the median duration of a step."""
    count = min(len(run.series("loss")[1]) for run in runs)
    ends = [count * quarter // 4 for quarter in (1, 2, 3, 4)]
    titles = ["optimizer", *(f"step {end:,}" for end in ends), "validation", "seconds a step"]
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for run in runs:
        losses = run.series("loss")[1]
        cells = [f"{fmean(losses[max(0, end - MEAN) : end]):.3f}" for end in ends]
        cells += [f"{loss:.3f} at {step:,}" for step, loss in run.evaluations[-1:]] or ["–"]
        cells.append(f"{median(run.series('step_seconds')[1]):.2f}")
        lines.append(f"| {run.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command and make the comparison."""
    parser = argparse.ArgumentParser(prog="optimizers", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/optimizers"))
    parser.add_argument("--only", choices=list(VARIANTS), help="train with one optimizer")
    parser.add_argument("--draw", action="store_true", help="do not train")
    given = parser.parse_intermixed_args()
    with exit_on_fatal_error("optimizers"):
        for name, chosen in VARIANTS.items():
            if not given.draw and given.only in (None, name):
                overrides = [*given.overrides, *chosen]
                run_variant(name, given.config, overrides, given.out, given.nproc)
        if given.only is None:
            runs = read_runs([given.out / name for name in VARIANTS])
            print(table(runs))
            draw(runs, given.out / "muon.png")


if __name__ == "__main__":
    main()
