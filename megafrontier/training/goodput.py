"""Goodput: how the wall time of a run's jobs divides into steps and all else.

Note [Goodput]
attempts.jsonl says when the ranks were launched (`launched`), when they had finished their first
step, how long that took (`step_seconds`), when a start ended, and when the start before had
finished its last step (`finished`). metrics.jsonl has each step that counts, with `at` and
`step_seconds`, and in `between_seconds` what rank 0 did between the step before and this one.

So a start is, from its launch to its end: "starts" until its first step begins; for each step the
time between steps and the step itself; "repeated" from the end of its last step that counts to the
end of its last step, because these steps were done again; then "failures", until the ranks are
launched again in the same job, or the saves and evaluations of an orderly end. The partial step
that a failure interrupts counts as failure. Time between two jobs is "queued", and is no part of
the goodput, which is the seconds of steps over the seconds of all jobs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from megafrontier.common.errors import BAD_INPUT, INTERRUPTED, STOPPED
from megafrontier.training.resume.restarts import (
    FILE_NAME,
    RestartRecord,
    group_by_start,
    newest_step,
    read_records,
    record_seconds,
)

KINDS = ("steps", "repeated", "starts", "saves", "evaluation", "other", "failures", "queued")
"""What a second of a run may be. `other` is between steps: metrics, callbacks, garbage."""
BETWEEN = ("saves", "evaluation", "other")
_END_KEYS = ("ended", "failed")
_IN_ORDER = (0, BAD_INPUT, STOPPED, INTERRUPTED)


@dataclass(frozen=True)
class TimeSpan:
    """A part of a run's time, in seconds since 1970, and what it was."""

    kind: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by kind, in so many starts of so many jobs."""

    seconds: dict[str, float]
    starts: int
    jobs: int

    @property
    def wall(self) -> float:
        """Seconds in jobs."""
        return seconds_in_jobs(self.seconds)

    @property
    def share(self) -> float:
        """Of the seconds in jobs, those of steps that count."""
        return self.seconds["steps"] / self.wall if self.wall else 0.0

    def __str__(self) -> str:
        parts = [f"{kind} {self.seconds[kind]:,.1f}" for kind in KINDS[:-1] if self.seconds[kind]]
        queued = self.seconds["queued"]
        jobs = f" of {self.jobs} jobs, and {queued:,.1f} s between them" if self.jobs > 1 else ""
        return (
            f"goodput {self.share:.1%} of {self.wall:,.1f} s in {self.starts} "
            f"start{'s' * (self.starts > 1)}{jobs}; seconds: {', '.join(parts)}"
        )


def goodput_of(records: Iterable[RestartRecord], lines: Iterable[RestartRecord]) -> Goodput:
    """The sums of `divide`, whose arguments these are."""
    records = list(records)
    starts = _read_starts(records)
    seconds = sum_by_kind(_divide(starts, lines))
    jobs = 1 + sum(before.job != after.job for before, after in pairwise(starts))
    return Goodput(seconds, len(starts), jobs if starts else 0)


def seconds_in_jobs(seconds: Mapping[str, float]) -> float:
    """Of the seconds of each of KINDS, those that the run had a job."""
    return sum(seconds.values()) - seconds["queued"]


def sum_by_kind(spans: Iterable[TimeSpan]) -> dict[str, float]:
    """The seconds of each of KINDS."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for span in spans:
        seconds[span.kind] += span.seconds
    return seconds


def read_goodput(directory: Path) -> Goodput:
    """The goodput of the run in a directory."""
    return goodput_of(
        read_records(directory / FILE_NAME), read_records(directory / "metrics.jsonl")
    )


def divide(records: Iterable[RestartRecord], lines: Iterable[RestartRecord]) -> list[TimeSpan]:
    """The time of a run without gaps, from its first launch to its last sign of life (Note
    [Goodput]). Empty if its files do not say when it was launched.

    records: the lines of attempts.jsonl. lines: those of metrics.jsonl, of which only steps with
        `at` count.
    """
    return list(_divide(_read_starts(records), lines))


class GoodputMeter:
    """The goodput of a run so far, after each step, from the files of the starts before.

    It reads attempts.jsonl and the newest step of metrics.jsonl, because that holds the goodput
    until then.
    """

    def __init__(self, directory: Path, now: float) -> None:
        """now: seconds since 1970."""
        starts = _read_starts(read_records(directory / FILE_NAME))
        line = newest_step(directory / "metrics.jsonl") or {}
        at = record_seconds(line)
        self._steps = float(line.get("goodput") or 0.0) * _job_seconds(starts, at)
        self._before, self._since = _job_seconds(starts, now), now

    def update(self, step_seconds: float, now: float) -> float:
        """The goodput after another step, at `now`."""
        self._steps += step_seconds
        wall = self._before + now - self._since
        return min(1.0, self._steps / wall) if wall > 0 else 1.0


class _Step(NamedTuple):
    """When a step ended, what it took, and what came before it, by kind."""

    at: float
    seconds: float
    between: dict[str, float] | None


@dataclass(frozen=True)
class _Start:
    """One start of the ranks. Times in seconds since 1970; 0: not known.

    stepped: the end of its first step, which took `step_seconds`. finished_before: the end of the
    last step of the starts before it. ended: 0 if nobody has seen it. seen: the last record.
    """

    job: object
    launched: float
    stepped: float
    step_seconds: float
    finished_before: float
    ended: float
    is_in_order: bool
    between: dict[str, float]
    seen: float


def _read_starts(records: Iterable[RestartRecord]) -> list[_Start]:
    """The starts that say when they were launched, in order."""
    starts: list[_Start] = []
    for number, group in enumerate(group_by_start(records)):
        first = group[0]
        launched = float(first.get("launched", 0.0))
        seen = max(map(record_seconds, group))
        if not launched:
            # slurm/train.sbatch has noted a start that never met: the job waited for the next one.
            continue
        stepped = next((r for r in group if "first_step" in r), {})
        end = next((r for r in group if r.keys() & set(_END_KEYS)), {})
        code = next((end[key] for key in _END_KEYS if key in end), None)
        between: dict[str, float] = next(
            (r["between_seconds"] for r in group if "between_seconds" in r), {}
        )
        # Slurm keeps the id of a job that it starts anew. Without an id each start is a job.
        job = (first["job"], first["restarts"][0]) if "job" in first else number
        starts.append(
            _Start(
                job,
                launched,
                record_seconds(stepped),
                float(stepped.get("step_seconds", 0.0)),
                float(first.get("finished", 0.0)),
                record_seconds(end),
                code in _IN_ORDER,
                between,
                seen,
            )
        )
    return starts


def _job_seconds(starts: Sequence[_Start], until: float) -> float:
    """Seconds in jobs until a time."""
    begins: dict[object, float] = {}
    ends: dict[object, float] = {}
    for start, following in zip(starts, [*starts[1:], None], strict=False):
        begins.setdefault(start.job, start.launched)
        finished = following.finished_before if following else until  # the newest start goes on
        ends[start.job] = start.ended if following and start.ended else max(start.seen, finished)
    return sum(max(0.0, min(ends[job], until) - begins[job]) for job in begins)


def _divide(starts: Sequence[_Start], lines: Iterable[RestartRecord]) -> Iterator[TimeSpan]:
    # Not whole lines: there may be a million.
    steps = [
        _Step(record_seconds(line), float(line["step_seconds"]), line.get("between_seconds"))
        for line in lines
        if "step_seconds" in line and "at" in line
    ]
    steps.sort(key=attrgetter("at"))
    at = 0
    for start, following in zip(starts, [*starts[1:], None], strict=False):
        until = following.launched if following else float("inf")
        first = at
        while at < len(steps) and steps[at].at < until:
            at += 1
        cursor = start.launched
        for span in _divide_start(start, following, steps[first:at]):
            # Clocks of two processes, and of a device, may differ a little.
            begin, end = max(cursor, span.begin), min(until, span.end)
            if end > begin:
                yield TimeSpan(span.kind, begin, end)
                cursor = end
        if following and until > cursor:
            yield TimeSpan("failures" if following.job == start.job else "queued", cursor, until)


def _divide_start(
    start: _Start, following: _Start | None, steps: Sequence[_Step]
) -> Iterator[TimeSpan]:
    """The spans of one start, each from the end of the one before. `steps`: those that count."""
    counted = steps[-1].at if steps else 0.0
    finished = max(counted, start.stepped)
    if following and start.launched <= following.finished_before < following.launched:
        finished = max(finished, following.finished_before)
    if not finished:
        yield TimeSpan("starts", start.launched, start.ended or start.seen)
        return
    begins = [step.at - step.seconds for step in steps[:1]]
    begins += [start.stepped - start.step_seconds] if start.stepped else []
    cursor = min(begins, default=finished)
    yield TimeSpan("starts", start.launched, cursor)
    for step in steps:
        begin = max(cursor, step.at - step.seconds)
        yield from _between(step.between or {}, cursor, begin)
        yield TimeSpan("steps", begin, step.at)
        cursor = step.at
    yield TimeSpan("repeated", cursor, finished)
    end = start.ended or (finished if following else max(finished, start.seen))
    if start.is_in_order:
        yield from _between(start.between, finished, end)
    else:
        yield TimeSpan("failures", finished, end)


def _between(seconds: RestartRecord, begin: float, end: float) -> Iterator[TimeSpan]:
    """The time between two steps, by kind. What nobody has measured is `other`."""
    for kind in BETWEEN[:-1]:
        until = min(end, begin + float(seconds.get(kind, 0.0)))
        yield TimeSpan(kind, begin, until)
        begin = until
    yield TimeSpan("other", begin, end)
