"""Which starts a run has had, and when to give up: attempts.jsonl in the run directory.

An attempt is a start of the run. One that ends neither finished, nor on request after a step, nor
with a code that nobody starts again by itself (2, 3 and 130: a person has looked), has failed; what
it reached is in metrics.jsonl when the next one starts. Several failures in a row from the same
checkpoint, none further than the first of them, will not be the last.

An attempt after which bad-nodes.txt lists more hosts than before has failed through them, and the
next one leaves them out: it does not count. A cluster has only so many.

Starts that end before all ranks have met are noted ("unmet") and counted by slurm/train.sbatch.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megafrontier.common.errors import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    STOPPED,
    FatalError,
    RunFailed,
    StorageFailed,
)
from megafrontier.config import Config
from megafrontier.launch.health import excluded_nodes
from megafrontier.parallel.env import Identity
from megafrontier.parallel.hierarchy import Hierarchy

_TAIL_BYTES = 65536


class Attempt:
    """The present one. On all ranks but the first it keeps nothing."""

    def __init__(self, path: Path | None, info: Callable[[str], None]) -> None:
        self._path, self._remark = path, info

    def note(self, **values: Any) -> None:
        """Add a line; the first that cannot be written is told, and no more are."""
        if self._path is None:
            return
        try:
            _append(self._path, values)
        except OSError as error:
            why = f"{self._path.name} is not written: {error.strerror}"
            self._remark(f"warning: {why}; what fails is not counted (train.attempts)")
            self._path = None

    def ended(self, code: int, reason: str = "") -> None:
        """The exit code, and the line that says why."""
        self.note(ended=code, **({"reason": reason} if reason else {}))


def _append(path: Path, values: dict[str, Any]) -> None:
    line = json.dumps({"at": _stamp(datetime.now(UTC)), **values})
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"  # after one that a kill cut short
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


@contextmanager
def attempted(
    config: Config, identity: Identity, hierarchy: Hierarchy, info: Callable[[str], None]
) -> Iterator[Attempt]:
    """Note this attempt's start, and the end where the body raises it. Raises RunFailed, on every
    rank alike, after as many failures at one step as `train.attempts` says."""
    directory = Path(config.run.directory)
    first = hierarchy.rank == 0
    attempt = Attempt(directory / "attempts.jsonl" if first else None, info)
    reached = reached_step(directory / "metrics.jsonl") if first else 0
    listed = len(excluded_nodes.listed(directory)) if first else 0
    refusal = _refusal(directory, reached, listed, config.train.attempts) if first else None
    who = {"host": identity.host, "ranks": identity.world_size, **_start()}
    attempt.note(reached=reached, bad_nodes=listed, **who)
    try:
        agreed = hierarchy.first_error(refusal)
        if agreed is not None:
            raise RunFailed(agreed)
        yield attempt
    except FatalError as error:
        attempt.ended(error.code, str(error))
        raise


def note_interrupted(directory: Path, since: datetime) -> None:
    """Note that a person has ended, from the keyboard, the attempt that was noted after `since`
    (UTC). Where none was, this start still waited for another, which goes on."""
    path = directory / "attempts.jsonl"
    begun = [str(entry.get("at")) for entry in _entries(path) if "reached" in entry]
    if begun and begun[-1] >= _stamp(since):
        with suppress(OSError):
            _append(path, {"ended": INTERRUPTED})


def note_begun(directory: Path, wanted: str) -> None:
    """Note that this launch has done what `checkpoint.resume` asks for once: its later starts have
    the same arguments. Rank 0 calls it. Raises StorageFailed where it cannot be noted: such a start
    would do it again."""
    if not (start := _start()):
        return
    path = directory / "attempts.jsonl"
    try:
        _append(path, {"begun": wanted, **start})
    except OSError as error:
        raise StorageFailed(f"{path}: {error.strerror}, need to note the start") from error


def has_begun(directory: Path, wanted: str) -> bool:
    """Whether an earlier start of this launch has done so: of the Slurm job, which was requeued
    since, or of torchrun, which started its ranks again. Raises StorageFailed where what is noted
    cannot be read."""
    path, start = directory / "attempts.jsonl", _start()
    notes: list[dict[str, Any]] = []
    try:
        for entry in _read(path) if start else ():
            if entry.get("job") != start.get("job"):
                continue
            if entry.get("begun") == wanted:
                notes.append(entry)
            elif "reached" in entry and "torchrun" in entry:
                # The user may give another launch the same name, and torchrun gives all `none`.
                notes = [note for note in notes if _is_before(note, entry)]
    except OSError as error:
        raise StorageFailed(f"{path}: {error.strerror}, need what earlier starts did") from error
    return any(_is_before(note, start) for note in notes)


def _start() -> dict[str, Any]:
    """Which start of which launch this is, by Slurm's word and torchrun's; empty without both. What
    a user starts again in an allocation, as in one job, is asked for anew."""
    start: dict[str, Any] = {}
    if "SLURM_JOB_ID" in os.environ:
        restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        start |= {"job": os.environ["SLURM_JOB_ID"], "restart": restart}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        start |= {"torchrun": os.environ["TORCHELASTIC_RUN_ID"], "torchrun_restart": restart}
    return start


def _is_before(note: dict[str, Any], start: dict[str, Any]) -> bool:
    """Whether a note is of an earlier start of the same launch, both without a Slurm job or of the
    same: that, requeued, launches torchrun anew, perhaps by another name."""
    earlier, later = (entry.get("restart", 0) for entry in (note, start))
    if earlier != later:
        return bool(earlier < later)
    is_same = "torchrun" in start and note.get("torchrun") == start["torchrun"]
    return is_same and bool(note["torchrun_restart"] < start["torchrun_restart"])


def reached_step(metrics: Path) -> int:
    """The last step in metrics.jsonl, 0 where there is none. A line cut short is left out."""
    steps = (line.get("step") for line in last_lines(metrics))
    return next((step for step in steps if isinstance(step, int)), 0)


def last_lines(metrics: Path) -> Iterator[dict[str, Any]]:
    """The last 64 KiB of metrics.jsonl, newest first; none where there is no file."""
    with suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError):
                if isinstance(values := json.loads(line), dict):
                    yield values


def _refusal(directory: Path, reached: int, listed: int, limit: int) -> str | None:
    failures = count_failures(directory / "attempts.jsonl", reached, listed)
    if limit == 0 or failures < limit:
        return None
    return (
        f"step {reached + 1}: the last {failures} attempts ended without getting past it "
        f"(train.attempts); see {directory}/attempts.jsonl, log.txt and hang/ there; started "
        "again it tries as often"
    )


def count_failures(path: Path, reached: int, listed: int) -> int:
    """Failed attempts since one got further than those before it, or began with another checkpoint,
    that one included. `reached` is the last step that the newest attempt finished, `listed` the
    number of bad nodes after it."""
    starts: list[dict[str, int]] = []
    for entry in _entries(path):
        if "reached" in entry:
            starts.append(entry)
        elif starts:  # how it went on
            starts[-1] |= entry
    failures, best, resumed = 0, -1, None
    afterwards = [*starts[1:], {"reached": reached, "bad_nodes": listed}]
    for start, after in zip(starts, afterwards, strict=False):
        if start.get("resumed", resumed) != resumed:  # it had saved more, or was sent back
            resumed, best = start["resumed"], -1
        if _ended_well(start, after["reached"]):
            failures, best = 0, -1
        elif after.get("bad_nodes", 0) > start.get("bad_nodes", 0):
            continue
        elif after["reached"] > best:
            failures, best = 1, after["reached"]
        else:
            failures += 1
    return failures


def _ended_well(start: dict[str, int], reached: int) -> bool:
    """Whether a start's end is no failure. A request to stop is none, unless the start did no step:
    the signal before a time limit that is too short for one comes each time."""
    if start.get("ended") == STOPPED:
        return reached > start.get("resumed", -1)
    return start.get("ended") in (0, BAD_INPUT, FAILED, INTERRUPTED)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        yield from _read(path)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines, none where there is no file. Raises OSError."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):  # a kill cut it short
                if isinstance(entry := json.loads(line), dict):
                    yield entry
