"""What a rank was doing when the run hung: a page for a person."""

import faulthandler
import os
from datetime import UTC, datetime
from pathlib import Path

from megafrontier.parallel.env import Identity
from megafrontier.partition.comm.ledger import Ledger


def hang_folder(directory: Path, step: int) -> Path:
    """Where the pages of a hang after `step` lie: HOST/rank-N.txt below it."""
    return directory / "hang" / f"step-{step:08d}"


def write_stacks(
    folder: Path, identity: Identity, step: int, idle_seconds: float, ledger: Ledger | None
) -> None:
    """One page: every thread's stack, newest call first, then the last collective over each level.
    Raises OSError, and RuntimeError for a device that has failed."""
    path = folder / identity.host / f"rank-{identity.rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with path.open("w", encoding="utf-8") as file:
        print(
            f"rank {identity.rank} on {identity.host}, process {os.getpid()}, {now}: "
            f"nothing finished for {idle_seconds:.1f} s after step {step}\n",
            file=file,
        )
        print("stacks of all threads, newest call first:\n", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
        # Last, for it asks the device, which may not answer any more.
        print(file=file)
        for level, crossing in {} if ledger is None else ledger.last().items():
            print(f"last collective over {level}: {crossing}", file=file)
