"""Block inputs in host memory between forward and backward.

Copies run on a stream of their own beside the computation: out while later blocks run forward, and
back while the block that ran after runs backward. Nothing waits on the host. On a CPU host memory
is where the inputs are anyway, and nothing is copied.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor


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
        offloaded = Offloaded(tensor, self._copies, self._last)
        self._last = ref(offloaded)
        return offloaded


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether host memory is not where the tensor is."""
    return tensor.is_cuda


class Offloaded:
    """One tensor's copy on the host."""

    def __init__(self, tensor: Tensor, copies: "Copies", before: "ref[Offloaded] | None") -> None:
        """`before`: what was offloaded last, and so will be fetched next."""
        self._copies, self._before = copies, before
        self._coming: Tensor | None = None
        self._host: Tensor | None = None  # should there be no room for it
        self._host = copies.to_host(tensor)

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
        if self._host is not None:
            self._copies.give_back(self._host)

    def _start(self) -> Tensor:
        if self._coming is None:
            assert self._host is not None
            self._coming = self._copies.start_back(self._host)
        return self._coming


class HostBuffers:
    """Host memory that inputs take in turns, as much as is out at a time.

    torch's own pool hands pinned memory on only when the device has come so far: for each
    micro-batch that the host is ahead it would take as much again. Here all copies are in the order
    of one stream: what is copied into memory that was given back comes after what was copied out.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, like: Tensor) -> Tensor:
        """A host tensor of that shape and type with anything in it."""
        free = self._free[like.shape, like.dtype]
        if free:
            return free.pop()
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pinned)

    def give_back(self, host: Tensor) -> None:
        """All copies out of it have been asked for."""
        self._free[host.shape, host.dtype].append(host)


class Copies:
    """Copies between one GPU and pinned host memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = HostBuffers(pinned=True)
        self.give_back = self._buffers.give_back
        self._going: tuple[Tensor, torch.cuda.Event] | None = None

    def to_host(self, tensor: Tensor) -> Tensor:
        """Begin to copy what the computation has made by now; the host may not read it yet.

        The tensor is kept until the computation has waited for the copy, at the next one. With
        `record_stream` its memory would be free only when the device has come so far, and the host,
        which runs ahead, would take new memory for each block.
        """
        self._let_go()
        host = self._buffers.take(tensor)
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

    def arrive(self, tensor: Tensor) -> None:
        """Let the computation wait for what has begun to come back, and use it."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
