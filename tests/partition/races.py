"""Finds races between the computation and the comm streams, as on a device.

The bytes that each operator accesses are kept with the clock of its stream. If two accesses overlap
and one of them writes, the second must run after the first.
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

from tests.partition.streams import COMPUTATION, SimulatedStreams


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
class Races(SimulatedStreams):
    """Replaces an engine's `CommStreams`. `found` names the two operators of each race, and the
    engine's lines that the second one came from."""

    found: set[tuple[str, str, str]] = field(default_factory=set)
    operators: int = 0
    _accesses: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))

    def run(self, index, task, after):
        handle = super().run(index, task, after)
        self._tick(COMPUTATION)  # the task is not ordered behind what comes next
        return handle

    def _do(self, task):
        task()

    def _tick(self, stream):
        self._clocks[stream][stream] = self._clocks[stream].get(stream, 0) + 1

    @contextmanager
    def watching(self):
        """Check every operator that this thread runs inside."""
        self._tick(COMPUTATION)
        with Operators(self):
            yield

    def touch(self, tensor, writes, name):
        """An operator reads or writes `tensor` here, now."""
        storage, known = tensor.untyped_storage(), self._clocks[self._here]
        key = storage._cdata
        if key not in self._accesses:
            weakref.finalize(storage, self._accesses.pop, key, None)
        new = Access(*_bytes_of(tensor), writes, self._here, known[self._here], name)
        for old in self._accesses[key]:
            if old.meets(new) and known.get(old.stream, 0) < old.time:
                self.found.add((_describe(old), _describe(new), _where()))
        # An access that this one covers is not needed: what runs after this runs after that.
        self._accesses[key] = [a for a in self._accesses[key] if not new.covers(a)] + [new]


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
            for writes, tensors in ((False, read), (True, written + made)):
                for tensor in tensors:
                    self._races.touch(tensor, writes, str(func))
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
