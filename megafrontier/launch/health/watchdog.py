"""End a rank in bounded time when other ranks are lost, or when the run hangs.

Note [How a rank ends]
Four events start the end of a rank: its own exception, the alarm of another rank, the end of a
neighbour on its host, and a step that takes too long. Each leads to the liveness check (see
`launch/health/liveness.py`). After it every rank leaves: rank 0 prints the one line that says which
ranks were lost or that the run hung, and the others print nothing. The main thread may be stuck in
a collective for good, so the watchdog's threads end the process themselves. If they cannot run,
the hard timeout ends it.

Before the first step, while only nodes and links are used, a hang is a matter of nodes. The hosts
that do not answer are then excluded from the next start. If all hosts answer, the hosts that block
the others are excluded, unless most hosts do.

Local ranks have a parent that names a rank that was killed, and ends the others before an alarm is
answered, or has them abandon their groups (Note [Survivors] in `launch/survivors.py`).
"""

import faulthandler
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megafrontier.comm.ledger import Ledger
from megafrontier.common.errors import (
    BAD_NODE,
    FINAL,
    LOST,
    FatalError,
    Unconnected,
    is_collective,
    print_error,
)
from megafrontier.launch import survivors
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.liveness import (
    ABANDONED,
    STARTED_AGAIN,
    Alarm,
    Answers,
    LivenessCheck,
    Missing,
    Stuck,
    call_with_timeout,
    describe,
)
from megafrontier.launch.health.peer_monitor import PeerMonitor
from megafrontier.launch.health.stacks import arm_hard_timeout, hang_folder, write_stacks
from megafrontier.launch.health.timeouts import LOCAL_GRACE, Timeouts
from megafrontier.launch.rendezvous import ALL_PEERS
from megafrontier.parallel.env import Identity, tasks_per_node
from megafrontier.parallel.fault_injection import fault_point
from megafrontier.parallel.world import RankStatus


class Watchdog:
    """One rank's watchdog. Call `beat` whenever a step, or part of one, is finished."""

    def __init__(self, identity: Identity, directory: Path, timeouts: Timeouts) -> None:
        self.on_end: Callable[[int, str, Missing], None] = lambda code, line, lost: None
        """Called on rank 0 with the exit code, the line and the ranks that were lost, before the
        process ends."""
        self._identity, self._directory, self._timeouts = identity, directory, timeouts
        self._ledger: Ledger | None = None
        self._liveness: LivenessCheck | None = None
        self._status = RankStatus()
        self._checks_nodes = False
        self._limit_seconds = timeouts.first_step
        self._step = self._beats = 0
        self._idle_seconds = 0.0
        self._peers = PeerMonitor(identity) if identity.has_launcher else None
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._survivor = survivors.current()
        if self._survivor is not None:
            self._survivor.on_abandon(self._abandon)

    def start(self, liveness: LivenessCheck | None) -> None:
        """Begin to watch and listen. Call it when the ranks have met, before they connect to each
        other. `liveness`: None for a single process."""
        self._set_checks_nodes(True)
        if liveness is not None:
            # A connection of its own: the main thread blocks the other one while ranks connect.
            self._liveness, self._status = liveness.clone(), liveness.status
            if self._survivor is not None:
                self._survivor.tell_parent(survivors.MET)
            if self._closed.is_set():  # the rank has been told to abandon its groups
                return
            self._start_thread(self._listen, self._liveness.clone())
            if self._peers is not None:
                self._peers.start(self._on_peer_lost)
        if self._timeouts.hang > 0:
            self._start_thread(self._watch)

    @staticmethod
    def _start_thread(target: Callable[..., None], *arguments: object) -> None:
        name = target.__name__.strip("_")
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch over connected ranks while the body runs.

        An error that all ranks raise alike (bad input, unfit nodes, a failed run) ends them
        without an alarm.
        """
        self._set_checks_nodes(False)
        try:
            yield
        except Exception as error:
            if not is_collective(error):
                self.fail(error)
            raise
        finally:
            self.close()

    @contextmanager
    def checking_nodes(self) -> Iterator[None]:
        """Blame nodes for a hang in the body, because only nodes and links are used there."""
        self._set_checks_nodes(True)
        yield
        self._set_checks_nodes(False)

    def _set_checks_nodes(self, is_on: bool) -> None:
        self.beat()
        self._checks_nodes = is_on

    def begin(self, step: int, ledger: Ledger) -> None:
        """The run starts after `step`. The first step may take longer than the others."""
        self._step, self._ledger = step, ledger
        self._status.waits_for = ledger.waits_for
        self.beat()

    def beat(self, step: int | None = None) -> None:
        """`step` is finished; None: part of a step, or of the work between two steps."""
        self._beats += 1
        if step is not None:
            self._step, self._limit_seconds = step, self._timeouts.hang
            fault_point("step", step=step)

    def close(self) -> None:
        """Stop watching, because the ranks leave in order. May be called twice."""
        if self._peers is not None and not self._closed.is_set():
            self._peers.leave()
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _abandon(self) -> None:
        """Stop watching, because the rank abandons its groups. End the thread that listens."""
        self.close()
        liveness = self._liveness
        if liveness is not None:
            alarm = Alarm(self._identity.rank, "", ABANDONED)
            call_with_timeout(self._timeouts.answer, lambda: liveness.raise_alarm(alarm))

    def fail(self, error: Exception) -> None:
        """Find out whether `error` of this rank was caused by a lost rank, or a dead link.

        Does not return in that case. Returns if all ranks answer: the error is this rank's own.
        No effect after `close`.
        """
        if self._closed.is_set() or self._liveness is None:
            return
        rank, survivor = self._identity.rank, self._survivor
        if survivor is not None and survivor.is_abandoning(error):
            return
        if isinstance(error, Unconnected):
            # Until all other ranks wait for one that is stuck.
            time.sleep(self._timeouts.answer)
            self._raise_alarm(Alarm(rank, str(error), LOST, hang=True))
        if survivor is None or survivor.is_alone:  # otherwise the parent tells the others
            code = error.code if isinstance(error, FatalError) else 1
            self._raise_alarm(Alarm(rank, "", code))

    def _watch(self) -> None:
        """Look once a second for a hang."""
        beats, pause = 0, min(1.0, self._timeouts.hang / 4)
        while not self._closed.wait(pause):
            limit, code, checks_nodes = self._limit_seconds, LOST, self._checks_nodes
            # Counted, so that time for which the process was suspended does not count.
            self._idle_seconds = 0.0 if self._beats != beats else self._idle_seconds + pause
            beats = self._beats
            if not self._ending.locked():
                arm_hard_timeout(limit + 3 * self._timeouts.storage)
            if checks_nodes:
                limit, code = min(limit, self._timeouts.check_nodes), BAD_NODE
            if self._idle_seconds > limit:
                after = f"after step {self._step} (train.hang_seconds {self._timeouts.hang:g})"
                when = "before the first step" if checks_nodes else after
                reason = f"nothing finished for {self._idle_seconds:.0f} s {when}"
                self._raise_alarm(Alarm(self._identity.rank, reason, code, hang=True))
        faulthandler.cancel_dump_traceback_later()

    def _listen(self, liveness: LivenessCheck) -> None:
        try:
            alarm = liveness.wait_for_alarm()
        except RuntimeError:
            # The store is gone, but rank 0 may only have left in order a little earlier.
            if not self._closed.wait(self._timeouts.answer):
                line = f"rank 0 on {liveness.first_host}: lost, no answer"
                self._leave(LOST, line, [(0, liveness.first_host)])
            return
        # Otherwise the thread that raised it goes on, or no thread does.
        if alarm.rank != self._identity.rank and alarm.code != ABANDONED:
            self._end(alarm)

    def _on_peer_lost(self, rank: int) -> None:
        # The peer may have ended for a reason that it has told all ranks.
        if not self._closed.wait(self._timeouts.answer):
            reason = f"rank {rank} has ended"
            self._raise_alarm(Alarm(self._identity.rank, reason, LOST, hang=True))

    def _raise_alarm(self, alarm: Alarm) -> None:
        """Raise the alarm, unless another rank has, and end."""
        liveness = self._liveness
        first = None
        if liveness is not None:
            seconds = 3 * self._timeouts.answer
            first = call_with_timeout(seconds, lambda: liveness.raise_alarm(alarm))
        self._end(first or alarm)

    def _end(self, alarm: Alarm) -> None:
        """Find out which ranks are alive, and leave. Returns only if the rank abandons its groups,
        or if the alarm is for its own error, which it prints itself."""
        limits = self._timeouts
        if not self._ending.acquire(blocking=False):
            # Another thread ends the process, or the groups.
            wait = time.sleep if self._survivor is None else self._survivor.wait
            wait(5 * limits.storage)
            return
        arm_hard_timeout(6 * limits.answer + 6 * limits.storage)
        if alarm.code == STARTED_AGAIN:
            self._record(LOST, alarm.reason)  # the parent of the old process has printed it
            self._leave(LOST)
            return
        report = threading.Thread(target=self._write_report, daemon=True)
        if alarm.hang:
            report.start()
            # Not longer, because rank 0 waits for the answer, and the storage may hang.
            report.join(limits.answer / 2)
        answers = self._answer(alarm.hang)
        if alarm.hang:
            report.join(limits.storage)
        if answers.missing:
            self._leave(*self._explain_lost(alarm, answers.missing), answers.missing)
        elif alarm.hang:
            self._leave(*self._explain_hang(alarm, answers))
        elif alarm.rank != self._identity.rank:
            # That rank prints its error first. This one may have met the same and keeps silent.
            time.sleep(4 * LOCAL_GRACE)
            self._record(alarm.code, f"rank {alarm.rank} failed with exit code {alarm.code}")
            self._leave(alarm.code)
        faulthandler.cancel_dump_traceback_later()

    def _answer(self, hang: bool) -> Answers:
        liveness, limits = self._liveness, self._timeouts
        if liveness is None:
            return Answers([], [])
        found = call_with_timeout(4 * limits.answer, lambda: liveness.answer(hang))
        return Answers([(0, liveness.first_host)], []) if found is None else found

    def _explain_lost(self, alarm: Alarm, missing: Missing) -> tuple[int, str]:
        """The exit code and the line for ranks that did not answer."""
        line = f"{describe(missing)}: lost, no answer{self._details(alarm)}"
        # Without rank 0, a rank cannot tell whether rank 0 or itself is cut off.
        if alarm.hang and alarm.code == BAD_NODE and missing[0][0] != 0:
            return self._exclude(line, missing)
        return LOST, line

    def _explain_hang(self, alarm: Alarm, answers: Answers) -> tuple[int, str]:
        """The exit code and the line for a hang in which all ranks answered."""
        but = f"though every rank answers{self._details(alarm)}"
        if not answers.stuck:
            return LOST, f"the run hangs, {but}"
        ranks = [(rank, host) for rank, host, _ in answers.stuck]
        operations = {operation for *_, operation in answers.stuck}
        line = f"{describe(ranks)}: stuck at {', '.join(sorted(operations))}, {but}"
        if not self._checks_nodes:
            return LOST, line + _describe_waits(answers.waiting)
        count = len({host for _, host in ranks})
        # If most hosts are stuck, no single node is at fault. And gloo connects to one peer after
        # another: beside the two ends of a dead link, ranks may be stuck that wait for one of them.
        if 2 * count > answers.hosts or (ALL_PEERS in operations and count > 2):
            return LOST, line
        return self._exclude(line, ranks)

    def _exclude(self, line: str, ranks: Missing) -> tuple[int, str]:
        """Exclude the hosts of `ranks`. Rank 0 writes, and if it cannot, another start would get
        the same nodes."""
        who, folder = self._identity, self._directory
        if not who.has_launcher:
            return LOST, line
        if who.rank:
            return BAD_NODE, line
        listed = call_with_timeout(
            self._timeouts.storage, lambda: excluded_nodes.exclude(folder, ranks, who)
        )
        return (LOST, line) if listed is None else (BAD_NODE, line + listed)

    def _details(self, alarm: Alarm) -> str:
        folder = hang_folder(self._directory, self._step)
        return f"; {alarm.reason}, stacks in {folder}" if alarm.hang else ""

    def _write_report(self) -> None:
        idle = self._idle_seconds
        folder = hang_folder(self._directory, self._step)
        fault_point("report")
        # Neither a full disk nor a device that has failed may keep the rank from leaving.
        with suppress(OSError, RuntimeError):
            doing = self._status.current
            write_stacks(folder, self._identity, self._step, idle, self._ledger, doing)

    def _record(self, code: int, line: str, lost: Missing = ()) -> None:
        if self._identity.rank == 0:
            call_with_timeout(self._timeouts.storage, lambda: self.on_end(code, line, lost))

    def _leave(self, code: int, line: str = "", lost: Missing = ()) -> None:
        """End the process at once: to unwind the stack would wait for the `lost` ranks. If the
        process stays, abandon its groups."""
        is_first, first_is_lost = self._identity.rank == 0, bool(lost) and lost[0][0] == 0
        survivor = self._survivor if self._stays(code, lost) else None
        try:
            # If rank 0 cannot print, two ranks a host do: one of them may be lost, too.
            if line and (is_first or (first_is_lost and self._identity.local_rank < 2)):
                print_error(f"megafrontier: {line}")
            if line:
                self._record(code, line, lost if survivor is None else ())
            sys.stdout.flush()
        finally:  # also if stdout is closed
            if survivor is not None:
                survivor.abandon()
            else:
                if self._survivor is not None:
                    self._survivor.tell_parent(survivors.GIVES_UP)
                os._exit(code)

    def _stays(self, code: int, lost: Missing) -> bool:
        """Whether this process goes on: not after an end that the ranks do not survive, nor if all
        `lost` ranks of a node are, because no process can start there."""
        if self._survivor is None or not self._survivor.is_alone or code in (*FINAL, BAD_NODE):
            return False
        most = max(Counter(host for _, host in lost).values(), default=0)
        return most < max(2, tasks_per_node(os.environ))


def _describe_waits(waiting: Stuck) -> str:
    """The ranks that wait, and in which work."""
    parts = (f"rank {rank} waits in {operation}" for rank, _, operation in waiting)
    return "".join(f"; {part}" for part in parts)
