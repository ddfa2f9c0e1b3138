"""Restart history: RUN/attempts.jsonl, and when a run that makes no progress is given up.

Note [Restart history]
Each start of a run adds lines to attempts.jsonl: `reached`, the last step of the starts before it;
`resumed`, the step it resumes from; `ended`, its exit code, if it can still write that. A start
that ended by a crash, a kill or a lost rank has failed. Failed starts in a row are counted while
they resume from the same checkpoint and get no further than the first of them. After
`train.attempts` of them the run is given up, because the next start would fail in the same place.

Not counted: a start after which bad-nodes.txt lists more hosts, because the next start leaves them
out, and a cluster has only so many; codes after which somebody has looked at the run (2, 3, 130).
slurm/train.sbatch notes ("unmet") and counts the starts that end before all ranks have met.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator
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
)
from megafrontier.common.files import sync_file
from megafrontier.config import Config
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import World

FILE_NAME = "attempts.jsonl"
_TAIL_BYTES = 2**20
RestartRecord = dict[str, Any]
"""A line of attempts.jsonl."""


class StartRecord:
    """What attempts.jsonl says of the present start. Ranks other than 0 write nothing."""

    def __init__(self, path: Path | None, info: Callable[[str], None]) -> None:
        self._path, self._info = path, info

    def add(self, **values: Any) -> None:
        """Add a line. After the first line that cannot be written, which is a warning, no more are
        tried."""
        if self._path is None:
            return
        try:
            _append(self._path, values)
        except OSError as error:
            why = f"{self._path.name} is not written: {error.strerror}"
            self._info(f"warning: {why}; failed starts are not counted (train.attempts)")
            self._path = None

    def end(self, code: int, reason: str = "") -> None:
        """Add the exit code, and the error message if there is one."""
        self.add(ended=code, **({"reason": reason} if reason else {}))


@contextmanager
def record_start(
    config: Config,
    identity: Identity,
    world: World,
    info: Callable[[str], None],
    excluded_nodes: Callable[[], Collection[str]],
) -> Iterator[StartRecord]:
    """Record this start, and its end if the body raises FatalError.

    `excluded_nodes` reads bad-nodes.txt on rank 0. Raises RunFailed on all ranks after
    `train.attempts` failed starts in a row (Note [Restart history]).
    """
    record, refusal = StartRecord(None, info), None
    if world.rank == 0:
        path = Path(config.run.directory) / FILE_NAME
        reached, excluded = reached_step(path.with_name("metrics.jsonl")), len(excluded_nodes())
        refusal = _refusal(path, reached, excluded, config.train.attempts)
        record = StartRecord(path, info)
        who = {"host": identity.host, "ranks": identity.world_size, **_launch()}
        record.add(reached=reached, bad_nodes=excluded, **who)
    try:
        world.raise_first(None if refusal is None else RunFailed(refusal))
        yield record
    except FatalError as error:
        record.end(error.code, str(error))
        raise


def _refusal(path: Path, reached: int, excluded: int, limit: int) -> str | None:
    failures = count_failures(_entries(path), reached, excluded)
    if limit == 0 or failures < limit:
        return None
    return (
        f"step {reached + 1}: the last {failures} attempts ended without getting past it "
        f"(train.attempts); see {path}, log.txt and hang/ there; started again it tries as often"
    )


def count_failures(entries: Iterator[RestartRecord], reached: int, excluded: int) -> int:
    """The number of failed starts since the run last made progress (Note [Restart history]).

    `reached` is the last step of the newest start, `excluded` the number of hosts in bad-nodes.txt
    after it.
    """
    starts: list[RestartRecord] = []
    for entry in entries:
        if "reached" in entry:
            starts.append(entry)
        elif starts:
            starts[-1] |= entry
    failures, best, resumed = 0, -1, None
    following = [*starts[1:], {"reached": reached, "bad_nodes": excluded}]
    for start, after in zip(starts, following, strict=False):
        if start.get("resumed", resumed) != resumed:
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


def _ended_well(start: RestartRecord, reached: int) -> bool:
    """Whether a start has not failed. A stop request before the first step is a failure, because
    it means that the time limit is too short for one step."""
    if start.get("ended") == STOPPED:
        return bool(reached > start.get("resumed", -1))
    return start.get("ended") in (0, BAD_INPUT, FAILED, INTERRUPTED)


def record_interrupt(directory: Path) -> None:
    """Record Ctrl-C as the end of the newest start."""
    with suppress(OSError):
        _append(directory / FILE_NAME, {"ended": INTERRUPTED})


def record_begun(directory: Path, wanted: str) -> None:
    """Record that this launch has done what `checkpoint.resume` (`wanted`) asks for: restarts of
    the launch have the same arguments and must not do it again. Only rank 0 calls it.
    Raises OSError."""
    if launch := _launch():
        _append(directory / FILE_NAME, {"begun": wanted, **launch})


def has_begun(directory: Path, wanted: str) -> bool:
    """Whether an earlier start of this launch called `record_begun`. Raises OSError."""
    if not (launch := _launch()):
        return False
    return any(
        entry.get("begun") == wanted
        and entry.get("job") == launch["job"]
        and entry.get("restarts", [0, 0]) < launch["restarts"]
        for entry in _read(directory / FILE_NAME)
    )


def _launch() -> RestartRecord:
    """The Slurm job or torchrun command that this start belongs to, and how often Slurm and
    torchrun have restarted it; empty without both."""
    job = os.environ.get("SLURM_JOB_ID", os.environ.get("TORCHELASTIC_RUN_ID"))
    counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    restarts = [int(os.environ.get(name) or 0) for name in counts]
    return {} if job is None else {"job": job, "restarts": restarts}


def reached_step(metrics: Path) -> int:
    """The last step in metrics.jsonl, 0 if there is none. A line that a kill cut short is left
    out."""
    return next((int(line.get("step", 0)) for line in _newest_lines(metrics)), 0)


def recorded_keys(metrics: Path, step: int) -> set[str]:
    """The keys of all lines of a step among the newest of metrics.jsonl: the step's own line has
    `loss`, those of evaluations `valid_loss` or `tasks`."""
    lines = _newest_lines(metrics)
    return {key for line in lines if line.get("step") == step for key in line}


def _newest_lines(metrics: Path) -> Iterator[RestartRecord]:
    """The last lines of metrics.jsonl, newest first."""
    with suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        yield from _parse(reversed(file.read().decode(errors="replace").splitlines()))


def _entries(path: Path) -> Iterator[RestartRecord]:
    with suppress(OSError):
        yield from _read(path)


def _read(path: Path) -> Iterator[RestartRecord]:
    """The lines of attempts.jsonl, none if there is no file. Raises OSError."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
        yield from _parse(file)


def _parse(lines: Iterator[str]) -> Iterator[RestartRecord]:
    for line in lines:
        with suppress(ValueError):  # A kill cut the line short.
            if isinstance(entry := json.loads(line), dict):
                yield entry


def _append(path: Path, values: RestartRecord) -> None:
    """Add a line to a file whose last line may have been cut short. Raises OSError."""
    line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="seconds"), **values}) + "\n"
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(line.encode())
        sync_file(file)
