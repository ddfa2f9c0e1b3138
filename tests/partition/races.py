"""Comm streams that behave on a CPU as a device's streams do, and find accesses at the same time.

A task runs when it is issued, but counts as running until somebody waits for it. The bytes that an
operator accesses are kept with the clock of its stream. Two accesses that overlap race if one
writes and the second is not ordered behind the first. So do accesses and the reuse of memory: a
buffer that is freed or handed over must not be in use on another stream than its own.
"""

import traceback
import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafrontier.comm.streams import DONE, HOST, CommStreams
from megafrontier.common.buffers import BufferPool, Workspace
from megafrontier.parallel.hierarchy import CommArbiter
from megafrontier.partition.memory import UnitBuffer

COMPUTATION = -1
"""The index, among the streams', of where the model runs."""
Clock = dict[int, int]
"""By stream, how many of its tasks are known to have run."""


class Access(NamedTuple):
    """Bytes [begin, end) of a storage, accessed at a `time` of a stream's clock."""

    begin: int
    end: int
    writes: bool
    stream: int
    time: int
    name: str

    def meets(self, other):
        overlaps = self.begin < other.end and other.begin < self.end
        return overlaps and (self.writes or other.writes)

    def covers(self, other):
        return self.writes and self.begin <= other.begin and other.end <= self.end


@dataclass
class ClockHandle:
    """Orders whoever waits, the computation or another stream, behind a task."""

    races: "Races"
    clock: Clock

    def wait(self):
        self.races.learn(self.clock)


@dataclass(eq=False)
class Races(CommStreams):
    """Takes the place of an engine's `CommStreams`. `found` names the two operators of each race,
    and the engine's lines that the second one came from; `freed` names memory that was freed or
    handed over while a stream could still access it."""

    policy: str
    found: set[tuple[str, str, str]] = field(default_factory=set)
    freed: set[str] = field(default_factory=set)
    operators: int = 0
    _clocks: dict[int, Clock] = field(default_factory=lambda: {COMPUTATION: {}})
    _here: int = COMPUTATION
    _accesses: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _homes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        cpu = torch.device("cpu")
        super().__init__("none", 1, cpu, CommArbiter())
        self._workspaces = [Workspace(cpu) for _ in range(3)]  # of as many levels

    def index(self, level):
        if level == HOST:
            return level
        return max(level, 0) if self.policy == "full" else 0

    def drain_before_freeing(self, owner):
        """Nothing to do: memory that is freed while a task runs is noticed in any case."""

    def run(self, index, task, after):
        clock = self._clocks.setdefault(index, {})
        self._here = index
        self.learn(self._clocks[COMPUTATION])
        if after is not DONE:
            after.wait()
        self._tick(index)
        task()
        self._here = COMPUTATION
        self._tick(COMPUTATION)  # the task is not ordered behind what comes next
        return ClockHandle(self, dict(clock))

    def learn(self, clock):
        """What runs here from now on comes after the tasks of `clock`."""
        here = self._clocks[self._here]
        for stream, count in clock.items():
            here[stream] = max(here.get(stream, 0), count)

    def _tick(self, stream):
        self._clocks[stream][stream] = self._clocks[stream].get(stream, 0) + 1

    @contextmanager
    def watching(self, monkeypatch):
        """Check every operator that this thread runs inside, and every buffer that changes its
        user without being freed."""
        acquire, release = UnitBuffer.acquire, BufferPool.release

        def watched_acquire(buffer, owner):
            acquire(buffer, owner)
            self._check_unused(buffer.memory.untyped_storage()._cdata, "a unit's buffer")

        def watched_release(pool, buffer):
            self._check_unused(buffer.untyped_storage()._cdata, "a pool's buffer")
            release(pool, buffer)

        monkeypatch.setattr(UnitBuffer, "acquire", watched_acquire)
        monkeypatch.setattr(BufferPool, "release", watched_release)
        self._tick(COMPUTATION)
        with Operators(self):
            yield

    def access(self, tensor, writes, name, allocates=False):
        """An operator reads, writes or allocates `tensor` here, now."""
        storage, known = tensor.untyped_storage(), self._clocks[self._here]
        key = storage._cdata
        if key not in self._homes:
            # A device gets a number by value, whoever allocated its tensor.
            self._homes[key] = self._here if allocates or not tensor.dim() else COMPUTATION
            weakref.finalize(storage, self._free, key, f"{storage.nbytes()} bytes")
        new = Access(*_bytes_of(tensor), writes, self._here, known[self._here], name)
        for old in self._accesses[key]:
            if old.meets(new) and known.get(old.stream, 0) < old.time:
                self.found.add((_describe(old), _describe(new), _where()))
        # An access that this one covers is not needed: what runs after this runs after that.
        self._accesses[key] = [a for a in self._accesses[key] if not new.covers(a)] + [new]

    def _check_unused(self, key, name):
        """Memory goes back to the stream that allocated it, whose next task may use it at once."""
        known = self._clocks[COMPUTATION]
        for access in self._accesses.get(key, ()):
            if access.stream != self._homes[key] and known.get(access.stream, 0) < access.time:
                self.freed.add(f"{name} during {_describe(access)}")

    def _free(self, key, name):
        self._check_unused(key, name)
        del self._homes[key], self._accesses[key]


class Operators(TorchDispatchMode):
    """Tells `Races` which tensors each operator reads and writes."""

    def __init__(self, races):
        super().__init__()
        self._races = races

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read, written = _split(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        storages = {tensor.untyped_storage()._cdata for tensor in read + written}
        made = [x for x in _tensors(out) if x.untyped_storage()._cdata not in storages]
        if written or made:  # else it makes a view
            self._races.operators += 1
            for tensor in read:
                self._races.access(tensor, False, str(func))
            for tensor in written + made:
                is_new = any(tensor is new for new in made)
                self._races.access(tensor, True, str(func), allocates=is_new)
        return out


def _split(func, args, kwargs):
    """Return the tensors that an operator reads, and those that it writes."""
    found = ([], [])
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        # The schemas of collectives do not say so, but they write their first argument.
        is_written = (argument.alias_info is not None and argument.alias_info.is_write) or (
            func.namespace == "c10d" and position == 0
        )
        found[is_written].extend(_tensors(value))
    return found


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()]


def _bytes_of(tensor):
    begin = tensor.storage_offset()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


def _describe(access):
    where = "the computation" if access.stream == COMPUTATION else f"stream {access.stream}"
    return f"{'write' if access.writes else 'read'} of {access.name} in {where}"


def _where():
    frames = reversed(traceback.extract_stack())
    own = [f"{f.name}:{f.lineno}" for f in frames if "megafrontier/partition" in f.filename]
    return " < ".join(own[:6])
