"""Lanes that behave as a device's streams do, on a CPU: a task is issued when it is given, and
counts as running until somebody waits for it. So memory that goes too early is found without a
device."""

import weakref
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafrontier.common.buffers import BufferPool, Workspace
from megafrontier.partition.comm.streams import DONE
from megafrontier.partition.unit_buffers import UnitBuffer

COMPUTATION = -1
"""The number, among the lanes', of where the model runs."""
Clock = dict[int, int]
"""Up to which of a lane's tasks something is known to have run, by lane."""


@dataclass
class Ticket:
    """Waited for where it is: by the computation, or by the lane whose task comes after."""

    streams: "Streams"
    clock: Clock

    def wait(self):
        self.streams.learn(self.clock)


@dataclass
class Streams:
    """In place of an engine's `Lanes`. `lost` names what has gone back to the memory of the lane
    that allocated it while another might still have read or written it."""

    policy: str
    lost: list[str] = field(default_factory=list)
    _clocks: dict[int, Clock] = field(default_factory=lambda: {COMPUTATION: {}})
    _here: int = COMPUTATION
    _homes: dict[int, int] = field(default_factory=dict)
    _uses: dict[int, Clock] = field(default_factory=dict)
    _private: dict[int, int] = field(default_factory=dict)

    def number(self, level):
        return level if self.policy == "full" else 0

    def outlive(self, owner):
        """What goes while something runs is seen here in any case."""

    def run(self, number, task, after):
        clock = self._clocks.setdefault(number, {})
        self._here = number
        self.learn(self._clocks[COMPUTATION])
        if after is not DONE:
            after.wait()
        clock[number] = clock.get(number, 0) + 1
        self._do(task)
        self._here = COMPUTATION
        return Ticket(self, dict(clock))

    def _do(self, task):
        with Noting(self):
            task()

    def learn(self, clock):
        """What runs here from now on comes after all that."""
        mine = self._clocks[self._here]
        for lane, count in clock.items():
            mine[lane] = max(mine.get(lane, 0), count)

    def watch(self, monkeypatch):
        """See what changes hands by itself, too."""
        acquire, release, get = UnitBuffer.acquire, BufferPool.release, Workspace.get

        def acquiring(buffer, owner):
            acquire(buffer, owner)
            self._hand_over(buffer.memory, "a unit's buffer")

        def releasing(buffer_pool, buffer):
            self._hand_over(buffer, f"a buffer of {buffer.dtype}")
            release(buffer_pool, buffer)

        def getting(*arguments):
            memory = get(*arguments)
            storage = memory.untyped_storage()
            if id(storage) not in self._private:
                self._private[id(storage)] = self._here
                weakref.finalize(storage, self._private.pop, id(storage))
            return memory

        monkeypatch.setattr(UnitBuffer, "acquire", acquiring)
        monkeypatch.setattr(BufferPool, "release", releasing)
        monkeypatch.setattr(Workspace, "get", getting)

    def _hand_over(self, memory, name):
        key = id(memory.untyped_storage())
        if key in self._homes:
            self._check(key, name)

    def note(self, before, after):
        """An operator of a task has made tensors of others."""
        for storage in _storages(before):
            self._use(storage, COMPUTATION)  # if no task has made it
        for storage in _storages(after):
            self._use(storage, self._here)

    def _use(self, storage, home):
        key = id(storage)
        if self._private.get(key, self._here) != self._here:
            self.lost.append(f"workspace of lane {self._private[key]} in lane {self._here}")
        if key not in self._homes:
            self._homes[key], self._uses[key] = home, {}
            weakref.finalize(storage, self._gone, key, f"{storage.nbytes()} bytes of lane {home}")
        self._uses[key][self._here] = self._clocks[self._here][self._here]

    def _gone(self, key, name):
        self._check(key, name)
        del self._homes[key], self._uses[key]

    def _check(self, key, name):
        known = self._clocks[COMPUTATION]
        for lane, count in self._uses[key].items():
            if lane != self._homes[key] and known.get(lane, 0) < count:
                self.lost.append(f"{name} while lane {lane} runs")


class Noting(TorchDispatchMode):
    """Tells which memory the operators of a task use."""

    def __init__(self, streams):
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._streams.note((args, kwargs), out)
        return out


def _storages(tree):
    tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [x.untyped_storage() for x in tensors if x.dim()]  # numbers go by value
