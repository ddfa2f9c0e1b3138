"""Train CONFIG at several sites while they are killed, stopped and cut off, and beside it in quiet.

    python -m scripts.benchmarks.sites.storm CONFIG [--sites 3] [--blows 10] [--pause 8] [--out DIR]
        [key=value …]

Each site is a job in a network namespace of its own. A blow is, by a seeded draw, a kill of a job
(which is started again after some seconds), a stop of some seconds, or a cut of a site's link.
Needs root and Debian's iproute2. Prints the blows, how many exchanges each site was left out of,
and the last validation losses of the sites, which must be the same, beside those without blows.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import load_config
from scripts.benchmarks.shared.measuring import ROOT
from scripts.benchmarks.sites.__main__ import read
from scripts.benchmarks.slow_network.links import NIC, Links, Unable, links

PORT = 7001
LONGEST_BLOW = 6.0


class Job:
    """The job of a site, in its namespace."""

    def __init__(self, made: Links, number: int, arguments: Sequence[str], folder: Path) -> None:
        self._command = [*made.inside(number), sys.executable, "-m", "megafrontier", *arguments]
        self._output = folder / f"output-{number}.txt"
        self.start()

    def start(self) -> None:
        """Start it, also again."""
        with self._output.open("a") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": NIC},
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether no process of it is left."""
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        os.killpg(self._process.pid, number)

    def wait(self) -> int:
        """The exit code, when it has ended."""
        return self._process.wait()


def strike(made: Links, job: Job, number: int, rng: random.Random) -> str:
    """Do one blow to a site, and undo it. Returns what it was."""
    kind, seconds = rng.choice(("kill", "stop", "cut")), rng.uniform(1.0, LONGEST_BLOW)
    if kind == "kill":
        job.signal(signal.SIGKILL)
        job.wait()
    elif kind == "stop":
        job.signal(signal.SIGSTOP)
    else:
        made.cut(number)
    time.sleep(seconds)
    if kind == "kill":
        job.start()
    elif kind == "stop":
        job.signal(signal.SIGCONT)
    else:
        made.mend(number)
    return f"{kind} site {number} for {seconds:.1f} s"


def run(
    made: Links, options: argparse.Namespace, folder: Path, blows: int, batch: int
) -> list[Path]:
    """Train all sites to the end. Returns their folders. Raises SystemExit if one fails."""
    folder.mkdir(parents=True, exist_ok=True)
    secret = folder / "secret"
    secret.write_text("a secret for this storm\n")
    addresses = ", ".join(f"{made.address(n)}:{PORT}" for n in range(options.sites))
    shared = f"addresses: [{addresses}], secret: {secret}, {options.keys}"
    folders = [folder / str(number) for number in range(options.sites)]
    jobs = [
        Job(
            made,
            number,
            [
                *("train", options.config, "--nproc", "1", f"run.directory={where}"),
                *(f"train.global_batch={batch}", f"sites={{{shared}, number: {number}}}"),
                *options.overrides,
            ],
            folder,
        )
        for number, where in enumerate(folders)
    ]
    rng = random.Random(options.seed)
    time.sleep(options.pause if blows else 0)
    for _ in range(blows):
        alive = [number for number, job in enumerate(jobs) if not job.has_ended]
        if not alive:
            break
        number = rng.choice(alive)
        print(strike(made, jobs[number], number, rng), flush=True)
        time.sleep(options.pause)
    codes = [job.wait() for job in jobs]
    if any(codes):
        raise SystemExit(f"{folder}: exit codes {codes}; see output-N.txt there")
    return folders


def describe(folders: Sequence[Path], steps: int) -> str:
    """Losses of the sites, and exchanges that each was left out of."""
    found = [read(folder, steps) for folder in folders]
    losses = [f"{each['loss']:.4f}" if each else "none" for each in found]
    text = (folders[0] / "log.txt").read_text()
    absent = [
        sum(f" {number}" in line.partition("without site")[2] for line in text.splitlines())
        for number in range(len(folders))
    ]
    return (
        f"validation losses {', '.join(losses)}; left out of {absent} exchanges (by site 0's log)"
    )


def main() -> None:
    """Run both, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--blows", type=int, default=10)
    parser.add_argument("--pause", type=float, default=8.0, help="seconds between blows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keys", default="every: 10, deadline_seconds: 3", help="of `sites`")
    parser.add_argument("--out", type=Path, default=Path("runs/sites-storm"))
    options = parser.parse_args()
    with exit_on_fatal_error("storm"):
        config = load_config(options.config, options.overrides)
    steps, batch = config.train.steps, config.train.global_batch // options.sites
    try:
        with links(options.sites) as made:
            for name, blows in (("quiet", 0), ("storm", options.blows)):
                folders = run(made, options, options.out / name, blows, batch)
                print(f"{name}: {describe(folders, steps)}", flush=True)
    except Unable as reason:
        raise SystemExit(f"storm: {reason}") from reason


if __name__ == "__main__":
    main()
