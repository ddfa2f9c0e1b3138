"""Kill ranks of a small run at random times, and print its goodput beside the formula's.

    python -m scripts.benchmarks.planning.storm OUT [--minutes 6] [--mtbf 30] [--every 20]
        [--local 0] [--seed 0] [key=value …]

`train --nproc 4 --restarts 1000` trains in OUT/run, a new folder. A drawn rank is killed after
exponential times of `--mtbf` seconds in the mean, also while ranks start, for `--minutes`. Then the
run is asked to stop. The formula (`megafrontier/plan/intervals.py`) gets what the run's own files
say of the mean seconds of a step, of a save, and from a failure to the first new step. What it has
to predict are the steps that failures lose, and so the goodput, from the first finished step on.
With `--local` there are snapshots in this host's memory, which survive every kill.
"""

import argparse
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megafrontier.launch.local import STORE_NAME
from megafrontier.plan.intervals import FailureModel, SaveCost
from megafrontier.report.goodput import describe_seconds
from megafrontier.training.goodput import KINDS, Goodput, read_goodput
from megafrontier.training.resume.restarts import FILE_NAME, read_records, start_seconds
from scripts.benchmarks.shared.inputs import write_inputs

RANKS = 4
SETTING = (
    "model.layers=2", "model.hidden=64", "model.sequence_length=128", "train.micro_batch=2",
    "train.global_batch=8", "train.precision=fp32", "train.steps=1000000", "train.attempts=0",
    "machine=laptop", "evaluate.batches=0", "checkpoint.minutes=0", "preflight.enabled=false",
)  # fmt: skip


def ranks_of(process: int) -> list[int]:
    """The process ids of the local ranks of a `train` command, those that run now."""
    try:
        listed = Path(f"/proc/{process}/task/{process}/children").read_text()
        names = {int(word): Path(f"/proc/{word}/comm").read_text() for word in listed.split()}
    except OSError:  # one has ended meanwhile
        return []
    return [child for child, name in names.items() if name.strip() != STORE_NAME]


def strike(train: subprocess.Popen[bytes], minutes: float, mtbf: float, seed: int) -> int:
    """Kill ranks at random times. Returns how many kills there were."""
    rng, end, kills = random.Random(seed), time.monotonic() + 60 * minutes, 0
    while True:
        pause = rng.expovariate(1 / mtbf)
        if time.monotonic() + pause > end:
            time.sleep(max(0.0, end - time.monotonic()))
            return kills
        time.sleep(pause)
        if ranks := ranks_of(train.pid):
            victim = rng.choice(ranks)
            subprocess.run(["kill", "-KILL", str(victim)], check=False)
            kills += 1


def run(arguments: argparse.Namespace) -> tuple[Path, int]:
    """Train in the storm. Returns the run's directory and the number of kills."""
    arguments.out.mkdir(parents=True)
    config, directory = write_inputs(arguments.out), arguments.out / "run"
    words = [config, *SETTING, f"checkpoint.every={arguments.every}"]
    words += [f"checkpoint.local.every={arguments.local}", *arguments.overrides]
    command = [sys.executable, "-m", "megafrontier", "train", "--nproc", str(RANKS)]
    with (
        (arguments.out / "output.txt").open("wb") as output,
        subprocess.Popen(
            [*command, "--restarts", "1000", *words, f"run.directory={directory}"],
            stdout=output,
            stderr=output,
        ) as train,
    ):
        while not (directory / "metrics.jsonl").exists() and train.poll() is None:
            time.sleep(0.1)
        kills = strike(train, arguments.minutes, arguments.mtbf, arguments.seed)
        train.send_signal(signal.SIGUSR1)
    return directory, kills


def predict(
    directory: Path, found: Goodput, every: int, kills: int, local: int = 0
) -> tuple[FailureModel, float]:
    """The model with the measured means, and the seconds of steps between two checkpoints. With
    snapshots every `local` steps, all waiting for saves counts as theirs."""
    lines = [line for line in read_records(directory / "metrics.jsonl") if "step_seconds" in line]
    step = found.seconds["steps"] / len(lines)
    saves = [line["between_seconds"].get("saves", 0.0) for line in lines]
    # Some saves are complete only a few steps later: the time between steps includes these waits.
    interval = local or every
    save = sum(saves) / max(1, len(lines) / interval)
    between = found.seconds["other"] / len(lines)
    wall = found.wall - first_start(directory)
    start = (found.seconds["failures"] + found.seconds["starts"] - first_start(directory)) / kills
    cost = SaveCost(save + between * interval)
    if not local:
        return FailureModel(wall / kills, start, cost), step * every
    return FailureModel(wall / kills, start, SaveCost(0.0), cost, storage_share=0.0), step * every


def first_start(directory: Path) -> float:
    """Seconds from the first launch until the first step was finished."""
    return start_seconds(read_records(directory / FILE_NAME))[0]


def report(directory: Path, every: int, kills: int, local: int = 0) -> str:
    """Measured beside predicted."""
    found = read_goodput(directory)
    model, interval = predict(directory, found, every, kills, local)
    wall = found.wall - first_start(directory)
    step, save = interval / every, model.local or model.storage
    local_every = local * step if local else None
    measured, expected = found.seconds["steps"] / wall, model.goodput(interval, local_every)
    kinds = ", ".join(f"{kind} {found.seconds[kind] / found.wall:.1%}" for kind in KINDS[:-1])
    return (
        f"{kills} kills in {describe_seconds(wall)}, one every {model.mtbf:.1f} s; a start after "
        f"a failure {model.start:.2f} s; a save {save.stall:.3f} s, every {local or every} steps, "
        f"{local_every or interval:.2f} s\n"
        f"measured: goodput {measured:.1%} ({kinds})\n"
        f"formula:  goodput {expected:.1%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--mtbf", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--local", type=int, default=0, help="steps between local snapshots")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    arguments = parser.parse_args(argv)
    directory, kills = run(arguments)
    print(report(directory, arguments.every, kills, arguments.local))
    return 0


if __name__ == "__main__":
    sys.exit(main())
