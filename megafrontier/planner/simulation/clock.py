"""A clock instead of a device: one timeline for computation, and one for each comm stream.

A simulation runs in one thread, in program order. A task begins when its timeline is free and what
it waits for is over, and not before it is issued. So the times are those of the engine's own order
of operations.

Note [Contention]
Computing is slower while a collective runs beside it, because both need the device's units and its
memory. For each second of a collective that has computing beside it, the computation loses
`slows_compute` seconds of that level. The losses of collectives that run at the same time add up.
A collective keeps its length, so that its end is known when it is issued: the seconds by which
computing delays it are part of the computation's loss, which is why that may exceed 1. The overlap
is found on an axis without losses, on which both keep the length that they have alone.
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
    lost: float = 0.0
    """Seconds that the computation has lost to collectives beside it (Note [Contention])."""
    in_flight: list[tuple[float, float, float]] = field(default_factory=list)
    """Collectives beside the computation: begin and end without losses, and what a second costs."""

    @property
    def now(self) -> float:
        return self.timelines[self.timeline]

    def advance(self, seconds: float) -> None:
        """Work on the present timeline."""
        if self.in_flight and self.timeline == COMPUTE:
            seconds += self._loss(seconds)
        self._draw(self.timeline, seconds)
        self._work(seconds)

    def _loss(self, seconds: float) -> float:
        """What collectives beside a computation of `seconds` add to it (Note [Contention])."""
        begin = self.now - self.lost
        end = begin + seconds
        self.in_flight = [flight for flight in self.in_flight if flight[1] > begin]
        loss = sum(
            slows * max(0.0, min(end, until) - max(begin, since))
            for since, until, slows in self.in_flight
        )
        self.lost += loss
        return loss

    def _work(self, seconds: float) -> None:
        self.timelines[self.timeline] += seconds
        self.busy[self.timeline] += seconds

    def communicate(self, seconds: float, level: str, slows_compute: float = 0.0) -> None:
        """A collective over `level` on the present timeline. `slows_compute`: what the computation
        loses for each second of it (Note [Contention])."""
        self.level = level
        if self.timeline == COMPUTE:
            self.exposed[level] += seconds
        elif slows_compute:
            begin = self.now - self.lost
            self.in_flight.append((begin, begin + seconds, slows_compute))
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
