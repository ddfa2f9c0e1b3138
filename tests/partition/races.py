"""Whether the computation and the lanes touch the same memory at once, as a device's streams would:
each operator's bytes are kept with the clock of where it ran, and two that overlap, one of them
writing, must know of each other."""

import traceback
import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.partition.streams import COMPUTATION, Streams


class Access(NamedTuple):
    """Bytes `begin` to `end` of a storage, read or written at a time of a lane's clock."""

    begin: int
    end: int
    writes: bool
    lane: int
    time: int
    name: str

    def meets(self, other):
        overlaps = self.begin < other.end and other.begin < self.end
        return overlaps and (self.writes or other.writes)

    def covers(self, other):
        return self.writes and self.begin <= other.begin and other.end <= self.end


@dataclass
class Races(Streams):
    """In place of an engine's `Lanes`. `found` names what ran beside what, and the lines of the
    engine that the second came from."""

    found: set[tuple[str, str, str]] = field(default_factory=set)
    operators: int = 0
    _accesses: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))

    def run(self, number, task, after):
        ticket = super().run(number, task, after)
        self._tick(COMPUTATION)  # of what it does from here on the task does not know
        return ticket

    def _do(self, task):
        task()

    def _tick(self, lane):
        self._clocks[lane][lane] = self._clocks[lane].get(lane, 0) + 1

    @contextmanager
    def watching(self):
        """Meanwhile every operator of this thread is seen."""
        self._tick(COMPUTATION)
        with Operators(self):
            yield

    def touch(self, tensor, writes, name):
        """An operator reads or writes it here, now."""
        storage, known = tensor.untyped_storage(), self._clocks[self._here]
        key = storage._cdata
        if key not in self._accesses:
            weakref.finalize(storage, self._accesses.pop, key, None)
        new = Access(*_bytes_of(tensor), writes, self._here, known[self._here], name)
        for old in self._accesses[key]:
            if old.meets(new) and known.get(old.lane, 0) < old.time:
                self.found.add((_told(old), _told(new), _where()))
        # What this one covers is not needed: who knows of this knows of that.
        self._accesses[key] = [a for a in self._accesses[key] if not new.covers(a)] + [new]


class Operators(TorchDispatchMode):
    """Tells which tensors each operator reads and writes."""

    def __init__(self, races):
        super().__init__()
        self._races = races

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read, written = _split(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        storages = {tensor.untyped_storage()._cdata for tensor in read + written}
        made = [x for x in _tensors(out) if x.untyped_storage()._cdata not in storages]
        if written or made:  # else it is a view
            self._races.operators += 1
            for writes, tensors in ((False, read), (True, written + made)):
                for tensor in tensors:
                    self._races.touch(tensor, writes, str(func))
        return out


def _split(func, args, kwargs):
    """The tensors that an operator reads, and those that it writes."""
    found = ([], [])
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        # Collectives do not say so, but write their first ones.
        is_written = (argument.alias_info is not None and argument.alias_info.is_write) or (
            func.namespace == "c10d" and place == 0
        )
        found[is_written].extend(_tensors(value))
    return found


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()]


def _bytes_of(tensor):
    begin = tensor.storage_offset()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


def _told(access):
    where = "the computation" if access.lane == COMPUTATION else f"lane {access.lane}"
    return f"{'write' if access.writes else 'read'} of {access.name} in {where}"


def _where():
    frames = reversed(traceback.extract_stack())
    own = [f"{f.name}:{f.lineno}" for f in frames if "megafrontier/partition" in f.filename]
    return " < ".join(own[:6])
