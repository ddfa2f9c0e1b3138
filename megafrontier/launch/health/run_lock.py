"""One job at a time on a run directory: a lease that lives as long as its holder's heart beats.

A lease is a numbered file in RUN/lease, the highest number the present one. To take it is to create
the next number, which an exclusive create grants to one process only, on NFS and Lustre too, where
locks may be switched off. Numbers never fall, and a lease given back stays as such: a starter that
saw number 5 die cannot take what another has taken as number 6 since.

No clocks are compared, so none can be wrong: a holder lives whose beat changes while we look on.
Two are known dead without looking: a process of this very machine that is gone, and the earlier
start of a Slurm job that was requeued, for Slurm starts a job only when its last start has ended.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megafrontier.common.errors import StorageFailed, UserError, as_run_directory_error
from megafrontier.parallel.env import Identity
from megafrontier.parallel.hierarchy import Hierarchy

BEAT_SECONDS = 5.0
EXPIRY_SECONDS = 120.0
"""Silence after which a holder is taken for dead. Storages fail over in less, mostly."""
_RELEASED = "released".ljust(20)
_NAME = re.compile(r"\d{8,}")


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. `machine` tells two boots and two process tables apart, `start` two
    processes of one number; `job` and `restart` are Slurm's."""

    host: str = "an unknown host"
    pid: int = 0
    machine: str = ""
    start: str = ""
    job: str = ""
    restart: str = ""
    since: str = "?"

    @classmethod
    def present(cls, host: str, environment: Mapping[str, str]) -> "Holder":
        """This process."""
        return cls(
            host,
            os.getpid(),
            machine(),
            start_of(os.getpid()),
            environment.get("SLURM_JOB_ID", ""),
            environment.get("SLURM_RESTART_COUNT", "0"),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"{self.host} (pid {self.pid}{job}, since {self.since})"

    def is_dead(self, me: "Holder") -> bool:
        """Whether it is known to be gone, without waiting for a beat."""
        if self.job and self.job == me.job and self.restart != me.restart:
            return True
        return self.is_near(me) and start_of(self.pid) != self.start

    def is_near(self, me: "Holder") -> bool:
        """Whether `me` can see its process."""
        return self.machine != "" and self.machine == me.machine


def machine() -> str:
    """Name of this boot of this kernel and of the process table we see; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """When a process of this machine started, in ticks since the boot; empty if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # a process may have any name, in parentheses
    return "" if fields[0] in "ZX" else fields[19]


class RunLock:
    """A lease that is held: a thread beats until `release`."""

    def __init__(self, folder: Path, number: int, file: int, holder: Holder) -> None:
        """`file` is open on the lease just created, and closed by `release`."""
        self._folder, self._number, self._file = folder, number, file
        head = json.dumps(asdict(holder)) + "\n"
        self._at = len(head.encode())
        os.pwrite(file, head.encode(), 0)
        self._write(f"{0:020d}")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let the next job start at once."""
        self._is_over.set()
        self._thread.join(6 * BEAT_SECONDS)
        if self._thread.is_alive():
            return  # the storage hangs; the lease expires
        with suppress(OSError):
            self._write(_RELEASED)
        os.close(self._file)

    def _beat(self) -> None:
        count = 0
        while not self._is_over.wait(BEAT_SECONDS):
            count += 1
            # A storage that fails for a while is no reason to end; what it shows meanwhile is.
            with suppress(OSError):
                self._write(f"{count:020d}")
            with suppress(OSError):
                if _newest(self._folder) > self._number:
                    self._end()

    def _write(self, beat: str) -> None:
        # In place: a reader elsewhere may go on seeing the old file for a minute after a rename.
        os.pwrite(self._file, beat.encode(), self._at)
        os.fsync(self._file)

    def _end(self) -> None:
        """We were silent for so long that another took over, and writes where we would: no later
        moment to stop is early enough, and no checkpoint is finished without this one."""
        try:
            holder = _read(_path(self._folder, _newest(self._folder)))[0]
            line = f"megafrontier: lease: {self._folder.parent} was taken over by {holder}; ending"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())
        finally:  # whoever cannot say so, to a closed terminal or a full disk, ends all the same
            os._exit(2)


def acquire(
    folder: Path, me: Holder, print_error: Callable[[str], None], patience: float = float("inf")
) -> RunLock:
    """The lease on `folder`, waited for, with so many seconds' `patience`, where its holder shows
    no sign of life.

    One line is printed before such a wait. Raises UserError when the holder is alive, and as
    `as_run_directory_error` says when the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            number = _newest(folder)
            _await_end(_path(folder, number), me, print_error, min(EXPIRY_SECONDS, patience))
            lease = _claim(folder, number + 1, me)
            if lease is not None:
                return lease
    except OSError as error:
        raise as_run_directory_error(error, folder) from error


def _claim(folder: Path, number: int, me: Holder) -> RunLock | None:
    try:
        file = os.open(_path(folder, number), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    except FileExistsError:
        return None
    try:
        lease = RunLock(folder, number, file, me)
    except OSError:  # a full disk: or the next start would wait for a holder without a name
        os.close(file)
        with suppress(OSError):
            _path(folder, number).unlink()
        raise
    for earlier in _numbers(folder):
        if earlier < number:
            _path(folder, earlier).unlink(missing_ok=True)
    return lease


def _await_end(path: Path, me: Holder, print_error: Callable[[str], None], expiry: float) -> None:
    """Return when nobody holds the lease at `path` any more. Raises UserError when one does."""
    holder, beat = _read(path)
    if beat in ("", _RELEASED) or holder.is_dead(me):
        return
    if holder.is_near(me) and not _has_open(holder.pid, path):
        return  # a copy of a run's directory, in which its process holds nothing
    if not holder.is_near(me):
        print_error(f"waiting up to {expiry:g} s for the lease of {holder}, if it is dead")
        found = _watch(path, beat, expiry)
        if found is None:
            return
        holder = found
    raise UserError(
        f"run.directory: {path.parent.parent} is in use by {holder}; need another run.directory, "
        "or that job's end"
    )


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process of this machine has a file open; True where that is not to be known."""
    try:
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # another user's
        return True
    for descriptor in opened:
        with suppress(OSError):
            if descriptor.samefile(path):
                return True
    return False


def _watch(path: Path, beat: str, expiry: float) -> Holder | None:
    """The holder, once it shows a sign of life; None where it shows none."""
    end = time.monotonic() + expiry
    while time.monotonic() < end:
        time.sleep(min(1.0, BEAT_SECONDS / 5))
        asked = time.monotonic()
        holder, now = _read(path)
        end += time.monotonic() - asked  # of a storage that stands still nothing can be said
        if now in ("", _RELEASED):
            return None
        if now != beat:
            return holder
    return None


def _newest(folder: Path) -> int:
    """Number of the present lease, 0 where there was none."""
    number = max(_numbers(folder), default=0)
    # A file system may show an old listing, but not deny a name that is asked for.
    while _path(folder, number + 1).exists():
        number += 1
    return number


def _numbers(folder: Path) -> list[int]:
    """Of the leases there; what a tool that copies files adds has other names."""
    return [int(name) for name in os.listdir(folder) if _NAME.fullmatch(name)]


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def _read(path: Path) -> tuple[Holder, str]:
    """Who holds a lease, and its beat: empty where there is no such lease, or no longer. One that
    is just being written has a beat like any other, which will change."""
    try:
        head, _, beat = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    except FileNotFoundError:
        return Holder(), ""
    try:
        return Holder(**json.loads(head)), beat or "none yet"
    except (ValueError, TypeError):
        return Holder(), beat or "none yet"


@contextmanager
def hold(
    directory: Path,
    identity: Identity,
    hierarchy: Hierarchy,
    print_error: Callable[[str], None],
    hang_seconds: float,
) -> Iterator[None]:
    """Keep other jobs away from a run directory. Raises UserError, on every rank alike, while
    another is on it, StorageFailed where the storage fails. The ranks wait for the first to look,
    and after `hang_seconds` (0: never) are taken for hung."""
    lease: RunLock | None = None
    problem: UserError | StorageFailed | None = None
    if hierarchy.rank == 0:
        try:
            me = Holder.present(identity.host, os.environ)
            patience = max(2 * BEAT_SECONDS, hang_seconds) if hang_seconds else float("inf")
            lease = acquire(directory / "lease", me, print_error, patience)
        except (UserError, StorageFailed) as error:
            problem = error
    try:
        hierarchy.raise_first(problem)
        yield
    finally:
        if lease is not None:
            lease.release()
