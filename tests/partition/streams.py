"""Comm streams that behave on a CPU as a device's streams do.

A task is issued when it is given, and counts as running until somebody waits for it. Memory that is
freed too early is therefore found without a device.
"""

import weakref
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafrontier.common.buffers import BufferPool, Workspace
from megafrontier.partition.comm.streams import DONE
from megafrontier.partition.memory import UnitBuffer

COMPUTATION = -1
"""The index, among the streams', of where the model runs."""
Clock = dict[int, int]
"""By stream, how many of its tasks are known to have run."""


@dataclass
class ClockHandle:
    """Orders whoever waits, the computation or another stream, behind a task."""

    streams: "SimulatedStreams"
    clock: Clock

    def wait(self):
        self.streams.learn(self.clock)


@dataclass
class SimulatedStreams:
    """Replaces an engine's `CommStreams`. `lost` names memory that went back to the stream that
    allocated it while another stream could still access it."""

    policy: str
    lost: list[str] = field(default_factory=list)
    _clocks: dict[int, Clock] = field(default_factory=lambda: {COMPUTATION: {}})
    _here: int = COMPUTATION
    _homes: dict[int, int] = field(default_factory=dict)
    _uses: dict[int, Clock] = field(default_factory=dict)
    _workspaces: dict[int, int] = field(default_factory=dict)

    def index(self, level):
        return level if self.policy == "full" else 0

    def drain_before_freeing(self, owner):
        """Nothing to do: memory that goes while a task runs is noticed in any case."""

    def run(self, index, task, after):
        clock = self._clocks.setdefault(index, {})
        self._here = index
        self.learn(self._clocks[COMPUTATION])
        if after is not DONE:
            after.wait()
        clock[index] = clock.get(index, 0) + 1
        self._do(task)
        self._here = COMPUTATION
        return ClockHandle(self, dict(clock))

    def _do(self, task):
        with StorageUses(self):
            task()

    def learn(self, clock):
        """What runs here from now on comes after the tasks of `clock`."""
        here = self._clocks[self._here]
        for stream, count in clock.items():
            here[stream] = max(here.get(stream, 0), count)

    def watch(self, monkeypatch):
        """Also notice buffers that change owners without being freed."""
        acquire, release, get = UnitBuffer.acquire, BufferPool.release, Workspace.get

        def watched_acquire(buffer, owner):
            acquire(buffer, owner)
            self._hand_over(buffer.memory, "a unit's buffer")

        def watched_release(buffer_pool, buffer):
            self._hand_over(buffer, f"a buffer of {buffer.dtype}")
            release(buffer_pool, buffer)

        def watched_get(*arguments):
            memory = get(*arguments)
            storage = memory.untyped_storage()
            if id(storage) not in self._workspaces:
                self._workspaces[id(storage)] = self._here
                weakref.finalize(storage, self._workspaces.pop, id(storage))
            return memory

        monkeypatch.setattr(UnitBuffer, "acquire", watched_acquire)
        monkeypatch.setattr(BufferPool, "release", watched_release)
        monkeypatch.setattr(Workspace, "get", watched_get)

    def _hand_over(self, memory, name):
        key = id(memory.untyped_storage())
        if key in self._homes:
            self._check(key, name)

    def note(self, before, after):
        """An operator of a task has computed the tensors `after` from those `before`."""
        for storage in _storages(before):
            self._use(storage, COMPUTATION)  # unless a task allocated it
        for storage in _storages(after):
            self._use(storage, self._here)

    def _use(self, storage, home):
        key = id(storage)
        if self._workspaces.get(key, self._here) != self._here:
            self.lost.append(f"workspace of stream {self._workspaces[key]} in {self._here}")
        if key not in self._homes:
            self._homes[key], self._uses[key] = home, {}
            name = f"{storage.nbytes()} bytes of stream {home}"
            weakref.finalize(storage, self._gone, key, name)
        self._uses[key][self._here] = self._clocks[self._here][self._here]

    def _gone(self, key, name):
        self._check(key, name)
        del self._homes[key], self._uses[key]

    def _check(self, key, name):
        known = self._clocks[COMPUTATION]
        for stream, count in self._uses[key].items():
            if stream != self._homes[key] and known.get(stream, 0) < count:
                self.lost.append(f"{name} while stream {stream} runs")


class StorageUses(TorchDispatchMode):
    """Tells the streams which memory the operators of a task use."""

    def __init__(self, streams):
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._streams.note((args, kwargs), out)
        return out


def _storages(tree):
    tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [x.untyped_storage() for x in tensors if x.dim()]  # scalars are passed by value
