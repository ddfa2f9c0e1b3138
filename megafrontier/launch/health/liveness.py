"""Which ranks are alive: all of them must arrive at the start, and answer after an alarm.

Note [Liveness protocol]
All ranks meet at one store, which rank 0 (or torchrun) owns.

Both the start and the end of a run are a roll call: each rank reports under a key of its own. Rank
0 counts the reports in blocks of ranks, looks only into the blocks that are incomplete, and
publishes what follows from them. If rank 0 publishes nothing in time, rank 0 is the one that was
lost, and the store with it.

At the start each rank reports its host and, if it cannot start, why. Rank 0 publishes which ranks
are absent. Later, a rank that notices a problem raises the alarm: a key in the store, which a
thread of every rank waits for. Each rank then reports what it is doing. Rank 0 publishes which
ranks are missing or, if none is missing in a hang, which ranks block the others.

Between start and alarm nothing is sent: a waiting rank costs rank 0 one idle connection.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from megafrontier.common.errors import FatalError, RanksRefused
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import Operation, RankStatus

_BLOCK = 64
_NAMED_HOSTS = _NAMED_REFUSALS = _NAMED_WAITS = 8
_LONGEST = timedelta(days=20)  # the store counts milliseconds in 32 bits

Missing = Sequence[tuple[int, str]]
"""Ranks and their hosts, in rank order."""
Stuck = list[tuple[int, str, str]]
"""Ranks, their hosts, and the operation that each is stuck in or waits in, in rank order."""
T = TypeVar("T")


ABANDONED, STARTED_AGAIN = 0, -1
"""Codes of alarms that no rank answers. ABANDONED ends the threads that wait for an alarm. After
STARTED_AGAIN, the ranks abandon their groups: the rank that raised it has a new process, and
`reason` says what has ended the old one."""


@dataclass(frozen=True)
class Alarm:
    """A problem that `rank` noticed. `code` is the exit code of all ranks if none is missing.
    `hang`: no rank has failed, but no step ends."""

    rank: int
    reason: str
    code: int
    hang: bool = False


@dataclass(frozen=True)
class Answers:
    """The ranks that did not answer an alarm. If all answered in a hang: the ranks that block the
    others, as far as known, the number of hosts of all ranks, and the first ranks that wait in work
    of their own."""

    missing: Missing
    stuck: Stuck
    hosts: int = 0
    waiting: Stuck = field(default_factory=list)


class LivenessCheck:
    """One rank's part of the protocol. A thread that blocks in it needs its own, from `clone`."""

    def __init__(self, store: Store, identity: Identity, timeouts: Timeouts | None = None) -> None:
        self.identity = identity
        self.store = store
        self.first_host = identity.host
        self.status = RankStatus()
        self._timeouts = timeouts or Timeouts.of(identity.world_size)

    def clone(self) -> "LivenessCheck":
        """The same over another connection to the store."""
        store = self.store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        other = LivenessCheck(store, self.identity, self._timeouts)
        other.first_host, other.status = self.first_host, self.status
        return other

    def meet(self, seconds: float, refusal: FatalError | None = None) -> list[int]:
        """Wait until all ranks have arrived, up to `seconds` on rank 0 and a little longer on the
        others. Returns the absent ranks, the same on every rank that has arrived.

        `refusal`: why this rank cannot start. Raises RanksRefused on all ranks if some refuse, and
        RuntimeError if rank 0 leaves meanwhile.
        """
        size = self.identity.world_size
        why = None if refusal is None else (str(refusal), refusal.code)
        self._report("host", (self.identity.host, why))
        if self.identity.rank == 0:
            absent = self._without("host", seconds)
            arrivals = self._reports("host", sorted({*range(size)} - {*absent}))
            refusals = [(rank, host, *why) for rank, (host, why) in arrivals if why]
            hosts = {host for _, (host, _) in arrivals}
            are_few = 2 * len({host for _, host, *_ in refusals}) < len(hosts)
            found = (absent, self.identity.host, refusals[:_NAMED_REFUSALS], len(refusals), are_few)
            self._publish("met", found, len(arrivals) - 1)
        else:
            found = self._receive("met", seconds + 3 * self._timeouts.answer)
        absent, self.first_host, refusals, count, are_few = found
        if count:
            raise RanksRefused(refusals, count, size, are_few)
        return absent

    def raise_alarm(self, alarm: Alarm) -> Alarm:
        """Wake all ranks. Returns the alarm that counts, because another rank may be first."""
        mine = json.dumps(asdict(alarm))
        return _decode(self.store.compare_set("alarm", "", mine))

    def wait_for_alarm(self) -> Alarm:
        """Block until a rank raises the alarm. Raises RuntimeError when the store is gone."""
        while not self.store.check(["alarm"]):
            with suppress(RuntimeError):  # a timeout, or else `check` raises as well
                self.store.wait(["alarm"], _LONGEST)
        return _decode(self.store.get("alarm"))

    def answer(self, hang: bool) -> Answers:
        """Answer the alarm, and return what rank 0 publishes. Every rank calls it once.

        Takes at most three times `Timeouts.answer`. Raises RuntimeError if rank 0 does not publish
        in time. May block for good if the network drops all packets: use it with
        `call_with_timeout`.
        """
        size = self.identity.world_size
        self._report("here", self.status.current)
        if self.identity.rank:
            return Answers(**self._receive("verdict", 3 * self._timeouts.answer))
        lost = self._without("here", self._timeouts.answer)
        answers = Answers([(rank, host) for rank, (host, _) in self._reports("host", lost)], [])
        if hang and not lost:
            doing = [Operation(*what) for _, what in self._reports("here", range(size))]
            hosts = [host for _, (host, _) in self._reports("host", range(size))]
            stuck = [(rank, hosts[rank], what) for rank, what in blockers(doing).items()]
            waits = [(r, hosts[r], one.name) for r, one in enumerate(doing) if one.waits_for]
            named = [wait for wait in waits if wait[-1]][:_NAMED_WAITS]
            answers = Answers([], stuck, len({*hosts}), named)
        self._publish("verdict", asdict(answers), size - len(lost) - 1)
        return answers

    def _report(self, key: str, value: object) -> None:
        """Report under `key` on this rank."""
        self.store.set(f"{key}/{self.identity.rank}", json.dumps(value))
        self.store.add(f"{key}s/{self.identity.rank // _BLOCK}", 1)

    def _reports(self, key: str, ranks: Sequence[int]) -> list[tuple[int, Any]]:
        """What these ranks, which have reported, have reported under `key`."""
        found: list[bytes] = []
        for first in range(0, len(ranks), _BLOCK):
            part = ranks[first : first + _BLOCK]
            found += self.store.multi_get([f"{key}/{rank}" for rank in part])
        return list(zip(ranks, map(json.loads, found), strict=True))

    def _without(self, key: str, seconds: float) -> list[int]:
        """Wait for all ranks to report under `key`. Returns those that do not within `seconds`."""
        size, deadline = self.identity.world_size, time.monotonic() + seconds
        blocks = [range(first, min(first + _BLOCK, size)) for first in range(0, size, _BLOCK)]
        while True:
            blocks = [b for b in blocks if self.store.add(f"{key}s/{b[0] // _BLOCK}", 0) < len(b)]
            if not blocks or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return [rank for b in blocks for rank in b if not self.store.check([f"{key}/{rank}"])]

    def _publish(self, key: str, value: object, listeners: int) -> None:
        """Publish on rank 0, and wait until the others have read it: the store may end with rank
        0."""
        self.store.set(key, json.dumps(value))
        deadline = time.monotonic() + self._timeouts.answer
        while self.store.add(f"{key}/read", 0) < listeners and time.monotonic() < deadline:
            time.sleep(0.02)

    def _receive(self, key: str, seconds: float) -> Any:
        """Wait for what rank 0 publishes. Raises RuntimeError if it takes longer."""
        self.store.wait([key], timedelta(seconds=seconds))
        found = json.loads(self.store.get(key))
        with suppress(RuntimeError):  # rank 0 has left
            self.store.add(f"{key}/read", 1)
        return found


def _decode(raw: bytes) -> Alarm:
    return Alarm(**json.loads(raw))


def blockers(operations: Sequence[Operation]) -> dict[int, str]:
    """The ranks that block the others, in rank order, and what each is stuck in: local work that
    waits for nothing, or an exchange with a peer that reports the same exchange. (Otherwise it
    waits for its peer, which is busy elsewhere.)

    `operations`: what each rank reports, in rank order.
    """
    return {
        rank: one.name
        for rank, one in enumerate(operations)
        if one.name
        and not one.waits_for
        and (one.peer is None or operations[one.peer] == Operation(one.name, rank))
    }


def describe(ranks: Missing) -> str:
    """Ranks and their hosts, in rank order, as text: `ranks 8-15 on frontier00002`."""
    hosts = [(host, [rank for rank, _ in found]) for host, found in groupby(ranks, lambda x: x[1])]
    parts = []
    for host, numbers in hosts[:_NAMED_HOSTS]:
        is_range = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
        text = f"{numbers[0]}-{numbers[-1]}" if is_range else ", ".join(map(str, numbers))
        parts.append(f"rank{'s' if len(numbers) > 1 else ''} {text} on {host}")
    more = len(hosts) - _NAMED_HOSTS
    return "; ".join(parts) + (f"; and those of {more} more hosts" if more > 0 else "")


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T | None:
    """Return what `call` returns; None if it raises OSError or RuntimeError (as torch's store),
    or takes longer than `seconds`. It then goes on in its thread: a store behind a broken network
    neither answers nor fails."""
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError, OSError):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
