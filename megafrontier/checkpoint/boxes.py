"""Boxes of global tensors, and which elements two flat ranges inside boxes have in common.

A stored slice and what a reader asks for are both ranges [start, stop) of the elements of some box,
row-major. Such a range divides into a few boxes of which each is contiguous in the range: in two
dimensions a part of a row, whole rows, and a part of a row. So elements are copied box by box, not
row by row, however the tensor was cut by the writer and by the reader.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.partition.layout import Entry, Layout

Box = tuple[tuple[int, int], ...]
"""[start, stop) in each dimension of a global tensor."""


@dataclass(frozen=True)
class BoxEntry(Entry):
    """A box of a global tensor in a unit's flat buffer. `name` is global; `shape` is the box's."""

    global_shape: tuple[int, ...]
    box: Box

    @classmethod
    def of(cls, entry: Entry, spec: ParamSpec | None = None) -> "BoxEntry":
        """The entry with the box of its spec; without one that of a whole tensor."""
        if isinstance(entry, cls):
            return entry
        if spec is None:
            whole = tuple((0, size) for size in entry.shape)
            return cls(entry.name, entry.shape, entry.offset, entry.shape, whole)
        return cls(spec.name, entry.shape, entry.offset, spec.shape, spec.box)

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.shape == self.global_shape

    @property
    def key(self) -> str:
        """The name, and the box unless it is the whole tensor: `qkv.weight[0:64,0:128]`."""
        ranges = ",".join(f"{start}:{stop}" for start, stop in self.box)
        return self.name if self.is_whole else f"{self.name}[{ranges}]"

    @property
    def extent(self) -> Box:
        """The box; of a number, one of a dimension of size 1."""
        return self.box or ((0, 1),)


def with_boxes(layout: Layout, specs: dict[str, ParamSpec] | None = None) -> Layout:
    """The layout with a `BoxEntry` for each entry. `specs`: those of its parameters, by name."""
    entries = (BoxEntry.of(e, specs[e.name] if specs else None) for e in layout.entries)
    return Layout(layout.name, tuple(entries), layout.numel)


@dataclass(frozen=True)
class Region:
    """A box whose elements are contiguous in a flat range, from element `offset` of it."""

    box: Box
    offset: int

    def view(self, values: torch.Tensor, part: Box) -> torch.Tensor:
        """The elements of `part`, a box inside this one, of the range's `values` [n], as a view in
        the shape of the part."""
        sizes = [stop - start for start, stop in self.box]
        found = values[self.offset : self.offset + numel(self.box)].view(sizes)
        for dim, ((start, stop), (first, _)) in enumerate(zip(part, self.box, strict=True)):
            found = found.narrow(dim, start - first, stop - start)
        return found


def regions(box: Box, start: int, stop: int) -> list[Region]:
    """Elements [start, stop) of a box, row-major, as regions that follow one another."""
    found, offset = [], 0
    for part in _parts(box, start, stop):
        found.append(Region(part, offset))
        offset += numel(part)
    return found


def _parts(box: Box, start: int, stop: int) -> Iterator[Box]:
    (low, _), inner = box[0], box[1:]
    row = prod(last - first for first, last in inner)
    if start >= stop:
        return
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if first == last:
        yield from (((low + first, low + first + 1), *part) for part in _parts(inner, begin, end))
        return
    if begin:
        yield from (((low + first, low + first + 1), *part) for part in _parts(inner, begin, row))
        first += 1
    if first < last:
        yield ((low + first, low + last), *inner)
    if end:
        yield from (((low + last, low + last + 1), *part) for part in _parts(inner, 0, end))


def intersection(a: Box, b: Box) -> Box | None:
    """The box of the elements that two boxes have in common; None without any."""
    common = tuple(
        (max(first, other), min(last, end))
        for (first, last), (other, end) in zip(a, b, strict=True)
    )
    return common if all(first < last for first, last in common) else None


def span(box: Box, part: Box) -> tuple[int, int]:
    """The smallest range of the elements of `box`, row-major, that holds all of `part`."""
    first = last = 0
    for (low, high), (start, stop) in zip(box, part, strict=True):
        first = first * (high - low) + start - low
        last = last * (high - low) + stop - 1 - low
    return first, last + 1


def copy_common(
    source: torch.Tensor, held: Sequence[Region], target: torch.Tensor, wanted: Sequence[Region]
) -> None:
    """Copy the elements that two flat ranges have in common, from `source` [n] to `target` [m]."""
    for have in held:
        for want in wanted:
            if (part := intersection(have.box, want.box)) is not None:
                want.view(target, part).copy_(have.view(source, part))


def count_common(held: Sequence[Region], wanted: Sequence[Region]) -> int:
    """How many elements two flat ranges have in common."""
    parts = (intersection(have.box, want.box) for have in held for want in wanted)
    return sum(numel(part) for part in parts if part is not None)


def numel(box: Box) -> int:
    """The number of elements of a box."""
    return prod(stop - start for start, stop in box)
