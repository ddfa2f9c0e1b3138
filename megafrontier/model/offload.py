"""Block inputs in host memory between forward and backward.

Copies run on a stream of their own beside the computation: out while later blocks run forward, and
back while the block that ran after runs backward. Nothing waits on the host; freed memory, on the
device and pinned, goes to others only when the copies from it are done. On a CPU host memory is
where the inputs are anyway, and nothing is copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor


class Parking:
    """Where the blocks of one model leave their inputs."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: ref[Parked] | None = None

    @contextmanager
    def parks(self, hidden: Tensor) -> Iterator[None]:
        """What autograd saves of `hidden` [b, s, hidden] inside waits on the host."""
        if not (self.is_elsewhere(hidden) and torch.is_grad_enabled()):
            yield
            return
        place, size = hidden.data_ptr(), hidden.numel()

        def pack(saved: Tensor) -> "Tensor | Parked":
            is_input = saved.data_ptr() == place and saved.numel() == size
            return self._park(saved) if is_input else saved

        def unpack(kept: "Tensor | Parked") -> Tensor:
            return kept if isinstance(kept, Tensor) else kept.fetch()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def is_elsewhere(self, hidden: Tensor) -> bool:
        """Whether host memory is not where `hidden` is."""
        return hidden.is_cuda

    def _park(self, tensor: Tensor) -> "Parked":
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        parked = Parked(tensor, self._stream, self._last)
        self._last = ref(parked)
        return parked


class Parked:
    """One tensor's copy in pinned memory."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream, before: "ref[Parked] | None"):
        """`before`: what was parked last, and so will be fetched next."""
        self._device, self._stream, self._before = tensor.device, stream, before
        self._coming: Tensor | None = None
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)

    def fetch(self) -> Tensor:
        """The tensor on its device again; the one that was parked before it follows."""
        self._start_fetching()
        assert self._coming is not None
        tensor, self._coming = self._coming, None
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        tensor.record_stream(computing)
        # One that is done with, of an earlier micro-batch, is gone.
        before = self._before() if self._before is not None else None
        if before is not None:
            before._start_fetching()
        return tensor

    def _start_fetching(self) -> None:
        if self._coming is not None:
            return
        # Not before what is computed now is done: else memory would fill with what runs ahead.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._coming = self._host.to(self._device, non_blocking=True)
