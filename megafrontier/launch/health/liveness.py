"""Who is there: all ranks at the start, and again once something has gone wrong, and only then.

At the start each rank leaves its host in the store at which all meet; rank 0 waits for the last
one, or publishes who has not come; a rank that cannot start comes to say why. Later a rank in
trouble raises the alarm, a key in that store. Whoever answers within `answer_seconds` is there;
rank 0 counts the answers in blocks of ranks, looks into those blocks alone that are not complete,
and publishes whom it misses. Where nothing moves and it misses nobody, it reads what each rank said
that it is at, and publishes who holds up the others. Where no word comes from rank 0, it is the one
that was lost, and the store with it.

In between nothing is sent: a waiting rank costs rank 0 one idle connection.
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
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import Operation, RankStatus

ANSWER_SECONDS = 3.0
VERDICT_SECONDS = 10.0
"""From the alarm to rank 0's word, at the most."""
ANSWER_RANKS, VERDICT_RANKS = 10_000, 2_000
"""So many ranks have a second more: rank 0's store is one thread, which serves some 100,000
requests a second, of which each rank makes seven until the verdict and four more to leave."""
_BLOCK = 64
_NAMED_HOSTS = _TOLD_REFUSALS = 8
_LONGEST = timedelta(days=20)  # what still fits the store's milliseconds


def answer_seconds(size: int) -> float:
    """How long rank 0 waits for the answers of so many ranks."""
    return ANSWER_SECONDS + size / ANSWER_RANKS


def verdict_seconds(size: int) -> float:
    """How long so many ranks wait for rank 0's word."""
    return VERDICT_SECONDS + size / VERDICT_RANKS


Missing = list[tuple[int, str]]
"""Ranks and their hosts, in rank order."""
Stuck = list[tuple[int, str, str]]
"""Ranks, their hosts, and what they are stuck in, in rank order."""
T = TypeVar("T")


@dataclass(frozen=True)
class Alarm:
    """Who noticed what. `code` is the exit code of all ranks if none is missing; `hang`: no rank
    has failed, but no step ends."""

    rank: int
    reason: str
    code: int
    hang: bool = False


@dataclass(frozen=True)
class Answers:
    """Who did not answer; where all did and nothing moves, for whom the others wait, if known, and
    on how many hosts all are."""

    missing: Missing
    stuck: Stuck
    hosts: int = 0


class LivenessCheck:
    """One rank's part. A thread that blocks in it needs one of its own, which `clone` gives."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self.identity = identity
        self.store = store
        self.first_host = identity.host
        self.status = RankStatus()

    def meet(
        self, seconds: float, refusal: FatalError | None = None, is_hosts: bool = False
    ) -> list[int]:
        """Wait for all ranks, so many seconds by rank 0's clock, and the others a little longer for
        its word. Returns those that have not come, the same to every rank that has. Raises
        RanksRefused on all where some, with a `refusal`, have come to say why they cannot start
        (`is_hosts`: what one rank looks for on each host), RuntimeError where rank 0 goes
        meanwhile.

        Each leaves its host, for the day on which the rank cannot name it itself.
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
            self._await_all(seconds)
        else:
            self.store.wait(["absent"], timedelta(seconds=seconds + verdict_seconds(size)))
        absent, refusals, count, part = json.loads(self._text("absent"))
        if not absent and not count:
            self.first_host = self._text("host/0")
        elif rank == 0:
            self._await_listeners(size - len(absent) - 1)
        elif rank not in absent:  # come in time
            self._listened()
        if count:
            raise RanksRefused([Refusal(*row) for row in refusals], count, size, part)
        return list(absent)

    def _refuse(self, error: FatalError, is_hosts: bool) -> None:
        number = self.store.add("refusals", 1)
        if is_hosts:
            self.store.add("refusing hosts", 1)
        # Rank 0's is kept, whatever its number: where all refuse it is the one that is told.
        if number <= _TOLD_REFUSALS or self.identity.rank == 0:
            row = self.identity.rank, self.identity.host, str(error), error.code
            self.store.set(f"refusal/{min(number, _TOLD_REFUSALS)}", json.dumps(row))

    def _publish_absent(self, absent: list[int]) -> None:
        count = self.store.add("refusals", 0)
        keys = [f"refusal/{number + 1}" for number in range(min(count, _TOLD_REFUSALS))]
        rows = [json.loads(self._text(key)) for key in keys if self.store.check([key])]
        # What one rank a host looks at, all hosts' may refuse, and no other rank.
        hosts = self.store.add("refusing hosts", 0) / max(1, self.store.add("hosts", 0))
        part = max(count / self.identity.world_size, hosts)
        self.store.compare_set("absent", "", json.dumps((absent, rows, len(rows) and count, part)))

    def _await_all(self, seconds: float) -> None:
        try:
            self.store.wait(["absent"], timedelta(seconds=seconds))
        except RuntimeError:  # torch's, at the end of the time
            self._publish_absent(self._without("host", self._incomplete("come", self._blocks())))

    def clone(self) -> "LivenessCheck":
        """The same over another connection."""
        store = self.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        other = LivenessCheck(store, self.identity)
        other.first_host, other.status = self.first_host, self.status
        return other

    def raise_alarm(self, alarm: Alarm) -> Alarm:
        """Wake all ranks. Returns the alarm that counts: another rank may have been first."""
        mine = json.dumps(asdict(alarm))
        return _decode(self.store.compare_set("alarm", "", mine))

    def wait_for_alarm(self) -> Alarm:
        """Block until some rank raises it. Raises RuntimeError when the store is gone."""
        while True:
            # Looked for once more at the end of the longest wait, which is an error like any other.
            with suppress(RuntimeError):
                self.store.wait(["alarm"], _LONGEST)
            if (found := self.alarm()) is not None:
                return found

    def alarm(self) -> Alarm | None:
        """The alarm, if there is one."""
        return _decode(self.store.get("alarm")) if self.store.check(["alarm"]) else None

    def answer(self, hang: bool) -> Answers:
        """Answer, and learn what the others did, and where `hang` what they are at. Every rank
        calls it once. Takes `answer_seconds`, less where all answer, and rank 0 up to twice that.
        Raises RuntimeError without word from rank 0, or blocks where the network swallows
        everything (see `within`)."""
        rank = self.identity.rank
        self.store.set(f"here/{rank}", json.dumps(self.status.current))
        self.store.add(f"answers/{rank // _BLOCK}", 1)
        if rank == 0:
            missing = self._count()
            answers = self._look_round() if hang and not missing else Answers(missing, [])
            self.store.set("verdict", json.dumps(asdict(answers)))
            self._await_listeners(self.identity.world_size - len(missing) - 1)
            return answers
        self.store.wait(["verdict"], timedelta(seconds=verdict_seconds(self.identity.world_size)))
        found = json.loads(self._text("verdict"))
        self._listened()
        missing, stuck = ([tuple(row) for row in found[name]] for name in ("missing", "stuck"))
        return Answers(missing, stuck, found["hosts"])

    def _count(self) -> Missing:
        blocks = self._blocks()
        deadline = time.monotonic() + answer_seconds(self.identity.world_size)
        while blocks and time.monotonic() < deadline:
            time.sleep(0.1)
            blocks = self._incomplete("answers", blocks)
        return [(rank, self._text(f"host/{rank}")) for rank in self._without("here", blocks)]

    def _look_round(self) -> Answers:
        hosts = [text.decode() for text in self._texts("host")]
        found = blockers([Operation(*json.loads(text)) for text in self._texts("here")])
        return Answers([], [(rank, hosts[rank], at) for rank, at in found.items()], len({*hosts}))

    def _texts(self, key: str) -> Iterator[bytes]:
        for block in self._blocks():
            yield from self.store.multi_get([f"{key}/{rank}" for rank in block])

    def _blocks(self) -> list[range]:
        size = self.identity.world_size
        return [range(first, min(first + _BLOCK, size)) for first in range(0, size, _BLOCK)]

    def _incomplete(self, counter: str, blocks: list[range]) -> list[range]:
        """Those of the blocks that have not all counted themselves."""
        return [b for b in blocks if self.store.add(f"{counter}/{b[0] // _BLOCK}", 0) < len(b)]

    def _without(self, key: str, blocks: list[range]) -> list[int]:
        """The ranks of these blocks that have not set their key."""
        return [rank for b in blocks for rank in b if not self.store.check([f"{key}/{rank}"])]

    def _listened(self) -> None:
        with suppress(RuntimeError):  # rank 0 may have gone: its word is known
            self.store.add("listeners", 1)

    def _await_listeners(self, count: int) -> None:
        """The store ends with rank 0, which may leave once the others know the verdict."""
        deadline = time.monotonic() + answer_seconds(self.identity.world_size)
        while self.store.add("listeners", 0) < count and time.monotonic() < deadline:
            time.sleep(0.02)

    def _text(self, key: str) -> str:
        return self.store.get(key).decode()


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


def _decode(raw: bytes) -> Alarm:
    return Alarm(**json.loads(raw))


def describe(lost: Missing) -> str:
    """Ranks and their hosts, in rank order, as words: `ranks 8-15 on frontier00002`."""
    hosts = [(host, [rank for rank, _ in found]) for host, found in groupby(lost, lambda x: x[1])]
    parts = []
    for host, ranks in hosts[:_NAMED_HOSTS]:
        whole = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
        numbers = f"{ranks[0]}-{ranks[-1]}" if whole else ", ".join(map(str, ranks))
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {numbers} on {host}")
    more = len(hosts) - _NAMED_HOSTS
    return "; ".join(parts) + (f"; and those of {more} more hosts" if more > 0 else "")


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """What `call` returns; None when it raises or takes longer: then it is left to itself, for a
    store behind a cut cable neither answers nor fails."""
    found: list[T] = []

    def run() -> None:
        try:
            found.append(call())
        except RuntimeError:  # torch's store errors are
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
