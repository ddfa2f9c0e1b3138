"""Seconds from the kill of a rank to the end of the next step, beside torchrun.

    python -m scripts.benchmarks.restarts [--kills 10] [--ranks 8]

Kills one rank after the other, each at a random moment, of `train --nproc N --restarts K`, then of
a plain loop of PyTorch under `torchrun --max-restarts K`. Both train two tiny blocks and save every
other step, so the seconds are those of starting again.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

from megafrontier.launch.local import STORE_NAME
from megafrontier.training.resume.restarts import read_records
from scripts.benchmarks.shared.inputs import write_inputs

STEPS = 1_000_000
PAUSE_SECONDS = 2.0
"""At most, from the first step of a start to the next kill."""
LONGEST_SECONDS = 300.0


@dataclass
class Command:
    """A command that starts ranks again. `first_steps`: when each start has finished its first
    step, in seconds since 1970."""

    name: str
    process: subprocess.Popen[bytes]
    first_steps: Callable[[], list[float]]
    seconds: list[float] = field(default_factory=list)

    def wait_for_start(self, count: int) -> float:
        """When the start with this number has finished its first step."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while len(times := self.first_steps()) < count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{self.name}: start {count} finishes no step")
            time.sleep(0.02)
        return times[count - 1]

    def kill_one(self, rng: random.Random) -> None:
        """Kill a rank, and keep the seconds to the end of the next step."""
        count = len(self.first_steps())
        time.sleep(rng.uniform(0, PAUSE_SECONDS))
        begin = time.time()
        os.kill(rng.choice(_ranks(self.process.pid)), signal.SIGKILL)
        self.seconds.append(self.wait_for_start(count + 1) - begin)


def _ranks(parent: int) -> list[int]:
    """The processes of the ranks that a command has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(c) for c in children if _name(c) != STORE_NAME]


def _name(process: str) -> str:
    with suppress(OSError):  # it has just ended
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


def start_ours(folder: Path, ranks: int, kills: int) -> Command:
    """`train --restarts`."""
    config = write_inputs(folder)
    chosen = (
        "machine=laptop", f"train.steps={STEPS}", "train.micro_batch=2",
        f"train.global_batch={2 * ranks}", "train.precision=fp32", "model.layers=2",
        "model.hidden=24", "model.heads=2", "model.sequence_length=16", "checkpoint.every=2",
        "checkpoint.keep=2", "evaluate.batches=0", "train.attempts=0",
    )  # fmt: skip
    command = ["-m", "megafrontier", "train", config, "--nproc", str(ranks)]
    process = _start([*command, "--restarts", str(kills), *chosen])
    attempts = folder / "run" / "attempts.jsonl"

    def first_steps() -> list[float]:
        steps = [record for record in read_records(attempts) if "first_step" in record]
        return [datetime.fromisoformat(record["at"]).timestamp() for record in steps]

    return Command("train --restarts", process, first_steps)


def start_plain(folder: Path, ranks: int, kills: int) -> Command:
    """`torchrun --max-restarts` of a plain loop."""
    times = folder / "times.txt"
    times.touch()
    loop = str(Path(__file__).with_name("plain.py"))
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = _start([*command, f"--max-restarts={kills}", loop, str(times), str(STEPS)])
    return Command(
        "torchrun --max-restarts", process, lambda: [*map(float, times.read_text().split())]
    )


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="of each; default: 10")
    parser.add_argument("--ranks", type=int, default=8, help="default: 8")
    arguments = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        results = []
        for start in (start_ours, start_plain):
            folder = Path(name, start.__name__)
            folder.mkdir()
            command = start(folder, arguments.ranks, arguments.kills)
            try:
                command.wait_for_start(1)
                for _ in range(arguments.kills):
                    command.kill_one(rng)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(command.process.pid, signal.SIGKILL)
                command.process.wait()
            results.append(command)
    for command in results:
        of_each = " ".join(f"{seconds:.1f}" for seconds in command.seconds)
        print(f"{command.name}: median {median(command.seconds):.1f} s of {of_each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
