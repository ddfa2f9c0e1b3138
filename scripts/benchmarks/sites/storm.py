"""Train CONFIG at several sites while they are killed, stopped and cut off, and beside it in quiet.

    python -m scripts.benchmarks.sites.storm CONFIG [--sites 3] [--blows 12] [--pause 6] [--out DIR]
        [--half-speed 2] [key=value …]

Each site is a job in a network namespace of its own. A blow is, in turn and at a drawn site, a kill
of a job (which is started again after some seconds), a stop of some seconds, a cut of a site's
link, or a link so slow that messages take seconds. In the storm one site runs half of the time.
Needs root and Debian's iproute2. Prints the blows, what the logs of the sites say about exchanges,
and the last validation losses beside those without blows. Ends with 1 if a job hangs or fails, if
the common weights of two sites differ at the end, or if the loss is more than 0.5 % higher. A
complete run is not run again.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.common.checkpoints import checkpoints_of, list_checkpoints
from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import load_config
from scripts.benchmarks.shared.links import Links, Unable, links
from scripts.benchmarks.sites.__main__ import read
from scripts.benchmarks.sites.job import PORT, Job, site_keys

KINDS = ("kill", "stop", "cut", "slow")
LONGEST_BLOW = 6.0
FAST, SLOW = 1e9, 5e4
"""Bytes a second of a link, and of one whose messages take seconds."""
MOST_WORSE = 0.005
LINES = ("without site", "have gone on", "are missing", "weights differ")


def strike(made: Links, job: Job, number: int, kind: str, seconds: float) -> None:
    """Do one blow to a site, and undo it."""
    if kind == "kill":
        job.kill()
        time.sleep(seconds)
        job.start()
    elif kind == "stop":
        with job.stopped():
            time.sleep(seconds)
    elif kind == "cut":
        made.cut(number)
        time.sleep(seconds)
        made.mend(number)
    else:
        made.shape(SLOW, [number])
        time.sleep(seconds)
        made.shape(FAST, [number])


def run(
    made: Links, options: argparse.Namespace, name: str, batch: int, folders: Sequence[Path]
) -> None:
    """Train all sites to the end; `name` says whether in the storm. Raises SystemExit if one fails
    or hangs."""
    folder, is_storm = options.out / name, name == "storm"
    folder.mkdir(parents=True, exist_ok=True)
    addresses = [f"{made.address(n)}:{PORT}" for n in range(options.sites)]
    jobs = []
    for number, where in enumerate(folders):
        words = [options.config, "--nproc", "1", *options.overrides, f"run.directory={where}"]
        words += [f"train.global_batch={batch}"]
        words += [site_keys(addresses, folder, number, options.keys)]
        share = 0.5 if is_storm and number == options.half_speed else 1.0
        jobs.append(Job(words, folder / f"output-{number}.txt", made.inside(number), share))
    if is_storm:
        blow(made, jobs, options)
    codes = [job.wait(options.patience) for job in jobs]
    if any(code != 0 for code in codes):
        for job in jobs:
            job.kill()
        raise SystemExit(f"{folder}: exit codes {codes} (None: hangs); see output-N.txt there")


def blow(made: Links, jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """All blows, one after the other, while jobs run."""
    rng = random.Random(options.seed)
    for turn in range(options.blows):
        time.sleep(options.pause)
        alive = [number for number, job in enumerate(jobs) if not job.has_ended]
        if not alive:
            print(f"all sites are at the end after {turn} blows")
            return
        number, seconds = rng.choice(alive), rng.uniform(1.0, LONGEST_BLOW)
        kind = KINDS[turn % len(KINDS)]
        strike(made, jobs[number], number, kind, seconds)
        print(f"{kind} site {number} for {seconds:.1f} s", flush=True)


def describe(folders: Sequence[Path], losses: Sequence[float]) -> str:
    """Losses of the sites, and what their logs say, by number of lines."""
    logs = [(folder / "log.txt").read_text() for folder in folders]
    counts = [f"{line!r} {[log.count(line) for log in logs]}" for line in LINES]
    return f"validation losses {', '.join(f'{x:.4f}' for x in losses)}; lines {', '.join(counts)}"


def have_same_weights(folders: Sequence[Path]) -> bool:
    """Whether all bits of the common weights and momentum are the same at the end."""
    found = [open_checkpoint(list_checkpoints(checkpoints_of(folder))[-1]) for folder in folders]
    names = list(found[0].manifest.tensors)
    for state in ("outer_weight", "outer_momentum"):
        first, *others = (each.tensors(state, names) for each in found)
        if not all(torch.equal(first[name], o[name]) for o in others for name in names):
            return False
    return True


def last_losses(folders: Sequence[Path], steps: int) -> list[float]:
    """The validation loss of each site after the last step."""
    found = [read(folder, steps) for folder in folders]
    return [each["loss"] if each else float("nan") for each in found]


def main() -> None:
    """Run both, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--blows", type=int, default=12)
    parser.add_argument("--pause", type=float, default=6.0, help="seconds between blows")
    parser.add_argument("--half-speed", type=int, default=2, help="site that runs half of the time")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for the rest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keys", default="every: 10, deadline_seconds: 3", help="of `sites`")
    parser.add_argument("--out", type=Path, default=Path("runs/sites-storm"))
    options = parser.parse_intermixed_args()
    with exit_on_fatal_error("storm"):
        config = load_config(options.config, options.overrides)
    steps, batch = config.train.steps, config.train.global_batch // options.sites
    ends = {}
    try:
        with links(options.sites) as made:
            made.shape(FAST)
            for name in ("quiet", "storm"):
                folders = [options.out / name / str(number) for number in range(options.sites)]
                if any(read(folder, steps) is None for folder in folders):
                    run(made, options, name, batch, folders)
                ends[name] = last_losses(folders, steps)
                same = have_same_weights(folders)
                print(f"{name}: {describe(folders, ends[name])}; same weights: {same}", flush=True)
                if not same:
                    sys.exit(1)
    except Unable as reason:
        raise SystemExit(f"storm: {reason}") from reason
    worse = max(ends["storm"]) / min(ends["quiet"]) - 1
    print(f"loss in the storm: {100 * worse:+.2f} %")
    sys.exit(0 if worse <= MOST_WORSE else 1)


if __name__ == "__main__":
    main()
