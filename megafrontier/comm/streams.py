"""Comm streams: where collectives run, beside the computation, and in which order.

A stream runs tasks one after another in the order in which they were issued. The overlap policy
says how many streams there are:

    none   no stream: every task runs at once, in the caller
    safe   one stream for all levels: one collective in flight at a time
    full   one stream per level: collectives of different levels run side by side

Note [No deadlock]
Tasks are issued in program order, which is the same on every rank, and a task waits only for tasks
that were issued before it. Every stream of every rank therefore sees the same sequence of
collectives, and some stream can always proceed.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any, Literal, NamedTuple, Protocol

import torch

from megafrontier.comm.ledger import TrafficKind
from megafrontier.common.buffers import BufferPool, Workspace
from megafrontier.parallel.hierarchy import CommArbiter

Policy = Literal["none", "safe", "full"]
Task = Callable[[], object]
HOST = -2
"""In place of a level: copies between the device and host memory, on a stream of their own."""


class WorkHandle(Protocol):
    """The handle of an issued task."""

    def wait(self) -> None:
        """Return when the task's results can be used here. Raises what the task raised."""


class _Done:
    def wait(self) -> None:
        """Return at once."""


DONE = _Done()
"""The handle of a task that has run."""


class Stream(Protocol):
    """Runs tasks one after another."""

    def run(self, task: Task, after: WorkHandle) -> WorkHandle:
        """Issue `task`. It runs after `after` and after all earlier tasks of this stream."""


class InlineStream:
    """Runs each task at once, in the caller."""

    def run(self, task: Task, after: WorkHandle) -> WorkHandle:
        after.wait()
        task()
        return DONE


class _ThreadWork:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class _Tasks:
    """The tasks that a thread is to run, and the error that has ended it."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Task, WorkHandle, _ThreadWork] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def put(self, task: Task, after: WorkHandle) -> _ThreadWork:
        """Add a task. After an error its handle raises that."""
        work = _ThreadWork()
        with self._lock:
            if self._error is None:
                self.queue.put((task, after, work))
            else:
                work.finish(self._error)
        return work

    def fail(self, error: BaseException) -> None:
        """Finish all tasks with this error."""
        with self._lock:
            self._error = error
            while not self.queue.empty():
                if (issued := self.queue.get()) is not None:
                    issued[-1].finish(error)


class ThreadStream:
    """A thread that runs the tasks. Collectives on a CPU block without holding Python's lock.

    After an error it runs nothing more, because the ranks no longer agree on what comes next. Every
    later handle raises the same error.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks = _Tasks()
        self._thread: threading.Thread | None = None

    def run(self, task: Task, after: WorkHandle) -> WorkHandle:
        if self._thread is None:
            # A daemon: a rank whose peer is lost must be able to exit while a collective hangs.
            self._thread = threading.Thread(
                target=_run_tasks, args=(self._tasks,), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.queue.put, None)  # ends the thread
        return self._tasks.put(task, after)


def _run_tasks(tasks: _Tasks) -> None:
    """Run tasks until None comes, or one raises. A function of the tasks alone, so that the thread
    does not keep its stream alive.

    It ends with the first error: the error has the frames of those who have waited for it, and
    the thread would keep all that these hold.
    """
    while (issued := tasks.queue.get()) is not None:
        task, after, work = issued
        try:
            after.wait()
            task()
        except BaseException as error:
            work.finish(error)
            tasks.fail(error)
            return
        work.finish(None)
        del issued, task, after, work  # else their tensors would live until the next task


class _DeviceWork:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class DeviceStream:
    """A stream of a CUDA or ROCm device. The caller only enqueues."""

    def __init__(self, device: torch.device, is_urgent: bool) -> None:
        # High priority, or each small kernel would wait behind a matrix product. ROCm has no
        # priorities, only one more queue on the same hardware (ROCm/rocm-systems#8485).
        is_first = is_urgent and not torch.version.hip
        self._stream = torch.cuda.Stream(device, priority=-1 if is_first else 0)

    def run(self, task: Task, after: WorkHandle) -> WorkHandle:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            after.wait()
            task()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _DeviceWork(event)


class CommStreams:
    """The streams of one engine. Engines that share process groups take turns by `arbiter`."""

    def __init__(
        self, policy: Policy, levels: int, device: torch.device, arbiter: CommArbiter
    ) -> None:
        self._arbiter = arbiter
        self._newest: dict[int, WorkHandle] = {}
        self._collected: list[Op] | None = None
        self._deferred: list[Op] = []
        self.buffers = BufferPool(device)
        """Buffers of messages that are passed from one level to the next."""
        if policy == "full":
            self._streams = [make_stream(f"level-{i}", device) for i in range(levels)]
        else:
            self._streams = [InlineStream() if policy == "none" else make_stream("levels", device)]
        self._workspaces = [Workspace(device) for _ in self._streams]
        self._policy, self._device = policy, device

    @cached_property
    def _host(self) -> Stream:
        return self._streams[0] if self._policy == "none" else make_stream("host", self._device)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers for messages so far. They are kept."""
        return self.buffers.held_bytes + sum(space.held_bytes for space in self._workspaces)

    def workspace(self, level: int) -> Workspace:
        """The workspace of a level's stream."""
        return self._workspaces[self.index(level)]

    def index(self, level: int) -> int:
        """The index of a level's stream; `HOST` has its own."""
        return level if level == HOST else min(max(level, 0), len(self._streams) - 1)

    def run(self, index: int, task: Task, after: WorkHandle) -> WorkHandle:
        """Issue `task` on a stream, to run after `after`."""
        self._arbiter.acquire(self)
        stream = self._host if index == HOST else self._streams[index]
        self._newest[index] = work = stream.run(task, after)
        return work

    def issue(self, op: "Op") -> None:
        """Issue an operation on the stream of its level, after those before it on its chain."""
        if self._collected is not None:
            self._collected.append(op)
            return

        def task() -> None:
            op.chain.value = op.function(op.chain.value)

        op.chain.work = self.run(self.index(op.level), task, op.chain.work)

    def issue_all(self, ops: Iterable["Op"]) -> None:
        """Issue operations in this order."""
        for op in ops:
            self.issue(op)

    @contextmanager
    def collect(self) -> Iterator[list["Op"]]:
        """Collect the operations that start inside instead of issuing them."""
        ops: list[Op] = []
        outer, self._collected = self._collected, ops
        try:
            yield ops
        finally:
            self._collected = outer

    def issue_interleaved(self, gathers: Sequence["Op"], reductions: Sequence["Op"]) -> None:
        """Issue the collected operations of gathers and of reductions in the order of
        `interleave`, each gather with one reduction."""
        for gather, reduce in zip_longest(_by_chain(gathers), _by_chain(reductions)):
            self.issue_all(interleave(gather or [], reduce or []))

    def defer(self, ops: Sequence["Op"]) -> None:
        """Issue the operations that were deferred before, and defer these."""
        self.issue_deferred()
        self._deferred = list(ops)

    def issue_deferred(self) -> None:
        """Issue the operations that were deferred."""
        ops, self._deferred = self._deferred, []
        self.issue_all(ops)

    def drain_before_freeing(self, owner: object) -> None:
        """Make the computation wait for all streams when `owner` is garbage-collected: torch would
        reuse memory that a device stream still accesses. Threads keep their tensors alive."""
        if any(isinstance(stream, DeviceStream) for stream in self._streams):
            weakref.finalize(owner, self.drain).atexit = False

    def drain(self) -> None:
        """Wait for all tasks issued so far. Raises what a task raised, the first time."""
        newest, self._newest = self._newest, {}
        for work in newest.values():
            work.wait()


STREAMS: dict[str, Callable[[str, torch.device, bool], Stream]] = {
    "cpu": lambda name, device, is_urgent: ThreadStream(name),
    "cuda": lambda name, device, is_urgent: DeviceStream(device, is_urgent),
}
"""What makes a stream of a name, by the type of device. A simulation adds its own."""


def make_stream(name: str, device: torch.device, is_urgent: bool = True) -> Stream:
    """A stream of a device: of the CPU, a thread. `is_urgent`: its tasks are small, and the
    computation is going to wait for them."""
    return STREAMS[device.type](name, device, is_urgent)


@dataclass
class AsyncChain:
    """A tensor and the operations issued on it. Each operation replaces the tensor by its result.

    `label` names the chain in traces, and if ranks disagree: "gather blocks.0", say. `kind` is what
    the ledger counts it as.

    Note [Buffers between streams]
    On a device, a task is only enqueued when its call returns. A buffer that one stream passes to
    another is therefore acquired when the chain starts, and released when the computation has
    waited for the chain's end. The buffer's next user comes later on every stream, because each
    stream waits for the computation before it starts a task.
    """

    value: torch.Tensor
    label: str
    work: WorkHandle = DONE
    kind: TrafficKind = "weights"
    _acquired: list[tuple[BufferPool, torch.Tensor]] = field(default_factory=list)

    def acquire(self, pool: BufferPool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [numel] of `pool` that is released at the end of the chain."""
        buffer = pool.acquire(numel, dtype)
        self._acquired.append((pool, buffer))
        return buffer

    def wait(self) -> torch.Tensor:
        """The tensor at the end of the chain, ready to be used here."""
        self.work.wait()
        self.work = DONE
        for pool, buffer in self._acquired:
            pool.release(buffer)
        self._acquired.clear()
        return self.value


class Op(NamedTuple):
    """An operation to issue on a chain: a collective over `level`, or work on its stream."""

    chain: AsyncChain
    level: int
    function: Callable[[torch.Tensor], torch.Tensor]


def interleave(gather: Sequence[Op], reduce: Sequence[Op]) -> list[Op]:
    """Order the ops of a gather and a reduction so that neither waits for the other's slow level.

    The gather's outermost collective comes first, then the reduction's collectives inside that
    level, then the rest of the gather and of the reduction. The outermost level gathers while the
    inner levels reduce, and reduces while they gather. If one chain were issued whole before the
    other, the second would wait on the inner streams for the first one's slow collective.
    """
    outermost = gather[0].level if gather else 0
    inside = [op for op in reduce if op.level < outermost]
    beyond = [op for op in reduce if op.level >= outermost]
    return [*gather[:1], *inside, *gather[1:], *beyond]


def _by_chain(ops: Sequence[Op]) -> list[list[Op]]:
    return [list(group) for _, group in groupby(ops, key=lambda op: id(op.chain))]
