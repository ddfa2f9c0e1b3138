"""Stacks of all threads: a rank's report of a hang, and a hard timeout that needs no Python."""

import faulthandler
import os
from datetime import UTC, datetime
from pathlib import Path

from megafrontier.comm.ledger import Ledger
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import Operation

_STDERR = 2


def hang_folder(directory: Path, step: int) -> Path:
    """The folder of the reports of a hang after `step`: HOST/rank-N.txt below it."""
    return directory / "hang" / f"step-{step:08d}"


def write_stacks(
    folder: Path,
    identity: Identity,
    step: int,
    idle_seconds: float,
    ledger: Ledger | None,
    doing: Operation,
) -> None:
    """Write this rank's report: what it is doing, the stacks of all threads and the last collective
    of each level.

    Raises OSError, and RuntimeError if the device has failed.
    """
    path = folder / identity.host / f"rank-{identity.rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with path.open("w", encoding="utf-8") as file:
        print(
            f"rank {identity.rank} on {identity.host}, process {os.getpid()}, {now}: "
            f"nothing finished for {idle_seconds:.1f} s after step {step}",
            file=file,
        )
        waits = f"waits for {doing.waits_for}" if doing.waits_for else ""
        print(": ".join(filter(None, (doing.name, waits))), file=file)
        print("stacks of all threads, newest call first:\n", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
        # Last, because it asks the device, which may not answer any more.
        print(file=file)
        for level, collective in {} if ledger is None else ledger.last().items():
            print(f"last collective over {level}: {collective}", file=file)


def arm_hard_timeout(seconds: float) -> None:
    """End the process in `seconds`, with exit code 1 and all stacks on stderr, instead of at the
    time set before.

    A kernel launch blocks while the device's queue is full. Some launches (of compiled blocks, of
    Triton's kernels on ROCm) hold the GIL meanwhile, as may a query of a device that does not
    answer. In a hang, no Python thread could then end the process. faulthandler's thread can.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
