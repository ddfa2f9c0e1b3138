"""Block inputs in host memory between forward and backward.

Copies run on their own stream: to the host while later blocks run forward, and back while the next
block runs backward. The host never waits. On a CPU the inputs are in host memory already, and
nothing is copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor

from megafrontier.common.buffers import BufferPool


class Offload:
    """Offloads the inputs of the blocks of one model."""

    def __init__(self) -> None:
        self._copies: Copies | None = None
        self._last: ref[Offloaded] | None = None

    @contextmanager
    def applied_to(self, hidden: Tensor) -> Iterator[None]:
        """A context in which autograd saves `hidden` [b, s, hidden] on the host."""
        if not (is_on_gpu(hidden) and torch.is_grad_enabled()):
            yield
            return
        address, size = hidden.data_ptr(), hidden.numel()

        def pack(saved: Tensor) -> "Tensor | Offloaded":
            is_input = saved.data_ptr() == address and saved.numel() == size
            return self._offload(saved) if is_input else saved

        def unpack(kept: "Tensor | Offloaded") -> Tensor:
            return kept if isinstance(kept, Tensor) else kept.fetch()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _offload(self, tensor: Tensor) -> "Offloaded":
        if self._copies is None:
            self._copies = Copies(tensor.device)
        offloaded = Offloaded(self._copies.to_host(tensor), self._copies, self._last)
        self._last = ref(offloaded)
        return offloaded


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is not in host memory."""
    return tensor.is_cuda


class Offloaded:
    """One tensor's copy on the host."""

    def __init__(self, host: Tensor, copies: "Copies", before: "ref[Offloaded] | None") -> None:
        """`host` comes from `copies.to_host`. `before` was offloaded before this one, and is
        fetched after it."""
        self._host, self._copies, self._before = host, copies, before
        self._fetched: Tensor | None = None

    def fetch(self) -> Tensor:
        """The tensor on its device. Also starts to fetch the one that was offloaded before it."""
        tensor = self._start()
        self._fetched = None
        self._copies.finish(tensor)
        before = self._before() if self._before is not None else None
        # It is None if it belonged to an earlier micro-batch, whose graph is gone.
        if before is not None:
            before._start()
        return tensor

    def __del__(self) -> None:
        # A dropped graph may leave a copy in flight, into memory that is reused afterwards.
        if self._fetched is not None:
            self._copies.finish(self._fetched)
        self._copies.release(self._host)

    def _start(self) -> Tensor:
        if self._fetched is None:
            self._fetched = self._copies.to_device(self._host)
        return self._fetched


class Copies:
    """Copies between one GPU and pinned host memory, on their own stream.

    torch's allocator reuses pinned memory only after the device has finished with it, so it would
    allocate again for each micro-batch that the host is ahead. Here a released buffer is reused at
    once: the stream's order puts the next copy into it after the last copy out of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffer_pool = BufferPool(torch.device("cpu"), pinned=True)
        self._in_flight: tuple[Tensor, torch.cuda.Event] | None = None

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor of the compute stream. The host may not read the result yet.

        The tensor is kept until the next copy, when the compute stream waits for this one. With
        `record_stream` its memory would be free only after the device has finished, and the host,
        which runs ahead, would allocate new memory for each block.
        """
        self._free_source()
        host = self._buffer_pool.acquire(tensor.numel(), tensor.dtype).view(tensor.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            self._in_flight = tensor, self._stream.record_event()
        return host

    def _free_source(self) -> None:
        if self._in_flight is not None:
            torch.cuda.current_stream(self._device).wait_event(self._in_flight[1])
            self._in_flight = None

    def to_device(self, host: Tensor) -> Tensor:
        """Start to copy back; `finish` must follow before use.

        The copy waits for the compute stream, because memory would fill if the copies of all
        blocks ran ahead."""
        self._free_source()
        tensor = torch.empty_like(host, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return tensor.copy_(host, non_blocking=True)

    def release(self, host: Tensor) -> None:
        """Return a buffer for reuse. All copies into and out of it must have been started."""
        self._buffer_pool.release(host.view(-1))

    def finish(self, tensor: Tensor) -> None:
        """Let the compute stream wait for the copies that `to_device` has started."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
