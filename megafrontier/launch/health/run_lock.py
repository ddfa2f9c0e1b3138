"""Run lock: only one job at a time writes to a run directory.

Note [Run lock]
RUN/lease holds one numbered file, in which the holder counts up every few seconds (the heartbeat).
To take over from a dead holder, a job creates the file with the next number. O_EXCL lets only one
process create it, on NFS and Lustre too, where flock may be switched off. Numbers never fall, so a
job that saw number 5 die cannot take over number 6, which another job has taken since.

No clocks are compared. A holder is alive if its heartbeat changes while we watch. We watch only
briefly if its process is gone from this host, because the process may be in another container, and
not at all if it is an earlier start of this launch (a Slurm job, a torchrun or `--nproc` command),
because ranks are started again only after that start has ended.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import ceil
from pathlib import Path

from megafrontier.common.errors import UserError, as_run_directory_error, print_error
from megafrontier.parallel.env import Identity, Launch
from megafrontier.parallel.world import World

FOLDER = "lease"
HEARTBEAT_SECONDS = 2.0
EXPIRY_SECONDS = 120.0
"""A holder without a heartbeat for this long is dead. Most storage fails over in less."""
GONE_EXPIRY_SECONDS = 3 * HEARTBEAT_SECONDS
"""The same, if no process of this host has the holder's number."""
_RELEASED = "released".ljust(20)


@dataclass(frozen=True)
class Holder:
    """The process that holds a run lock. `job` and `restarts` are its launch's; `job` is empty if
    nothing names the launch."""

    host: str = "an unknown host"
    pid: int = 0
    job: str = ""
    restarts: list[int] = field(default_factory=list)
    since: str = "?"

    @classmethod
    def current(cls, host: str, environment: Mapping[str, str]) -> "Holder":
        """This process."""
        launch = Launch.current(environment) or Launch("", [])
        # torchrun without --rdzv-id or --standalone calls all its commands `none`.
        job = "" if launch.job == "none" else launch.job
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(host, os.getpid(), job, launch.restarts, now)

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job.isdigit() else ""
        return f"{self.host} (pid {self.pid}{job}, since {self.since})"

    def is_earlier_start(self, me: "Holder") -> bool:
        """Whether this belongs to the launch of `me`, before the ranks were started again."""
        return self.job != "" and self.job == me.job and self.restarts < me.restarts

    def is_gone(self, me: "Holder") -> bool:
        """Whether no process of `me`'s host has this process's number, or one that has ended and
        that its parent has not waited for, as in containers without an init process."""
        if self.host != me.host:
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state in ("Z", "X")


class RunLock:
    """A run lock that this process holds. A thread writes the heartbeat until `release`."""

    def __init__(self, folder: Path, number: int, holder: Holder) -> None:
        """Raises FileExistsError if another process has created the lock with this number."""
        self._folder, self._number = folder, number
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        self._file = os.open(_path(folder, number), flags, 0o644)
        head = (json.dumps(asdict(holder)) + "\n").encode()
        self._heartbeat_offset = len(head)
        os.pwrite(self._file, head, 0)
        self._write(f"{0:020d}")
        self._is_released = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back, so that the next job can start at once."""
        self._is_released.set()
        self._thread.join(30)
        if self._thread.is_alive():
            return  # The storage hangs, and the lock will expire.
        with suppress(OSError):
            self._write(_RELEASED)
        os.close(self._file)

    def _send_heartbeats(self) -> None:
        count = 0
        while not self._is_released.wait(HEARTBEAT_SECONDS):
            count += 1
            # A storage error does not end the run. Another holder, seen afterwards, does.
            with suppress(OSError):
                self._write(f"{count:020d}")
            with suppress(OSError):
                if _newest(self._folder) > self._number:
                    # Our heartbeat stopped for too long, for instance on a node that hung, and
                    # another job now writes to the same files.
                    print_error(f"megafrontier: {self._folder.parent}: taken over by another job")
                    os._exit(2)

    def _write(self, heartbeat: str) -> None:
        # In place, because another node may see the old file for a minute after a rename.
        os.pwrite(self._file, heartbeat.encode(), self._heartbeat_offset)
        os.fsync(self._file)


def acquire(
    folder: Path, me: Holder, info: Callable[[str], None], patience: float = float("inf")
) -> RunLock:
    """Take the run lock in `folder`.

    If the present holder may be dead, `info` gets one line and we wait for a heartbeat, at most
    `patience` seconds. Raises UserError if the holder is alive, and the errors of
    `as_run_directory_error` if `folder` cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            number = _newest(folder)
            _wait_until_free(_path(folder, number), me, info, patience)
            with suppress(FileExistsError):  # another process was faster
                lock = RunLock(folder, number + 1, me)
                break
        for earlier in _numbers(folder):
            if earlier <= number:
                _path(folder, earlier).unlink(missing_ok=True)
        return lock
    except OSError as error:
        raise as_run_directory_error(error, folder) from error


def _wait_until_free(path: Path, me: Holder, info: Callable[[str], None], patience: float) -> None:
    """Return once nobody holds the lock file at `path`. Raises UserError if its holder is alive."""
    holder, heartbeat = _read(path)
    if heartbeat in ("", _RELEASED) or holder.is_earlier_start(me):
        return
    expiry = min(GONE_EXPIRY_SECONDS if holder.is_gone(me) else EXPIRY_SECONDS, patience)
    info(f"run lock: waiting up to {expiry:g} s for a heartbeat of {holder}, which may be dead")
    pause = HEARTBEAT_SECONDS / 4
    # Looks are counted, because while the storage does not answer, the holder cannot write either.
    for _ in range(ceil(expiry / pause)):
        time.sleep(pause)
        holder, now = _read(path)
        if now in ("", _RELEASED):
            return
        if now != heartbeat:
            raise UserError(
                f"run.directory: {path.parent.parent} is in use by {holder}; need another "
                "run.directory, or that job's end"
            )


def _newest(folder: Path) -> int:
    """The number of the newest lock file, 0 if there is none."""
    number = max(_numbers(folder), default=0)
    # NFS may list an old state of a folder, but it finds a file that is asked for by name.
    while _path(folder, number + 1).exists():
        number += 1
    return number


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder) if name.isdigit()]


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def _read(path: Path) -> tuple[Holder, str]:
    """A lock file's holder and heartbeat, which is empty if there is no such file. A file that is
    just being written has a heartbeat, too, which will change."""
    try:
        head, _, heartbeat = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    except FileNotFoundError:
        return Holder(), ""
    try:
        return Holder(**json.loads(head)), heartbeat or "none yet"
    except (ValueError, TypeError):
        return Holder(), heartbeat or "none yet"


@contextmanager
def hold(
    directory: Path,
    identity: Identity,
    world: World,
    info: Callable[[str], None],
    hang_seconds: float,
) -> Iterator[None]:
    """Hold the lock of a run directory on rank 0 while the body runs.

    All ranks call it and wait for rank 0, which would be taken for hung after `hang_seconds`
    (0: never). Raises on all ranks: UserError if another job holds the lock, StorageFailed.
    """
    lock: RunLock | None = None

    def acquire_on_rank_0() -> None:
        nonlocal lock
        if identity.rank == 0:
            patience = max(2 * HEARTBEAT_SECONDS, hang_seconds) if hang_seconds else float("inf")
            me = Holder.current(identity.host, os.environ)
            lock = acquire(directory / FOLDER, me, info, patience)

    try:
        world.run_on_all(acquire_on_rank_0)
        yield
    finally:
        if lock is not None:
            lock.release()
