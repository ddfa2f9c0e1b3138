"""A clock instead of a device: one timeline for computation, and one for each comm stream.

A simulation runs in one thread, in program order. A task begins when its timeline is free and what
it waits for is over, and not before it is issued. So the times are those of the engine's own order
of operations.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from megafrontier.comm.streams import STREAMS, Task, WorkHandle

COMPUTE = "compute"
Bar = tuple[str, float, float]
"""The timeline of work, or the level of a collective; its begin and its length in seconds."""
_current: ContextVar["Clock"] = ContextVar("clock")


@dataclass
class Clock:
    """The time at which each timeline has done its work so far, in seconds."""

    timelines: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of work by timeline."""
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the computation waited for a collective, by level."""
    timeline: str = COMPUTE
    """Where work is done now."""
    level: str = ""
    """The level of the last collective."""
    bars: list[Bar] | None = None
    """All work and when it was done, if it is to be drawn."""

    @property
    def now(self) -> float:
        return self.timelines[self.timeline]

    def advance(self, seconds: float) -> None:
        """Work on the present timeline."""
        self._draw(self.timeline, seconds)
        self._work(seconds)

    def _work(self, seconds: float) -> None:
        self.timelines[self.timeline] += seconds
        self.busy[self.timeline] += seconds

    def communicate(self, seconds: float, level: str) -> None:
        """A collective over `level` on the present timeline."""
        self.level = level
        if self.timeline == COMPUTE:
            self.exposed[level] += seconds
        self._draw(level, seconds)
        self._work(seconds)

    def _draw(self, row: str, seconds: float) -> None:
        if self.bars is not None:
            self.bars.append((row, self.now, seconds))

    def wait_until(self, time: float, level: str) -> None:
        """The present timeline waits for a collective over `level` that is over at `time`."""
        if self.timeline == COMPUTE and time > self.now:
            self.exposed[level] += time - self.now
        self.timelines[self.timeline] = max(self.now, time)

    @contextmanager
    def on(self, timeline: str) -> Iterator[None]:
        """Work in the body is done on `timeline`, and begins when it is issued at the earliest."""
        issued, outer = self.now, self.timeline
        self.timeline = timeline
        self.timelines[timeline] = max(self.now, issued)
        try:
            yield
        finally:
            self.timeline = outer

    @contextmanager
    def running(self) -> Iterator["Clock"]:
        """Engines on the meta device that are built in the body use this clock."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


class ClockStream:
    """A comm stream on the clock. Tasks run in the caller, and only their time is another's."""

    def __init__(self, name: str) -> None:
        self._name, self._clock = name, _current.get()

    def run(self, task: Task, after: WorkHandle) -> WorkHandle:
        """Run `task` at once. It takes its time on the stream's timeline, after `after`."""
        with self._clock.on(self._name):
            after.wait()
            task()
            return ClockWork(self._clock, self._clock.now, self._clock.level)


@dataclass(frozen=True)
class ClockWork:
    """A task that is over at a time of the clock."""

    clock: Clock
    time: float
    level: str

    def wait(self) -> None:
        """Let the present timeline wait for the task."""
        self.clock.wait_until(self.time, self.level)


STREAMS["meta"] = lambda name, device, is_urgent: ClockStream(name)
