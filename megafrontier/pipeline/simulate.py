"""Run a table with a clock: how long a step takes, how much of it is idle, what a rank holds.

Each rank has a compute stream and a comm stream. Both run their part of the rank's row in order; an
exchange starts on the comm stream when the actions whose results it sends have ended, and its
transfers take place when both ranks have started theirs. Without overlap a rank has one stream.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megafrontier.pipeline.table import (
    Action,
    ActionKind,
    StageMessage,
    StageRow,
    TransferGroup,
    message_for,
    message_in,
    message_of,
)

Span = tuple[float, float]


@dataclass(frozen=True)
class StageCosts:
    """Seconds of the actions of one stage. `backward` is of inputs and weights together.

    `backward_input` and `backward_weight` are used by the schedules that have them apart.
    """

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        """Seconds of a backward of inputs and weights together."""
        return self.backward_input + self.backward_weight

    def seconds(self, kind: ActionKind) -> float:
        """Seconds of an action of this kind."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward
            case ActionKind.BACKWARD:
                return self.backward
            case ActionKind.BACKWARD_INPUT:
                return self.backward_input
            case ActionKind.BACKWARD_WEIGHT:
                return self.backward_weight


TICKS = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0)


@dataclass(frozen=True)
class Simulation:
    """What a step of the pipeline takes, by the clock."""

    seconds: float
    busy: tuple[float, ...]
    """Seconds that each rank computes."""
    spans: dict[Action, Span]
    """Start and end of each action."""

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they do not compute, 0 to 1; 0 if nothing takes
        time."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


class Deadlock(RuntimeError):
    """No rank of a table can go on: a bug in the table."""


def simulate(
    rows: Sequence[StageRow],
    costs: StageCosts | Sequence[StageCosts] = TICKS,
    *,
    transfer_seconds: float = 0.0,
    overlap: bool = True,
) -> Simulation:
    """Run a table, or rows with exchanges (`with_transfers`).

    A table's messages arrive as soon as they are made. `costs` are those of every stage, or one per
    stage. Raises Deadlock if no rank can go on before the end of its row.
    """
    clock = _Clock(rows, costs, transfer_seconds)
    streams = [stream for row in rows for stream in _streams(row, overlap)]
    while sum(map(clock.advance, streams)):
        streams = [stream for stream in streams if stream.items]
    if streams:
        raise Deadlock("; ".join(str(stream.items[0]) for stream in streams))
    return Simulation(
        seconds=max((end for _, end in clock.spans.values()), default=0.0),
        busy=tuple(sum(map(clock.seconds, _actions(row))) for row in rows),
        spans=clock.spans,
    )


def peak_in_flight(table: Sequence[StageRow]) -> tuple[int, ...]:
    """For each rank, how many stage inputs it holds at most: from a forward to the end of the
    backward of weights."""
    peaks = []
    for row in table:
        held = peak = 0
        for action in _actions(row):
            held += action.kind is ActionKind.FORWARD
            peak = max(peak, held)
            held -= action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        peaks.append(peak)
    return tuple(peaks)


def _actions(row: StageRow) -> Iterator[Action]:
    return (item for item in row if isinstance(item, Action))


@dataclass
class _Stream:
    """Items that one rank runs in order, and when the stream is free for the next."""

    items: deque[Action | TransferGroup]
    free: float = 0.0


def _streams(row: StageRow, overlap: bool) -> list[_Stream]:
    if not overlap:
        return [_Stream(deque(row))]
    return [
        _Stream(deque(item for item in row if isinstance(item, kind)))
        for kind in (Action, TransferGroup)
    ]


class _Clock:
    def __init__(
        self,
        rows: Sequence[StageRow],
        costs: StageCosts | Sequence[StageCosts],
        transfer_seconds: float,
    ) -> None:
        actions = [action for row in rows for action in _actions(row)]
        self._stages = 1 + max((action.stage for action in actions), default=-1)
        self._costs = [costs] * self._stages if isinstance(costs, StageCosts) else costs
        self._transfer_seconds = transfer_seconds
        self._sent = {
            message_in(transfer)
            for row in rows
            for item in row
            if isinstance(item, TransferGroup)
            for transfer in item
        }
        self.spans: dict[Action, Span] = {}
        self._made: dict[StageMessage, float] = {}
        self._arrived: dict[StageMessage, float] = {}
        self._started: dict[tuple[StageMessage, bool], float] = {}

    def seconds(self, action: Action) -> float:
        return self._costs[action.stage].seconds(action.kind)

    def advance(self, stream: _Stream) -> bool:
        """Run the stream's items until one of them must wait. Return whether anything happened."""
        happened = False
        while stream.items:
            item = stream.items[0]
            known = len(self._started)
            if isinstance(item, Action):
                done = self._compute(item, stream)
            else:
                done = self._exchange(item, stream)
            happened |= done or len(self._started) > known
            if not done:
                break
            stream.items.popleft()
        return happened

    def _compute(self, action: Action, stream: _Stream) -> bool:
        needed = message_for(action, self._stages)
        ready: float | None = 0.0
        if needed is not None:
            ready = (self._arrived if needed in self._sent else self._made).get(needed)
        if ready is None:
            return False
        start = max(stream.free, ready)
        stream.free = start + self.seconds(action)
        self.spans[action] = (start, stream.free)
        made = message_of(action)
        if made is not None:
            self._made[made] = stream.free
        return True

    def _exchange(self, exchange: TransferGroup, stream: _Stream) -> bool:
        sent = [message_in(transfer) for transfer in exchange if transfer.kind.is_send]
        if any(message not in self._made for message in sent):
            return False
        start = max([stream.free, *(self._made[message] for message in sent)])
        for transfer in exchange:
            self._started.setdefault((message_in(transfer), transfer.kind.is_send), start)
        ends = [self._end(message_in(transfer)) for transfer in exchange]
        if None in ends:
            return False
        stream.free = max(end for end in ends if end is not None)
        return True

    def _end(self, message: StageMessage) -> float | None:
        """When a transfer ends; None while one of its ranks has not started it."""
        sides = [self._started.get((message, is_send)) for is_send in (True, False)]
        if None in sides:
            return None
        end = max(side for side in sides if side is not None) + self._transfer_seconds
        self._arrived[message] = end
        return end
