"""Block inputs in host memory between forward and backward.

Copies run on a stream of their own beside the computation: out while later blocks run forward, and
back while the block that ran after runs backward. Nothing waits on the host. On a CPU host memory
is where the inputs are anyway, and nothing is copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor

from megafrontier.common.buffers import BufferPool


class Offload:
    """Where the blocks of one model leave their inputs."""

    def __init__(self) -> None:
        self._copies: Copies | None = None
        self._last: ref[Offloaded] | None = None

    @contextmanager
    def applied_to(self, hidden: Tensor) -> Iterator[None]:
        """What autograd saves of `hidden` [b, s, hidden] inside waits on the host."""
        if not (is_elsewhere(hidden) and torch.is_grad_enabled()):
            yield
            return
        place, size = hidden.data_ptr(), hidden.numel()

        def pack(saved: Tensor) -> "Tensor | Offloaded":
            is_input = saved.data_ptr() == place and saved.numel() == size
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


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether host memory is not where the tensor is."""
    return tensor.is_cuda


class Offloaded:
    """One tensor's copy on the host."""

    def __init__(self, host: Tensor, copies: "Copies", before: "ref[Offloaded] | None") -> None:
        """`host` is what `copies.to_host` gave, `before` what was offloaded last, and so will be
        fetched next."""
        self._host, self._copies, self._before = host, copies, before
        self._coming: Tensor | None = None

    def fetch(self) -> Tensor:
        """The tensor on its device again; the one that was offloaded before it follows."""
        tensor = self._start()
        self._coming = None
        self._copies.arrive(tensor)
        before = self._before() if self._before is not None else None
        # One of an earlier micro-batch is gone with its graph.
        if before is not None:
            before._start()
        return tensor

    def __del__(self) -> None:
        """A graph that is dropped leaves a copy on its way into memory that is another's then."""
        if self._coming is not None:
            self._copies.arrive(self._coming)
        self._copies.give_back(self._host)

    def _start(self) -> Tensor:
        if self._coming is None:
            self._coming = self._copies.start_back(self._host)
        return self._coming


class Copies:
    """Copies between one GPU and pinned host memory, on a stream of their own.

    torch's own pool hands pinned memory on only when the device has come so far: for each
    micro-batch that the host is ahead it would take as much again. Here the one stream keeps the
    order: what is copied into memory that was given back comes after what was copied out of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffer_pool = BufferPool(torch.device("cpu"), pinned=True)
        self._going: tuple[Tensor, torch.cuda.Event] | None = None

    def to_host(self, tensor: Tensor) -> Tensor:
        """Begin to copy what the computation has made by now; the host may not read it yet.

        The tensor is kept until the computation has waited for the copy, at the next one. With
        `record_stream` its memory would be free only when the device has come so far, and the host,
        which runs ahead, would take new memory for each block.
        """
        self._let_go()
        host = self._buffer_pool.acquire(tensor.numel(), tensor.dtype).view(tensor.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            self._going = tensor, self._stream.record_event()
        return host

    def _let_go(self) -> None:
        if self._going is not None:
            torch.cuda.current_stream(self._device).wait_event(self._going[1])
            self._going = None

    def start_back(self, host: Tensor) -> Tensor:
        """Begin to copy back, for `arrive` to finish; after what is computed now, since memory
        would fill if the copies of all blocks ran ahead. The computation's memory takes it, which
        waits for the copy before it gives that memory to another."""
        self._let_go()
        tensor = torch.empty_like(host, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return tensor.copy_(host, non_blocking=True)

    def give_back(self, host: Tensor) -> None:
        """All copies into and out of it have begun."""
        self._buffer_pool.release(host.view(-1))

    def arrive(self, tensor: Tensor) -> None:
        """Let the computation wait for what has begun to come back, and use it."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
