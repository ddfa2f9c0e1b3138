"""Wires: how a slice of weights or gradients crosses one level, in the format of a codec.

`comm/collectives.py` combines the wires of several levels. It has one for each level and direction.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megafrontier.comm.wires import block, topk  # noqa: F401  # register their formats
from megafrontier.comm.wires.registry import FORMATS, CastCodec, Codec
from megafrontier.common.buffers import Workspace
from megafrontier.parallel.groups import all_gather, all_to_all


@dataclass(frozen=True)
class Wire:
    """A codec in use. The messages of a delta wire are changes of published weights."""

    codec: Codec
    is_delta: bool = False

    @property
    def name(self) -> str:
        """The format's name in a configuration."""
        return (self.codec.delta_name or "") if self.is_delta else self.codec.name

    def gather(
        self, shard: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, workspace: Workspace
    ) -> int:
        """All-gather every peer's `shard` [n], which may be a view of `out`, into `out` [size · n].

        Every rank of the group ends with the same bits, the owner of a shard too. Returns the bytes
        that this rank sent.
        """
        peers = out.numel() // shard.numel() - 1
        message = self.encode(shard.view(1, -1), workspace)
        if self.codec.sends_unchanged(out.dtype):
            all_gather(out, message.view(-1), group)
        else:
            received = workspace.get("received", (peers + 1, message.shape[1]), message.dtype)
            all_gather(received.view(-1), message.view(-1), group)
            self.codec.decode(received, out.view(peers + 1, -1))
        return peers * message.nbytes

    def reduce(
        self,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        workspace: Workspace,
        error: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Reduce-scatter `full` [size · n]. The order of the sum is the same in every run; with a
        quantized codec, this rank's own part comes last.

        With `error` [size · n], the quantization error of this rank's last messages is added before
        encoding, and replaced by the error of the new ones. Returns the sum, fp32 [n], and the
        bytes that this rank sent. The sum overwrites memory of `full`: if that is fp32, this rank's
        shard of it.
        """
        # Note [All-to-all and a local sum]
        # In a ring, every hop would round. This rounds once per level, sums in an order that is
        # the same in every run, and on gloo sends half the bytes.
        shards = full.view(dist.get_world_size(group), -1)
        if self.codec.is_quantized:
            errors = None if error is None else error.view_as(shards)
            return self._reduce_quantized(shards, group, workspace, errors)
        messages = self.encode(shards, workspace)
        received = workspace.get("received", messages.shape, messages.dtype)
        all_to_all(received.view(-1), messages.view(-1), group)
        out = _memory_for_sum(shards, dist.get_rank(group))
        self.codec.decode_sum(received, out)
        return out, messages[1:].nbytes

    def _reduce_quantized(
        self,
        shards: torch.Tensor,
        group: dist.ProcessGroup,
        workspace: Workspace,
        errors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int]:
        """`reduce` of `shards` [size, n]. This rank's own shard is not sent, so it is not
        rounded."""
        codec, size, own_rank = self.codec, len(shards), dist.get_rank(group)
        shape = size - 1, codec.message_length(shards.shape[1])
        messages, received = (workspace.get(p, shape, codec.dtype) for p in ("sent", "received"))
        _encode_for_peers(codec, own_rank, shards, messages, errors)
        message_sizes = [shape[1]] * size
        message_sizes[own_rank] = 0
        all_to_all(received.view(-1), messages.view(-1), group, message_sizes)
        own, out = shards[own_rank], _memory_for_sum(shards, own_rank)
        if own.dtype != out.dtype:  # the memory of the sum may overlap `own`
            out.copy_(workspace.get("own", own.shape, own.dtype).copy_(own))
        codec.decode_sum(received, out, accumulate=True)
        if errors is not None:
            # Not zero after a checkpoint was loaded, which stores errors with the owner.
            out.add_(errors[own_rank])
            errors[own_rank] = 0
        return out, messages.nbytes

    def encode(self, values: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """One message per row of `values` [rows, n]; `values` itself if a cast would not change
        it."""
        if self.codec.sends_unchanged(values.dtype):
            return values
        shape = values.shape[0], self.codec.message_length(values.shape[1])
        messages = workspace.get("sent", shape, self.codec.dtype)
        self.codec.encode(values, messages)
        return messages


def _encode_for_peers(
    codec: Codec,
    own_rank: int,
    shards: torch.Tensor,
    messages: torch.Tensor,
    errors: torch.Tensor | None,
) -> None:
    """Encode all `shards` [size, n] except this rank's own into `messages` [size - 1, m], with
    their `errors` [size, n]."""
    for first, last, row in ((0, own_rank, 0), (own_rank + 1, len(shards), own_rank)):
        if last > first:
            part = None if errors is None else errors[first:last]
            codec.encode(shards[first:last], messages[row : row + last - first], part)


def _memory_for_sum(shards: torch.Tensor, own_rank: int) -> torch.Tensor:
    """fp32 [n] in memory of `shards` [size, n]: this rank's own shard if it is fp32, else the first
    bytes of all."""
    if shards.dtype is torch.float32:
        return shards[own_rank]
    return shards.view(-1).view(torch.float32)[: shards.shape[1]]


def make_wire(name: str, rotates: bool = False) -> Wire:
    """The wire of a format's name; with `rotates`, a quantized one rotates (a cast gains nothing).

    int8 should rotate too, although its error is small against that of int4: without a rotation, it
    drops elements far below the block's largest in step after step, which Adam would amplify.
    """
    codec, is_delta = FORMATS[name]
    return Wire(codec.with_rotation() if rotates else codec, is_delta)


@dataclass(frozen=True)
class Wires:
    """The wire of each level, fastest first, for weights (gather) and gradients (reduce)."""

    gather: tuple[Wire, ...]
    reduce: tuple[Wire, ...]

    @classmethod
    def plain(cls, levels: int, dtype: torch.dtype) -> "Wires":
        """Wires that send `dtype` over each of the `levels`."""
        wire = Wire(CastCodec(dtype))
        return cls((wire,) * levels, (wire,) * levels)

    def extended(self, level: int) -> "Wires":
        """These wires for one more level, which has the formats of `level`."""
        return Wires((*self.gather, self.gather[level]), (*self.reduce, self.reduce[level]))

    @property
    def have_deltas(self) -> bool:
        """Whether published weights depend on those published before."""
        return any(wire.is_delta for wire in self.gather)


@dataclass(frozen=True)
class WorkWires:
    """The formats of activations or tokens, one for each level. None: they keep their type, and so
    they do on all levels by default."""

    codecs: tuple[Codec | None, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether they keep their type on all levels."""
        return not any(self.codecs)

    def codec(self, level: int, dtype: torch.dtype) -> Codec:
        """The format in which values of `dtype` cross a level."""
        chosen = self.codecs[level] if self.codecs else None
        return chosen or CastCodec(dtype)

    def wires(self, levels: int, dtype: torch.dtype) -> Wires:
        """The same formats for collectives of `dtype` over so many levels."""
        both = tuple(Wire(self.codec(level, dtype)) for level in range(levels))
        return Wires(both, both)


UNCHANGED = WorkWires()
"""Everything keeps its type."""
