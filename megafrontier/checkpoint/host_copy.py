"""Copies of a rank's shards in host memory, from which a thread writes behind the next steps."""

from collections.abc import Sequence

import torch

from megafrontier.checkpoint.shard_file import Shards, Slice, slice_of

STAGING_BYTES = 2**23
"""The most bytes of each of the two pinned buffers between a device and the copies."""


class HostCopy:
    """Copies of slices, each of which is given out once and freed by whoever has got it.

    All copies together have the size of the slices. From a device they come through two small
    pinned buffers: pinned memory for all of a shard would take seconds to allocate, and torch
    rounds it up to a power of two.
    """

    def __init__(self, shards: Shards, slices: Sequence[Slice]) -> None:
        """Copy the slices of shards. Returns when the shards may change."""
        staging = Staging(sum(part.nbytes for part in slices))
        self._copies: dict[Slice, torch.Tensor] = {}
        for part in slices:
            source = slice_of(shards, part).detach()
            self._copies[part] = torch.empty(part.count, dtype=part.dtype)
            staging.copy(source, self._copies[part])
        staging.finish()

    def take(self, part: Slice) -> torch.Tensor:
        """The copy of a slice [count]."""
        return self._copies.pop(part)


class Staging:
    """Copies tensors to the host. A device fills one pinned buffer while the other is emptied. The
    copies come after what the device has been given before the first of them."""

    def __init__(self, total_bytes: int) -> None:
        """`total_bytes`: of all copies. The buffers together have at most a tenth of them, but at
        least 128 KiB."""
        size = min(STAGING_BYTES, max(2**16, total_bytes // 20))
        self._size = 1 << (size.bit_length() - 1)  # as much as torch allocates
        self._buffers: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._pending: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event] | None = None

    def open(self, device: torch.device) -> None:
        """Allocate what copies from a device need. They come after what it has been given so far,
        and in another thread than this call they do not wait for more."""
        if self._stream is None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._buffers = [
                torch.empty(self._size, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a 1-D tensor on any device to one of its type on the host."""
        if not source.is_cuda:
            target.copy_(source)
            return
        self.open(source.device)
        step = self._size // source.itemsize
        for first in range(0, len(source), step):
            self._start(source[first : first + step], target[first : first + step])

    def _start(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy to one buffer, then empty the other."""
        buffer, other = self._buffers
        self._buffers = [other, buffer]
        pinned = buffer[: source.nbytes].view(source.dtype)
        with torch.cuda.stream(self._stream):
            pinned.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.finish()
        self._pending = pinned, target, done

    def finish(self) -> None:
        """Wait for the last copy."""
        if self._pending is not None:
            pinned, target, done = self._pending
            done.synchronize()
            target.copy_(pinned)
            self._pending = None
