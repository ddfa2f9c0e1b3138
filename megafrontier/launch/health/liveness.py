"""Which ranks are alive: all of them must arrive at the start, and answer after an alarm.

Note [Liveness protocol]
All ranks meet at one store, which rank 0 (or torchrun) owns.

At the start each rank writes its host into the store. Rank 0 waits for the last rank and publishes
which ranks are absent. A rank that cannot start arrives as well, to say why.

Later, a rank that notices a problem raises the alarm: a key in the store, which a thread of every
rank waits for. Each rank answers by setting a key of its own. Rank 0 counts the answers in blocks
of ranks, looks only into the blocks that are incomplete, and publishes which ranks are missing. If
none is missing in a hang, it reads what each rank is doing and publishes which ranks block the
others. If rank 0 publishes nothing in time, rank 0 is the one that was lost, and the store with it.

Between start and alarm nothing is sent: a waiting rank costs rank 0 one idle connection.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from megafrontier.common.errors import FatalError, RanksRefused, Refusal
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import Operation, RankStatus

_BLOCK = 64
_NAMED_HOSTS = _NAMED_REFUSALS = 8
_LONGEST = timedelta(days=20)  # the store counts milliseconds in 32 bits

Missing = list[tuple[int, str]]
"""Ranks and their hosts, in rank order."""
Stuck = list[tuple[int, str, str]]
"""Ranks, their hosts, and the operation that each is stuck in, in rank order."""
T = TypeVar("T")


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
    others, as far as known, and the number of hosts of all ranks."""

    missing: Missing
    stuck: Stuck
    hosts: int = 0


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

    def meet(
        self, seconds: float, refusal: FatalError | None = None, is_hosts: bool = False
    ) -> list[int]:
        """Wait until all ranks have arrived, up to `seconds` on rank 0 and a little longer on the
        others. Returns the absent ranks, the same on every rank that has arrived.

        `refusal`: why this rank cannot start. `is_hosts`: the first local rank found it for its
        host. Raises RanksRefused on all ranks if some refuse, and RuntimeError if rank 0 leaves
        meanwhile.
        """
        rank, size = self.identity.rank, self.identity.world_size
        if refusal is not None:
            self._refuse(refusal, is_hosts)
        if self.identity.local_rank == 0:
            self.store.add("hosts", 1)
        self.store.set(f"host/{rank}", self.identity.host)
        self.store.add(f"come/{rank // _BLOCK}", 1)
        if self.store.add("met", 1) == size:
            self._publish_absent([])
        if rank == 0:
            self._wait_for_all(seconds)
        else:
            self.store.wait(["absent"], timedelta(seconds=seconds + self._timeouts.outcome))
        absent, refusals, count, part = json.loads(self._text("absent"))
        if not absent and not count:
            self.first_host = self._text("host/0")
        elif rank == 0:
            self._wait_for_listeners(size - len(absent) - 1)
        elif rank not in absent:  # an absent rank may arrive late
            self._confirm()
        if count:
            raise RanksRefused([Refusal(*row) for row in refusals], count, size, part)
        return list(absent)

    def _refuse(self, error: FatalError, is_hosts: bool) -> None:
        number = self.store.add("refusals", 1)
        if is_hosts:
            self.store.add("refusing hosts", 1)
        # Rank 0's refusal is kept in any case: it is the one to print if all ranks refuse.
        if number <= _NAMED_REFUSALS or self.identity.rank == 0:
            row = self.identity.rank, self.identity.host, str(error), error.code
            self.store.set(f"refusal/{min(number, _NAMED_REFUSALS)}", json.dumps(row))

    def _publish_absent(self, absent: list[int]) -> None:
        count = self.store.add("refusals", 0)
        keys = [f"refusal/{number + 1}" for number in range(min(count, _NAMED_REFUSALS))]
        rows = [json.loads(self._text(key)) for key in keys if self.store.check([key])]
        # If only one rank a host looks, these ranks may be all hosts, but few of all ranks.
        hosts = self.store.add("refusing hosts", 0) / max(1, self.store.add("hosts", 0))
        part = max(count / self.identity.world_size, hosts)
        self.store.compare_set("absent", "", json.dumps((absent, rows, len(rows) and count, part)))

    def _wait_for_all(self, seconds: float) -> None:
        try:
            self.store.wait(["absent"], timedelta(seconds=seconds))
        except RuntimeError:  # torch's timeout
            self._publish_absent(self._without("host", self._incomplete("come", self._blocks())))

    def raise_alarm(self, alarm: Alarm) -> Alarm:
        """Wake all ranks. Returns the alarm that counts, because another rank may be first."""
        mine = json.dumps(asdict(alarm))
        return _decode(self.store.compare_set("alarm", "", mine))

    def wait_for_alarm(self) -> Alarm:
        """Block until a rank raises the alarm. Raises RuntimeError when the store is gone."""
        while True:
            # A wait that timed out raises RuntimeError as well; `alarm` raises if it was the store.
            with suppress(RuntimeError):
                self.store.wait(["alarm"], _LONGEST)
            if (found := self.alarm()) is not None:
                return found

    def alarm(self) -> Alarm | None:
        """The alarm, if a rank has raised it."""
        return _decode(self.store.get("alarm")) if self.store.check(["alarm"]) else None

    def answer(self, hang: bool) -> Answers:
        """Answer the alarm, and return what rank 0 publishes. Every rank calls it once.

        Takes at most `Timeouts.answer` (twice that on rank 0). Raises RuntimeError if rank 0 does
        not publish in time. May block for good if the network drops all packets: use it with
        `call_with_timeout`.
        """
        rank = self.identity.rank
        self.store.set(f"here/{rank}", json.dumps(self.status.current))
        self.store.add(f"answers/{rank // _BLOCK}", 1)
        if rank == 0:
            missing = self._count_answers()
            answers = self._find_blockers() if hang and not missing else Answers(missing, [])
            self.store.set("verdict", json.dumps(asdict(answers)))
            self._wait_for_listeners(self.identity.world_size - len(missing) - 1)
            return answers
        self.store.wait(["verdict"], timedelta(seconds=self._timeouts.outcome))
        found = json.loads(self._text("verdict"))
        self._confirm()
        missing, stuck = ([tuple(row) for row in found[name]] for name in ("missing", "stuck"))
        return Answers(missing, stuck, found["hosts"])

    def _count_answers(self) -> Missing:
        blocks = self._blocks()
        deadline = time.monotonic() + self._timeouts.answer
        while blocks and time.monotonic() < deadline:
            time.sleep(0.1)
            blocks = self._incomplete("answers", blocks)
        return [(rank, self._text(f"host/{rank}")) for rank in self._without("here", blocks)]

    def _find_blockers(self) -> Answers:
        hosts = [text.decode() for text in self._texts("host")]
        found = blockers([Operation(*json.loads(text)) for text in self._texts("here")])
        return Answers([], [(rank, hosts[rank], at) for rank, at in found.items()], len({*hosts}))

    def _blocks(self) -> list[range]:
        size = self.identity.world_size
        return [range(first, min(first + _BLOCK, size)) for first in range(0, size, _BLOCK)]

    def _incomplete(self, counter: str, blocks: list[range]) -> list[range]:
        """The blocks in which not all ranks have counted themselves."""
        return [b for b in blocks if self.store.add(f"{counter}/{b[0] // _BLOCK}", 0) < len(b)]

    def _without(self, key: str, blocks: list[range]) -> list[int]:
        """The ranks of these blocks that have not set their key."""
        return [rank for b in blocks for rank in b if not self.store.check([f"{key}/{rank}"])]

    def _confirm(self) -> None:
        """Tell rank 0 that this rank has read what it published."""
        with suppress(RuntimeError):  # rank 0 has left
            self.store.add("listeners", 1)

    def _wait_for_listeners(self, count: int) -> None:
        """Wait until the others have read what rank 0 published: the store ends with rank 0."""
        deadline = time.monotonic() + self._timeouts.answer
        while self.store.add("listeners", 0) < count and time.monotonic() < deadline:
            time.sleep(0.02)

    def _text(self, key: str) -> str:
        return self.store.get(key).decode()

    def _texts(self, key: str) -> Iterator[bytes]:
        for block in self._blocks():
            yield from self.store.multi_get([f"{key}/{rank}" for rank in block])


def _decode(raw: bytes) -> Alarm:
    return Alarm(**json.loads(raw))


def blockers(operations: Sequence[Operation]) -> dict[int, str]:
    """The ranks that block the others, in rank order, and what each is stuck in: local work, or an
    exchange with a peer that reports the same exchange.

    `operations`: what each rank reports, in rank order.
    """

    def blocks(rank: int, name: str, peer: int | None) -> bool:
        if peer is None:
            return bool(name)
        # Otherwise this rank waits for its peer, which is busy elsewhere.
        return operations[peer] == Operation(name, rank)

    return {rank: op.name for rank, op in enumerate(operations) if blocks(rank, *op)}


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
    """Return what `call` returns; None if it raises RuntimeError (as torch's store does) or takes
    longer than `seconds`. It then goes on in its thread: a store behind a broken network neither
    answers nor fails."""
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
