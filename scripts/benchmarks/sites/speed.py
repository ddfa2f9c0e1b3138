"""Step times of two sites over a slow link, beside two single sites that train apart.

    python -m scripts.benchmarks.sites.speed CONFIG [--node-rate 1e9] [--slower 256] [--out DIR]
        [--keys "every: 30, …"] [key=value …]

Each site is one rank on one core, in a network namespace whose link has the rate of a node's link
(bytes a second) divided by `--slower`. Both runs load both cores alike. Needs root, Debian's
iproute2 and two cores. Prints step times and CPU times of a step: median, and mean over whole
periods of `every`, which has all that an exchange costs. Steps up to `--warm` do not count. On a
machine with other work the CPU time says more than the clock.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import SitesConfig, load_config
from megafrontier.report.read import read_runs
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.trainer import Trainer
from scripts.benchmarks.sites.job import PORT, Job
from scripts.benchmarks.slow_network.links import Links, Unable, links

SITES = 2
PATIENCE_SECONDS = 600.0


def run(made: Links, options: argparse.Namespace, name: str, keys: str) -> list[Path]:
    """Train at both sites, with these keys of `sites` if any. Returns their folders."""
    folder = options.out / name
    folder.mkdir(parents=True)
    secret = folder / "secret"
    secret.write_text("a secret for this comparison\n")
    addresses = ", ".join(f"{made.address(n)}:{PORT}" for n in range(SITES))
    folders, jobs = [folder / str(number) for number in range(SITES)], []
    for number, where in enumerate(folders):
        own = f"{{addresses: [{addresses}], secret: {secret}, number: {number}, {keys}}}"
        arguments = ["train", options.config, "--nproc", "1", *options.overrides]
        arguments += ["evaluate.batches=0", "checkpoint.every=0", f"run.directory={where}"]
        arguments += ["log.callbacks=[scripts.benchmarks.sites.speed.CpuTime]"]
        arguments += [f"sites={own if keys else 'null'}"]
        pinned = ("taskset", "-c", str(number))
        jobs.append(Job(made, number, arguments, folder, before=pinned))
    if any(job.wait(PATIENCE_SECONDS) != 0 for job in jobs):
        raise SystemExit(f"{folder}: see output-N.txt there")
    return folders


class CpuTime(Callback):
    """Records the CPU seconds of all threads in the step before."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def before_step(self, trainer: Trainer) -> None:
        now = time.process_time()
        trainer.metrics.record("cpu_seconds", now - self._last, "mean")
        self._last = now


def read_steps(folders: Sequence[Path], warm: int, key: str) -> list[dict[int, float]]:
    """Of each site, a metric of the steps after `warm` by their number, except for the last step:
    it exchanges all fragments, and has no steps to hide in. CPU seconds are in the line after."""
    late = 1 if key == "cpu_seconds" else 0
    return [
        {line["step"] - late: line[key] for line in run.steps if line["step"] - late > warm}
        for run in (
            replace(run, steps=run.steps[: len(run.steps) - 1 + late]) for run in read_runs(folders)
        )
    ]


def exchange_share(found: Sequence[Mapping[int, float]], sites: SitesConfig) -> float:
    """By how much steps that begin or end an exchange are longer than the other steps of the same
    run, as a share of the time of these."""
    marked, others = [], []
    for times in found:
        for step, seconds in times.items():
            is_marked = step % sites.spacing in (0, sites.delay % sites.spacing)
            (marked if is_marked else others).append(seconds)
    return (fmean(marked) - fmean(others)) * len(marked) / sum(others)


def main() -> None:
    """Run both, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--node-rate", type=float, default=1e9)
    parser.add_argument("--slower", type=float, default=256.0)
    parser.add_argument("--warm", type=int, default=30)
    parser.add_argument("--keys", default="every: 30, fragments: 3, delay: 5, wire: int4")
    parser.add_argument("--out", type=Path, default=Path("runs/sites-speed"))
    options = parser.parse_intermixed_args()
    keys = f"sites={{addresses: ['a:1', 'b:2'], secret: s, {options.keys}}}"
    with exit_on_fatal_error("speed"):
        config = load_config(options.config, [*options.overrides, keys])
    assert config.sites is not None
    means = {}
    try:
        with links(SITES) as made:
            made.shape(options.node_rate / options.slower)
            for name, keys in (("single", ""), ("sites", options.keys)):
                folders = run(made, options, name, keys)
                for key in ("step_seconds", "cpu_seconds"):
                    found = read_steps(folders, options.warm, key)
                    # Others wait for the slower site. CPU time is each site's own.
                    mean = [fmean(times.values()) for times in found]
                    means[name, key] = max(mean) if key == "step_seconds" else fmean(mean)
                    middle = median(chain(*(times.values() for times in found)))
                    share = 100 * exchange_share(found, config.sites)
                    print(
                        f"{name}: {key}: median {middle:.4f}, mean {means[name, key]:.4f}; "
                        f"steps that begin or end an exchange {share:+.1f} % of the others",
                        flush=True,
                    )
    except Unable as reason:
        raise SystemExit(f"speed: {reason}") from reason
    for key in ("step_seconds", "cpu_seconds"):
        ratio = means["single", key] / means["sites", key]
        print(f"{key}: speed of sites {ratio:.3f} of single sites")


if __name__ == "__main__":
    main()
