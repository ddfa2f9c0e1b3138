"""Step times of two sites over a slow link, beside two single sites that train apart.

    python -m scripts.benchmarks.sites.speed CONFIG [--node-rate 1e9] [--slower 256] [--out DIR]
        [--keys "every: 30, …"] [key=value …]

Each site is one rank on one core, in a network namespace whose link has the rate of a node's link
(bytes a second) divided by `--slower`. Both runs load both cores alike. Needs root, Debian's
iproute2 and two cores. Prints the median of the step times, and their mean over whole periods of
`every`, which has all that an exchange costs, of the slower site: others wait for it. Steps before
`--warm` do not count. On a machine with other work, the ratio of CPU times, and the steps with an
exchange beside the others of the same run, say more than the clock.
"""

import argparse
import resource
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import SitesConfig, load_config
from megafrontier.report.read import read_runs
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
        arguments += [f"sites={own if keys else 'null'}"]
        pinned = ("taskset", "-c", str(number))
        jobs.append(Job(made, number, arguments, folder, before=pinned))
    if any(job.wait(PATIENCE_SECONDS) != 0 for job in jobs):
        raise SystemExit(f"{folder}: see output-N.txt there")
    return folders


def step_seconds(folders: Sequence[Path], warm: int, steps: int) -> list[list[float]]:
    """Of each site, the seconds of the steps after `warm`, up to `steps`."""
    return [
        [line["step_seconds"] for line in run.steps if warm < line["step"] <= steps]
        for run in read_runs(folders)
    ]


def exchange_share(found: Sequence[Sequence[float]], first: int, sites: SitesConfig) -> float:
    """By how much steps that begin or end an exchange are longer than the other steps of the same
    run, as a share of the time of these; `first` is the number of the first step."""
    marked, others = [], []
    for times in found:
        for step, seconds in enumerate(times, first):
            is_marked = step % sites.spacing in (0, sites.delay % sites.spacing)
            (marked if is_marked else others).append(seconds)
    return (fmean(marked) - fmean(others)) * len(marked) / sum(others)


def cpu_seconds() -> float:
    """User and system time of all jobs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
    means, cpu, warm = {}, {}, options.warm
    try:
        with links(SITES) as made:
            made.shape(options.node_rate / options.slower)
            for name, keys in (("single", ""), ("sites", options.keys)):
                before = cpu_seconds()
                folders = run(made, options, name, keys)
                cpu[name] = cpu_seconds() - before
                # The last step exchanges all fragments at once, and has no steps to hide in.
                found = step_seconds(folders, warm, config.train.steps - 1)
                means[name] = max(fmean(times) for times in found)
                middle = median(chain(*found))
                print(f"{name}: median {middle:.4f} s, mean of the slower {means[name]:.4f} s")
    except Unable as reason:
        raise SystemExit(f"speed: {reason}") from reason
    print(f"speed of sites: {means['single'] / means['sites']:.3f} of single sites, by the clock")
    print(f"CPU time of the whole jobs: {cpu['sites'] / cpu['single']:.3f} of single sites")
    share = exchange_share(found, warm + 1, config.sites)
    print(f"steps that begin or end an exchange: {100 * share:+.1f} % of the time of the others")


if __name__ == "__main__":
    main()
