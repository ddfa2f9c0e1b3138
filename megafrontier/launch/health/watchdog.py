"""How a rank ends when others are lost or nothing moves any more: in bounded time, for one reason.

Four things set it off: an exception of this rank, another rank's alarm, the end of a rank beside it
on its host, or a step that does not end. Each leads to the same roll call (see
`launch/health/liveness.py`), and after it every rank leaves: rank 0 with the line that says who was
lost or that the run hung, the others without a word. The main thread may be stuck in a collective
for good, so the threads here end the process themselves; and where these cannot run, the backstop
does.

Before the first step only the nodes and their links are tried, which takes seconds. Where that does
not end, the hosts that do not answer the roll call are listed in bad-nodes.txt; where all answer,
those whose trial or link the others wait for, as long as these are the most.

Note on local ranks. Their parent knows who has died and ends the others, so they raise no alarm
for an exception; for a hang they do, and look for one each second in their common file.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from megafrontier.common.errors import (
    BAD_NODE,
    LOST,
    FatalError,
    Unconnected,
    is_collective,
    print_error,
)
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.hard_timeout import HardTimeout
from megafrontier.launch.health.liveness import (
    Alarm,
    Answers,
    LivenessCheck,
    Missing,
    answer_seconds,
    describe,
    verdict_seconds,
    within,
)
from megafrontier.launch.health.peer_monitor import PeerMonitor
from megafrontier.launch.health.stacks import hang_folder, write_stacks
from megafrontier.launch.local import PEER_SECONDS
from megafrontier.launch.rendezvous import ALL_PEERS
from megafrontier.parallel.env import Identity
from megafrontier.partition.comm.ledger import Ledger

START_FACTOR = 3
"""Start-up and first step (kernels, connections, compilation) may take so many times as long."""
MEETING_SECONDS = 600.0
"""The most that ranks may take to come: thousands of them import torch from the same storage."""
TRIAL_SECONDS, TRIAL_RANKS = 180.0, 200
"""The most that ranks may take to connect to each other, and again for the pre-flight, and so many
ranks for a second more: all of them open connections to the same store (torch's own figure for
96,000 is 100 s), and do so twice."""
STORAGE_SECONDS = 20.0
"""The most that each last word on the storage may take."""
LOCKED_SECONDS = 60.0
"""How much longer than a step that hangs the threads here may not have run at all."""
FILE_SECONDS = 5.0
"""The most that local ranks look for their common file, which somebody may have tidied away."""
PAUSE_SECONDS = 5.0
"""What a thread waits longer than it asked for is so long where the process was suspended."""
LEAST_SECONDS, NO_LIMIT_SECONDS = 1800.0, 7 * 86400.0
"""How long a collective may take at least, and where hangs are not looked for: torch wants a
number."""


def collective_seconds(hang_seconds: float) -> float:
    """Timeout of the process groups: later than the watch, which says more."""
    if hang_seconds == 0:
        return NO_LIMIT_SECONDS
    return max(LEAST_SECONDS, 2 * START_FACTOR * hang_seconds)


def meeting_seconds(hang_seconds: float) -> float:
    """How long ranks may take to come to where all meet."""
    return min(MEETING_SECONDS, START_FACTOR * hang_seconds or MEETING_SECONDS)


class Watchdog:
    """One rank's. `beat` tells it that something has been finished."""

    def __init__(self, identity: Identity, directory: Path, hang_seconds: float) -> None:
        self.ledger: Ledger | None = None
        """Whose crossings a report names."""
        self.last_words: Callable[[int, str], None] = lambda code, line: None
        """Told, on rank 0, with which code and why the run ends."""
        self._identity, self._directory = identity, directory
        self._roll: LivenessCheck | None = None
        self._hang_seconds = hang_seconds
        self._limit_seconds = START_FACTOR * hang_seconds
        self._answer_seconds = answer_seconds(identity.world_size)
        self._verdict_seconds = verdict_seconds(identity.world_size)
        self._trial_seconds = TRIAL_SECONDS + identity.world_size / TRIAL_RANKS
        self._tries_nodes = self._has_failed = False
        self._step, self._last = 0, time.monotonic()
        self._neighbours = PeerMonitor(identity) if identity.has_launcher else None
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._backstop = HardTimeout()

    @property
    def _is_local(self) -> bool:
        return self._identity.source == "local"

    def start(self, roll: LivenessCheck | None) -> None:
        """The ranks have met, and connect to each other: begin to watch and listen."""
        if roll is not None:
            # To connect, the main thread waits in the store and keeps others out meanwhile.
            self._roll = roll.clone()
            if self._is_local:
                self._roll.store.set_timeout(timedelta(seconds=FILE_SECONDS))
        self._try_nodes(True)
        if self._hang_seconds > 0:
            threading.Thread(target=self._look, name="watch", daemon=True).start()
        if self._roll is not None and not self._is_local:
            ear = self._roll.clone()
            threading.Thread(target=self._listen, args=(ear,), name="listen", daemon=True).start()
            if self._neighbours is not None:
                self._neighbours.watch(self._on_neighbour_lost)

    def connected(self) -> None:
        """What may not move from here on is more than the nodes."""
        self._try_nodes(False)

    @contextmanager
    def trying_nodes(self) -> Iterator[None]:
        """Meanwhile nodes and links are tried, and nothing else."""
        self._try_nodes(True)
        yield
        self._try_nodes(False)

    def _try_nodes(self, now: bool) -> None:
        self._last = time.monotonic()  # first, for the thread that compares it
        self._tries_nodes = now

    def begin(self, step: int, ledger: Ledger) -> None:
        """The run stands at `step`; the first one from here may take longer than the others."""
        self._step, self.ledger, self._last = step, ledger, time.monotonic()

    def beat(self, step: int | None = None) -> None:
        """A step is finished, or without one a part of it or of what is done between two."""
        self._last = time.monotonic()
        if step is not None:
            self._step, self._limit_seconds = step, self._hang_seconds

    def close(self) -> None:
        """The ranks leave in order: a store that goes away means nothing any more, nor does a
        neighbour. May be called twice."""
        if self._neighbours is not None and not self._closed.is_set():
            self._neighbours.leave()
        self._closed.set()
        self._backstop.disarm()

    def fail(self, error: Exception) -> None:
        """Ask all ranks whether this rank's exception comes of a lost one; then this does not
        return. It does where all answer: the exception is this rank's own. Asked once, and not
        while the ranks leave in order."""
        if self._has_failed or self._closed.is_set():
            return
        self._has_failed = True
        if self._is_local and isinstance(error, Unconnected):
            time.sleep(PEER_SECONDS)  # a peer may be gone: then the parent ends this rank now
        if self._roll is None or self._is_local:
            return
        rank = self._identity.rank
        if isinstance(error, Unconnected):
            time.sleep(self._answer_seconds)  # the others come as far as they can, and no farther
            self._call(Alarm(rank, str(error), LOST, hang=True))
        code = error.code if isinstance(error, FatalError) else 1
        self._call(Alarm(rank, "", code))

    def _look(self) -> None:
        while not self._pause(min(1.0, self._hang_seconds / 4)):
            if not self._ending.locked():
                self._backstop.arm(self._limit_seconds + LOCKED_SECONDS)
            heard = self._alarm_in_file()
            if heard is not None:
                self._end(heard)
            limit, code = self._limit_seconds, LOST
            if self._tries_nodes:
                limit, code = min(limit, self._trial_seconds), BAD_NODE
            idle = time.monotonic() - self._last
            if idle > limit:
                after = "before the first step" if self._tries_nodes else f"after step {self._step}"
                reason = f"nothing finished for {idle:.0f} s {after}"
                if limit != self._trial_seconds:
                    reason += f" (train.hang_seconds {self._hang_seconds:g})"
                self._call(Alarm(self._identity.rank, reason, code, hang=True))

    def _pause(self, seconds: float) -> bool:
        """Whether the watch has been closed meanwhile. Of the time in which the process was
        suspended, by Ctrl-Z or Slurm, it can be said that nothing was finished, but no more."""
        begin = time.monotonic()
        is_over = self._closed.wait(seconds)
        longer = time.monotonic() - begin - seconds
        if longer > PAUSE_SECONDS:
            self._last += longer
        return is_over

    def _alarm_in_file(self) -> Alarm | None:
        """Another local rank's."""
        if self._roll is None or not self._is_local:
            return None
        with suppress(RuntimeError):  # torch's: the file has gone, with nothing else lost
            return self._roll.alarm()
        return None

    def _listen(self, ear: LivenessCheck) -> None:
        try:
            alarm = ear.wait_for_alarm()
        except RuntimeError:
            # Rank 0 may only have been a little faster to leave.
            if not self._closed.wait(self._answer_seconds):
                self._leave(
                    LOST, f"rank 0 on {ear.first_host}: lost, no answer", first_is_lost=True
                )
            return
        if alarm.rank != self._identity.rank:  # else the thread that raised it sees to it
            self._end(alarm)

    def _on_neighbour_lost(self, rank: int) -> None:
        """A neighbour has ended, perhaps for a reason that it is about to tell all ranks."""
        if not self._closed.wait(self._answer_seconds):
            reason = f"rank {rank} has ended"
            self._call(Alarm(self._identity.rank, reason, LOST, hang=True))

    def _call(self, alarm: Alarm) -> None:
        """Raise the alarm, unless another rank has, and end."""
        roll = self._roll
        counts = (
            None if roll is None else within(self._verdict_seconds, lambda: roll.raise_alarm(alarm))
        )
        self._end(alarm if counts is None else counts)

    def _end(self, alarm: Alarm) -> None:
        """Leave with all ranks. Returns only for this rank's own failure, which it explains
        itself."""
        if not self._ending.acquire(blocking=False):
            time.sleep(5 * STORAGE_SECONDS)  # another thread is at it and ends the process
            return
        self._backstop.arm(
            self._verdict_seconds + 2 * self._answer_seconds + 3 * STORAGE_SECONDS + LOCKED_SECONDS
        )
        report = threading.Thread(target=self._report, daemon=True)
        if alarm.hang:
            report.start()
            # Not for long: what hangs may be the storage, and an answer is waited for.
            report.join(self._answer_seconds / 2)
        answers = self._answers(alarm.hang)
        if alarm.hang:
            report.join(STORAGE_SECONDS)
        if answers.missing:
            first_is_lost = answers.missing[0][0] == 0
            self._leave(*self._lost(alarm, answers.missing), first_is_lost)
        if alarm.hang:
            self._leave(*self._hung(alarm, answers))
        if alarm.rank != self._identity.rank:
            self._leave(alarm.code)
        self._backstop.disarm()

    def _answers(self, hang: bool) -> Answers:
        roll = self._roll
        if roll is None:
            return Answers([], [])
        found = within(self._verdict_seconds + self._answer_seconds, lambda: roll.answer(hang))
        return Answers([(0, roll.first_host)], []) if found is None else found

    def _lost(self, alarm: Alarm, missing: Missing) -> tuple[int, str]:
        line = f"{describe(missing)}: lost, no answer{self._where(alarm)}"
        knows_whom = missing[0][0] != 0  # without rank 0 a rank cannot tell who is cut off
        if self._is_local or not (alarm.hang and alarm.code == BAD_NODE and knows_whom):
            return LOST, line
        return self._listed(line, missing)

    def _hung(self, alarm: Alarm, answers: Answers) -> tuple[int, str]:
        why = f"though every rank answers{self._where(alarm)}"
        if not answers.stuck:
            return LOST, f"the run hangs, {why}"
        ranks = [(rank, host) for rank, host, _ in answers.stuck]
        places = {at for *_, at in answers.stuck}
        line = f"{describe(ranks)}: stuck at {', '.join(sorted(places))}, {why}"
        count = len({host for _, host in ranks})
        # What most hosts fail is no matter of single nodes. And gloo connects to one peer after the
        # other: beside the two ends of a dead link, those may hang that would have come after.
        if self._is_local or 2 * count > answers.hosts or (ALL_PEERS in places and count > 2):
            return LOST, line
        return self._listed(line, ranks)

    def _listed(self, line: str, ranks: Missing) -> tuple[int, str]:
        """Without the list, which rank 0 writes, another start would meet the same nodes."""
        who = self._identity
        folder = self._directory
        said = within(STORAGE_SECONDS, lambda: excluded_nodes.exclude(folder, ranks, who))
        return (LOST, line) if said is None else (BAD_NODE, line + said)

    def _where(self, alarm: Alarm) -> str:
        folder = hang_folder(self._directory, self._step)
        return f"; {alarm.reason}, stacks in {folder}" if alarm.hang else ""

    def _report(self) -> None:
        idle = time.monotonic() - self._last
        folder = hang_folder(self._directory, self._step)
        # Neither a full disk nor a device that has failed may keep the rank from leaving.
        with suppress(OSError, RuntimeError):
            write_stacks(folder, self._identity, self._step, idle, self.ledger)

    def _leave(self, code: int, line: str = "", first_is_lost: bool = False) -> None:
        """End the process as it stands: to unwind it would wait for what is lost."""
        first = self._identity.rank == 0
        try:
            # Two a host speak where rank 0 cannot: one of them may have died too.
            if line and (first or (first_is_lost and self._identity.local_rank < 2)):
                print_error(f"megafrontier: {line}")
            if line and first:
                within(STORAGE_SECONDS, lambda: self.last_words(code, line))
            sys.stdout.flush()
        finally:  # whatever fails, a closed stream for instance
            os._exit(code)


@contextmanager
def watched(watch: Watchdog) -> Iterator[None]:
    """Watch over connected ranks to the end of the body.

    What all ranks raise alike (bad input, unfit nodes, a failed run) they also leave with alike.
    """
    watch.connected()
    try:
        yield
    except Exception as error:
        if not is_collective(error):
            watch.fail(error)
        raise
    finally:
        watch.close()
