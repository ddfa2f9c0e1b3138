"""Restart history: RUN/attempts.jsonl, and when a run that makes no progress is given up.

Note [Restart history]
Each start of a run adds lines to attempts.jsonl. Rank 0 writes `reached`, the last step of the
starts before it, when that was `finished`, and when the ranks were `launched`; `resumed`, the step
it resumes from; `first_step`, the first step it finishes, and what the failure before it has cost;
`ended`, its exit code, if it can still write that. What has started the ranks (slurm/train.sbatch,
or the parent of local ranks) writes `failed`, the exit code that it sees, and what was lost.

A start that ended by a crash, a kill or a lost rank has failed. Failed starts in a row are counted
while they resume from the same checkpoint and get no further than the first of them. After
`train.attempts` of them the run is given up, because the next start would fail in the same place.
It makes no difference whether a start follows in the same job or after a requeue.

Not counted: a start after which bad-nodes.txt lists more hosts, because the next start leaves them
out, and a cluster has only so many; codes after which somebody has looked at the run (2, 3, 130).
slurm/train.sbatch notes ("unmet") and counts the starts that end before all ranks have met.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafrontier.common.errors import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    LOST,
    STOPPED,
    FatalError,
    RunFailed,
)
from megafrontier.common.files import sync_file
from megafrontier.parallel.env import LAUNCHED, Identity, Launch

if TYPE_CHECKING:  # torch takes seconds to import, and slurm/train.sbatch waits for this module
    from megafrontier.config import Config
    from megafrontier.parallel.world import World

FILE_NAME = "attempts.jsonl"
START_SECONDS = 300.0
"""What a start takes from the launch to its first finished step, if the run has not measured it."""
_TAIL_BYTES = 2**20
_END_KEYS = frozenset(("ended", "failed", "unmet"))
RestartRecord = dict[str, Any]
"""A line of attempts.jsonl."""


@dataclass(frozen=True)
class Outage:
    """The time without a finished step before the present start.

    `since`: when it began, in seconds since 1970. `reached`: the last finished step. `failures`:
    the starts that have failed since then; 0 if the run was asked to stop. `what`: what the newest
    of them lost.
    """

    since: float
    reached: int
    failures: int
    what: str


class StartRecord:
    """What attempts.jsonl says of the present start. Ranks other than 0 write nothing. `outage`:
    before this start."""

    def __init__(
        self, path: Path | None, info: Callable[[str], None], outage: Outage | None = None
    ) -> None:
        self._path, self._info, self._outage = path, info, outage

    def add(self, **values: Any) -> None:
        """Add a line. After the first line that cannot be written, which is a warning, no more are
        tried."""
        if self._path is None:
            return
        try:
            append_record(self._path, values)
        except OSError as error:
            why = f"{self._path.name} is not written: {error.strerror}"
            self._info(f"warning: {why}; failed starts are not counted (train.attempts)")
            self._path = None

    def end(self, code: int, reason: str = "", lost: Collection[object] = ()) -> None:
        """Add the exit code, the error message if there is one, and the ranks that were `lost`,
        which are not going to end by themselves."""
        self.add(
            ended=code,
            **({"reason": reason} if reason else {}),
            **({"lost": list(lost)} if lost else {}),
        )

    def finish_first_step(self, step: int, resumed: int, step_seconds: float) -> None:
        """Add the first step that this start has finished, and log what a failure before it has
        cost. `resumed`: the step that this start went on from."""
        now, outage = time.time(), self._outage
        values: RestartRecord = {"first_step": step, "step_seconds": step_seconds}
        values["start_seconds"] = round(now - launched_at(), 1)
        if outage is not None:
            values["lost_steps"] = max(0, outage.reached - resumed)
            values["down_seconds"] = round(now - outage.since, 1)
        self.add(**values)
        if outage is not None and outage.failures:
            count = f"failure {outage.failures} in a row: " if outage.failures > 1 else ""
            self._info(
                f"restart: {count}{outage.what}; back from step {outage.reached} to {resumed}; "
                f"{values['down_seconds']:.1f} s from the failure to the end of step {step}"
            )


@contextmanager
def record_start(
    config: "Config",
    identity: Identity,
    world: "World",
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
        metrics = path.with_name("metrics.jsonl")
        reached, excluded = reached_step(metrics), len(excluded_nodes())
        refusal = _refusal(path, reached, excluded, config.train.attempts)
        finished = record_seconds(newest_step(metrics) or {})
        outage = find_outage(read_records(path), reached, finished or _changed(metrics))
        record = StartRecord(path, info, outage)
        who = {"host": identity.host, "ranks": identity.world_size, **_launch()}
        when = {"launched": launched_at(), **({"finished": finished} if finished else {})}
        record.add(reached=reached, bad_nodes=excluded, **when, **who)
    try:
        world.raise_first(None if refusal is None else RunFailed(refusal))
        yield record
    except FatalError as error:
        record.end(error.code, str(error))
        raise


def _refusal(path: Path, reached: int, excluded: int, limit: int) -> str | None:
    failures = count_failures(read_records(path), reached, excluded)
    if limit == 0 or failures < limit:
        return None
    return (
        f"step {reached + 1}: the last {failures} attempts ended without getting past it "
        f"(train.attempts); see {path}, log.txt and hang/ there; started again it tries as often"
    )


def count_failures(entries: Iterable[RestartRecord], reached: int, excluded: int) -> int:
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


def find_outage(
    records: Iterable[RestartRecord], reached: int, finished: float = 0.0
) -> Outage | None:
    """The time without a finished step that the next start ends. None before the first start, and
    after a run that was done.

    reached: the last finished step. finished: when that was, in seconds since 1970, for a start
        that could not record how it ended.
    """
    since, failures, what, code = 0.0, 0, "", 0
    for start in group_by_start(records):
        if any("first_step" in record for record in start):
            since, failures = 0.0, 0
        ends = [record for record in start if record.keys() & _END_KEYS]
        code = next((ends[0][key] for key in _END_KEYS if key in ends[0]), LOST) if ends else LOST
        since = since or (
            record_seconds(ends[0]) if ends else max(record_seconds(start[-1]), finished)
        )
        if code not in (0, BAD_INPUT, FAILED, STOPPED, INTERRUPTED):
            failures += 1
            reasons = [end["reason"] for end in ends if "reason" in end]
            what = reasons[-1] if reasons else "a start that left no word"
    return Outage(since, reached, failures, what.partition(";")[0]) if since and code else None


def group_by_start(records: Iterable[RestartRecord]) -> list[list[RestartRecord]]:
    """The records of each start. One that slurm/train.sbatch has noted has a single record."""
    starts: list[list[RestartRecord]] = []
    for record in records:
        if "reached" in record or "unmet" in record:
            starts.append([])
        if starts:
            starts[-1].append(record)
    return starts


def record_seconds(record: RestartRecord) -> float:
    """When a line was written, in seconds since 1970; 0 if it does not say."""
    with suppress(KeyError, ValueError, TypeError):
        return datetime.fromisoformat(record["at"]).timestamp()
    return 0.0


def _ended_well(start: RestartRecord, reached: int) -> bool:
    """Whether a start has not failed. A stop request before the first step is a failure, because
    it means that the time limit is too short for one step."""
    if start.get("ended") == STOPPED:
        return bool(reached > start.get("resumed", -1))
    return start.get("ended") in (0, BAD_INPUT, FAILED, INTERRUPTED)


def record_interrupt(directory: Path) -> None:
    """Record Ctrl-C as the end of the newest start."""
    with suppress(OSError):
        append_record(directory / FILE_NAME, {"ended": INTERRUPTED})


def record_begun(directory: Path, wanted: str) -> None:
    """Record that this launch has done what `checkpoint.resume` (`wanted`) asks for: restarts of
    the launch have the same arguments and must not do it again. Only rank 0 calls it.
    Raises OSError."""
    if launch := _launch():
        append_record(directory / FILE_NAME, {"begun": wanted, **launch})


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


def record_failure(directory: Path, code: int, reason: str, nodes: Collection[str] = ()) -> None:
    """Record that the ranks of the newest start have ended with this code, what was lost, and on
    which nodes. For what has started them. Raises OSError."""
    where = {"nodes": list(nodes)} if nodes else {}
    record = {"failed": code, "reason": reason, **where, **_launch()}
    append_record(directory / FILE_NAME, record)


def _launch() -> RestartRecord:
    launch = Launch.current(os.environ)
    return {} if launch is None else asdict(launch)


def reached_step(metrics: Path) -> int:
    """The last step in metrics.jsonl, 0 if there is none. A line that a kill cut short is left
    out."""
    return next((int(line.get("step", 0)) for line in _newest_lines(metrics)), 0)


def recorded_keys(metrics: Path, step: int) -> set[str]:
    """The keys of all lines of a step among the newest of metrics.jsonl: the step's own line has
    `loss`, those of evaluations `valid_loss` or `tasks`."""
    lines = _newest_lines(metrics)
    return {key for line in lines if line.get("step") == step for key in line}


def newest_step(metrics: Path) -> RestartRecord | None:
    """The last line of a step in metrics.jsonl, which is no evaluation's; None without any."""
    return next((line for line in _newest_lines(metrics) if "step_seconds" in line), None)


def start_seconds(records: Iterable[RestartRecord]) -> list[float]:
    """What starts have taken from the launch to their first finished step, in order."""
    return [float(record["start_seconds"]) for record in records if "start_seconds" in record]


def launched_at() -> float:
    """When these ranks were launched, in seconds since 1970: by what has started them, or else when
    this process began."""
    if begun := os.environ.get(LAUNCHED):
        return float(begun)
    with suppress(OSError, ValueError, IndexError):
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
        return round(time.time() - age, 3)
    return time.time()


def now_text() -> str:
    """The present time, as the lines of attempts.jsonl and metrics.jsonl have it under `at`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _changed(path: Path) -> float:
    """When a file was written last, in seconds since 1970; 0 if it cannot be read."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _newest_lines(metrics: Path) -> Iterator[RestartRecord]:
    """The last lines of metrics.jsonl, newest first."""
    with suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        yield from _parse(reversed(file.read().decode(errors="replace").splitlines()))


def read_records(path: Path) -> Iterator[RestartRecord]:
    """The lines of attempts.jsonl or metrics.jsonl, as far as they can be read."""
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


def append_record(path: Path, values: RestartRecord) -> None:
    """Add a line to a file whose last line may have been cut short. Raises OSError."""
    line = json.dumps({"at": now_text(), **values}) + "\n"
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(line.encode())
        sync_file(file)
