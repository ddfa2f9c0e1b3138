"""What a reader asks a checkpoint for, and where in the shard files it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megafrontier.checkpoint.boxes import (
    BoxEntry,
    Region,
    copy_common,
    count_common,
    intersection,
    regions,
    span,
)
from megafrontier.checkpoint.format import StoredBox
from megafrontier.checkpoint.shard_file import ShardFile, StoredSlice
from megafrontier.partition.layout import Layout


@dataclass
class Request:
    """Elements [start, start + out.numel()) of a box of a parameter in one state, to be read into
    `out`: 1-D, on any device, of any type."""

    state: str
    entry: BoxEntry
    start: int
    out: torch.Tensor

    def __post_init__(self) -> None:
        self.missing = self.out.numel()
        """How many elements have not been read."""

    @cached_property
    def regions(self) -> list[Region]:
        """The boxes that make the range of elements."""
        return regions(self.entry.extent, self.start, self.start + self.out.numel())


def requests_of(
    state: str, layout: Layout, start: int, stop: int, shard: torch.Tensor
) -> Iterator[Request]:
    """The requests that fill `shard`, elements [start, stop) of a flat buffer, but for padding."""
    for entry, first, last, at in layout.within(start, stop):
        yield Request(state, BoxEntry.of(entry), first, shard[at : at + last - first])


def shards_with(stored: StoredBox, num_shards: int, wanted: Sequence[Region]) -> list[int]:
    """The shards that hold elements of a stored box that are wanted; at most a few more."""
    length = stored.unit.layout.numel // num_shards
    found: set[int] = set()
    for region in wanted:
        part = intersection(stored.entry.extent, region.box)
        if part is not None:
            first, last = span(stored.entry.extent, part)
            first, last = stored.entry.offset + first, stored.entry.offset + last - 1
            found.update(range(first // length, last // length + 1))
    return sorted(found)


def read_slices(file: ShardFile, stored_box: BoxEntry, request: Request) -> None:
    """Read what the slices of one file hold of a request."""
    for stored in file.slices.get((request.state, stored_box.key), ()):
        if request.entry.box == stored_box.box and _read_whole(file, stored, request):
            continue
        held = regions(stored_box.extent, stored.start, stored.stop)
        count = count_common(held, request.regions)
        if count:  # The checksum covers the slice, so all of it is read for any part of it.
            whole = torch.empty(stored.stop - stored.start, dtype=stored.dtype)
            file.read_into(stored, whole)
            copy_common(whole, held, request.out, request.regions)
            request.missing -= count


def _read_whole(file: ShardFile, stored: StoredSlice, request: Request) -> bool:
    """Read a slice in place if the request holds all of it, in the same type on the CPU."""
    first, out = stored.start - request.start, request.out
    last = first + stored.stop - stored.start
    is_plain = out.device.type == "cpu" and out.is_contiguous() and out.dtype == stored.dtype
    if first < 0 or last > out.numel() or not is_plain:
        return False
    file.read_into(stored, out[first:last])
    request.missing -= last - first
    return True
