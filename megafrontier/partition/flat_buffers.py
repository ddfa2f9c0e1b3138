"""The parameters of one unit and their gradients, as views into its flat buffers."""

from collections.abc import Sequence

import torch
from torch import nn

from megafrontier.partition.layout import Layout
from megafrontier.partition.memory import UnitBufferPool

GROUPED_BYTES = 1 << 25
"""Bytes of gradients that are written in one call. On a GPU this takes half the device time and a
quarter of the host time of single calls; the bound keeps the memory negligible."""


class UnitParameters:
    """The parameters that the model's modules hold, backed by the unit's flat buffer.

    While the unit is unsharded, each parameter is a view into the flat buffer. While it is
    resharded, each parameter is a NaN tensor of its shape, so that reading it by mistake shows up
    in the result.

    Note [Stale saved tensors]
    In forward, autograd saves views of the parameters. By the time backward runs, that memory may
    hold another unit's weights, or this unit's weights of a later step. We therefore set the
    version counter of every parameter: it is even while the unit is unsharded, odd while it is
    resharded, and grows by 2 with each optimizer step. Autograd compares versions and raises an
    error instead of using the wrong memory.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.parameters = [
            nn.Parameter(torch.empty(0, dtype=dtype, device=device)) for _ in layout.entries
        ]
        self._layout = layout
        self._unsharded_views: list[torch.Tensor] = []
        self._is_unsharded = False
        self._step = 0
        nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self._resharded_views = [nan.expand(entry.shape) for entry in layout.entries]

    def unshard(self, flat: torch.Tensor) -> None:
        """Make the parameters views into `flat` [numel]. Every call must pass the same buffer."""
        if self._is_unsharded:
            return
        if not self._unsharded_views:
            self._unsharded_views = self._layout.views(flat)
        self._set_data(self._unsharded_views, version=2 * self._step)
        self._is_unsharded = True

    def reshard(self) -> None:
        """Make the parameters NaN, because the flat buffer is about to be reused."""
        self._set_data(self._resharded_views, version=2 * self._step + 1)
        self._is_unsharded = False

    def begin_step(self, flat: torch.Tensor | None) -> None:
        """Invalidate graphs of the last optimizer step, whose weights have changed.

        `flat` is the buffer if it holds the new weights already, else None.
        """
        self._step += 1
        self._is_unsharded = False
        if flat is None:
            self.reshard()
        else:
            # Set .data again although the views are the same: `model.half()`, or cuDNN when it
            # flattens the weights of a recurrent layer, may have moved a parameter out of the
            # buffer. It would then no longer be trained.
            self.unshard(flat)

    def _set_data(self, tensors: Sequence[torch.Tensor], version: int) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor
        versions = (version,) * len(self.parameters)
        torch._C._autograd._unsafe_set_version_counter(tuple(self.parameters), versions)


class FlatGradient:
    """Writes the gradients of a unit's parameters into one flat buffer.

    The first gradient of a parameter overwrites the buffer and later ones are added, so the buffer
    need not be filled with zeros.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.buffer: torch.Tensor | None = None
        """The buffer in use, between `start` and `complete`."""
        self._targets: list[torch.Tensor] = []
        self._missing: set[int] = set()
        self._waiting: dict[int, torch.Tensor] = {}
        self._waiting_bytes = 0
        # Views by address of the buffer: the buffers are few, and views cost as much as small
        # copies.
        self._views: dict[int, list[torch.Tensor]] = {}

    def start(self, buffer: torch.Tensor) -> None:
        """Write into `buffer` [numel] from now on, whatever it holds."""
        address = buffer.data_ptr()
        if address not in self._views:
            padding = buffer[self._layout.padding_within(0, self._layout.numel)]
            self._views[address] = [*self._layout.views(buffer), padding]
        self.buffer, self._targets = buffer, self._views[address]
        self._missing = set(range(len(self._layout.entries)))

    def forget(self) -> None:
        """Drop the buffer and all views, because the memory is about to be freed."""
        self.buffer, self._targets = None, []
        self._views.clear()

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of parameter `index`. It must not change until it is written."""
        gradient = gradient.detach()  # with create_graph=True it has a graph
        if gradient.layout is not torch.strided:  # nn.Embedding(sparse=True)
            gradient = gradient.to_dense()
        if index in self._waiting:
            self.write()
        self._waiting[index] = gradient
        self._waiting_bytes += gradient.nbytes
        if self._waiting_bytes > GROUPED_BYTES:
            self.write()

    def write(self) -> None:
        """Write the waiting gradients and drop them."""
        first = [index for index in self._waiting if index in self._missing]
        later = [index for index in self._waiting if index not in self._missing]
        for each, indices in ((torch._foreach_copy_, first), (torch._foreach_add_, later)):
            if indices:
                each([self._targets[i] for i in indices], [self._waiting[i] for i in indices])
        self._missing.difference_update(first)
        self._waiting.clear()
        self._waiting_bytes = 0

    def complete(self) -> torch.Tensor:
        """Return the buffer, with zeros in the padding and for parameters without a gradient."""
        self.write()
        buffer, self.buffer = self.buffer, None
        assert buffer is not None
        for index in (*self._missing, -1):  # -1 is the padding
            self._targets[index].zero_()
        return buffer


class GradientBuffers:
    """The memory of a unit's gradients.

    flat: writes the full gradient of a micro-batch: into the shard, if that is the full gradient.
    shard: fp32 [numel / number of shards], from the unit's first backward in a step to its update.
        Otherwise empty, unless `pool.shards` keeps buffers.
    """

    def __init__(
        self, layout: Layout, shards: int, dtype: torch.dtype, pool: UnitBufferPool
    ) -> None:
        """`shards`: into how many parts the full gradient, of type `dtype`, is cut."""
        self.flat = FlatGradient(layout)
        self.shard = torch.empty(0, device=pool.device)
        self._numel, self._shards, self._dtype, self._pool = layout.numel, shards, dtype, pool

    def allocate_shard(self) -> torch.Tensor:
        """The shard, whose contents are undefined if there was none."""
        if self.shard.numel() == 0:
            self.shard = self._pool.shards.acquire(self._numel // self._shards, torch.float32)
        return self.shard

    def start_full(self) -> None:
        """Begin to write a full gradient, unless it has begun."""
        if self.flat.buffer is None and self._shards == 1:
            self.flat.start(self.allocate_shard())
        elif self.flat.buffer is None:
            self.flat.start(self._pool.gradients.acquire(self._numel, self._dtype))

    def release_full(self, buffer: torch.Tensor) -> None:
        """Return the buffer of a full gradient that is not the shard."""
        self._pool.gradients.release(buffer)

    def clear(self) -> None:
        """Free the shard. The computation has waited for its last use on other streams."""
        if self._shards == 1:
            self.flat.buffer = None
        if self.shard.numel() == 0 or self._pool.shards.keeps:
            return
        self._pool.shards.release(self.shard)
        self.shard = self.shard.new_empty(0)
        if self._shards == 1:
            self.flat.forget()


def clear_unused(
    gradient: torch.Tensor,
    layout: Layout,
    shard: tuple[int, int],
    parameters: Sequence[nn.Parameter],
) -> None:
    """Set a gradient to zero where it belongs to no parameter that is trained. It is the part
    `shard`, [start, stop), of the flat buffer of `parameters`."""
    # Quantisation, and rotation above all, leaves values in padding and in frozen parameters.
    gradient[layout.padding_within(*shard)].zero_()
    pairs = zip(layout.entries, parameters, strict=True)
    frozen = {entry.name for entry, parameter in pairs if not parameter.requires_grad}
    for entry, first, last, at in layout.within(*shard) if frozen else ():
        if entry.name in frozen:
            gradient[at : at + last - first].zero_()
