"""One rank's part of a snapshot: copied to the node's memory, checked and sent behind the steps."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch

from megafrontier.checkpoint.format import BLANK, Manifest, crc32_hex
from megafrontier.checkpoint.host_copy import Staging
from megafrontier.checkpoint.local.node_folder import encode_entry
from megafrontier.checkpoint.local.slots import Slots
from megafrontier.checkpoint.save import OwnShard
from megafrontier.checkpoint.shard_file import (
    Slice,
    encode_header,
    shard_label,
    slice_of,
    slices_of,
)
from megafrontier.parallel.fault_injection import fault_point

Send = Callable[[str, int, bytes, Path], str | None]
"""Sends a shard (set, index, entry, path) to another node. Returns why that failed, if it did."""


@dataclass
class _Part:
    """A shard of this rank, its slices, and the bytes before the first one of its file."""

    own: OwnShard
    slots: Slots
    slices: list[Slice]
    begin: int

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.begin + sum(one.nbytes for one in self.slices)

    def payload(self, memory: torch.Tensor) -> list[tuple[Slice, torch.Tensor]]:
        """The slices and their bytes [nbytes] in the memory of the file [size]."""
        sizes = [one.nbytes for one in self.slices]
        return list(zip(self.slices, memory[self.begin :].split(sizes), strict=True))


class PendingSnapshot:
    """A snapshot that is being written. It is whole when `is_done` on all ranks without a
    `problem` on any of them."""

    def __init__(
        self,
        manifest: Manifest,
        layout: str,
        own: Sequence[OwnShard],
        slots: Mapping[str, Slots],
        kept: str,
        early: Collection[str],
        send: Send | None = None,
    ) -> None:
        """Begin to copy this rank's shards to the files of `slots` (by the name of the set), in a
        thread. The states `early` may change at once, the others after `wait_copied`.

        manifest: with step, id and what else an entry says. kept: the id of the snapshot that is
        not to be overwritten.
        """
        self.step, self.id = manifest.step, manifest.id
        self.problem: str | None = None
        """Why the snapshot will never be whole."""
        self.copy_problem: str | None = None
        """Why there is no copy on another node."""
        self._manifest, self._layout, self._send = manifest, layout, send
        self._kept, self._copied = kept, threading.Event()
        writers = [part for part in own if part.is_writer]
        self._parts = [self._prepare(part, slots[part.shard_set.name]) for part in writers]
        self._staging = self._open_staging(writers)
        self._early = {
            one: slice_of(part.own.shards, one).detach().clone()
            for part in self._parts
            for one in part.slices
            if one.state in early
        }
        self._thread = threading.Thread(target=self._write, name="snapshot", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank's thread has no more to do."""
        return not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Wait until the shards may change."""
        self._copied.wait()

    def wait(self, seconds: float) -> None:
        """Wait for the thread, for `seconds` at most."""
        self._thread.join(seconds)

    def _prepare(self, part: OwnShard, slots: Slots) -> _Part:
        part.check()
        slices = slices_of(part.shard_set, part.index, self._manifest.slice_elements)
        begin = len(self._header(part, slices, [BLANK] * len(slices)))
        return _Part(part, slots, slices, begin)

    def _open_staging(self, own: Sequence[OwnShard]) -> Staging:
        """Ready to copy in another thread what the devices have computed by now."""
        staging = Staging(sum(part.size for part in self._parts))
        held = (shards for part in own for shards in part.shards.values())
        for device in {shard.device for shards in held for shard in shards if shard is not None}:
            staging.open(device)
        return staging

    def _header(self, part: OwnShard, slices: Sequence[Slice], checksums: Sequence[str]) -> bytes:
        label = shard_label(part.shard_set, part.index)
        return encode_header(self._manifest, label, slices, checksums)

    def _write(self) -> None:
        try:
            try:
                files = [self._copy(part) for part in self._parts]
            finally:
                self._copied.set()
            for part, memory in zip(self._parts, files, strict=True):
                self._finish(part, memory)
        except Exception as error:  # another rank must not wait for this one
            self.problem = _describe(error)

    def _copy(self, part: _Part) -> torch.Tensor:
        """The memory of a shard's file, with its slices. Raises OSError without room."""
        memory = part.slots.begin(part.size, self._kept, (self.step, self.id))
        for one, data in part.payload(memory):
            source = self._early.pop(one, None)
            if source is None:
                source = slice_of(part.own.shards, one).detach()
            self._staging.copy(source, data.view(one.dtype))
        self._staging.finish()
        return memory

    def _finish(self, part: _Part, memory: torch.Tensor) -> None:
        """Check a shard, add its header, and publish and send it."""
        shard_set, index = part.own.shard_set, part.own.index
        checksums: list[str] = []
        for one, data in part.payload(memory):
            fault_point("snapshot", step=self.step, at_slice=len(checksums))
            _refuse_nonfinite(one, data)
            checksums.append(crc32_hex(data.numpy().data))
        header = self._header(part.own, part.slices, checksums)
        memory[: part.begin] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        where = (self._layout, shard_set.name, index)
        entry = encode_entry(self._manifest, *where, part.size)
        path = part.slots.publish((self.step, self.id), entry)
        if self._send is not None:
            self.copy_problem = self._send(shard_set.name, index, entry, path) or self.copy_problem


def _refuse_nonfinite(one: Slice, data: torch.Tensor) -> None:
    """Raise ValueError if the values of a slice, as bytes, are not all finite."""
    values = data.view(one.dtype)
    if not one.dtype.is_floating_point or not one.count:
        return
    if one.dtype.itemsize == 1:  # torch compares no float8
        values = values.float()
    low, high = torch.aminmax(values)  # a NaN among them is the minimum and the maximum
    if not (isfinite(low.item()) and isfinite(high.item())):
        raise ValueError(f"{one.state}/{one.parameter} is not finite")


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'no room'}: {error.strerror}"
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
