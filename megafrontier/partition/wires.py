"""Wires: in what format a slice of weights or gradients crosses one level.

A codec turns elements into messages and back; a wire is a codec put to work in the two moves. The
moves over several levels (`moves.py`) have one wire for each level and direction.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from megafrontier.cluster.collectives import all_gather, all_to_all
from megafrontier.partition.codec import DELTA8, INT4, INT8, BlockCodec


class Codec(Protocol):
    """A format of messages."""

    def message_bytes(self, count: int) -> int:
        """Bytes of a message of `count` elements."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """One message a row [rows, m] of `values` [rows, n], any float type."""
        ...

    def decode(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Values of messages [rows, m] into `out` [rows, n], any float type."""
        ...

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Sum of all messages' values into `out` fp32 [n], in the order of the rows."""
        ...


@dataclass(frozen=True)
class CastCodec:
    """Elements sent as `dtype`; exact where that is their own type."""

    dtype: torch.dtype

    def message_bytes(self, count: int) -> int:
        """Bytes of `count` elements."""
        return count * self.dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """`values` themselves where they have the type already."""
        return values.to(self.dtype)

    def decode(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """The messages in the type of `out`."""
        out.copy_(messages)

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Sum in fp32, whatever the messages' type."""
        if out.device.type != "cpu":
            torch.sum(messages, dim=0, dtype=torch.float32, out=out)
            return
        # There torch would make a copy of all messages in fp32 first: two to three times the time.
        out.copy_(messages[0])
        for message in messages[1:]:
            out.add_(message)


@dataclass(frozen=True)
class Wire:
    """One format in use. A delta wire carries the change of published weights, not weights."""

    codec: Codec
    is_delta: bool = False

    @property
    def is_low_bit(self) -> bool:
        """Whether it rounds to codes of its own, and not to another type alone."""
        return isinstance(self.codec, BlockCodec)

    @property
    def rotates(self) -> bool:
        """Whether it rotates values before it rounds them."""
        return isinstance(self.codec, BlockCodec) and self.codec.rotates

    @property
    def name(self) -> str:
        """The format's, as a configuration gives it."""
        said = self.codec
        if isinstance(said, BlockCodec):
            said = replace(said, rotates=False)
        names = (name for name, codec in _CODECS.items() if codec == said)
        return next(name for name in names if name.startswith("delta") == self.is_delta)

    def gather(self, shard: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> int:
        """Fill `out` [size · n] from every peer's `shard` [n], which may lie inside `out`.

        Every rank of the group ends with the same bits, the owner of a piece too. Returns the
        bytes this rank sent.
        """
        peers = out.numel() // shard.numel() - 1
        message = self.codec.encode(shard.view(1, -1))
        if message.dtype == out.dtype:
            all_gather(out, message.view(-1), group)
        else:
            received = message.new_empty(peers + 1, message.shape[1])
            all_gather(received.view(-1), message.view(-1), group)
            self.codec.decode(received, out.view(peers + 1, -1))
        return peers * message.nbytes

    def reduce(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        group: dist.ProcessGroup,
        error: torch.Tensor | None = None,
    ) -> int:
        """Sum every peer's piece of `full` [size · n] into `out` [n], fp32, in an order that is
        the same in each run; with a low-bit codec this rank's own comes last.

        With `error` [size · n], the quantisation error of this rank's last message is added before
        it encodes the next one, whose own then stands there. Returns the bytes sent.
        """
        # All-to-all and a local sum: one rounding per level instead of one per hop of a ring,
        # an order of summation that is the same in every run, and on gloo half the bytes.
        pieces = full.view(-1, out.numel())
        if self.is_low_bit:
            errors = None if error is None else error.view_as(pieces)
            return self._reduce_rounded(pieces, out, group, errors)
        messages = self.codec.encode(pieces)
        received = torch.empty_like(messages)
        all_to_all(received.view(-1), messages.view(-1), group)
        self.codec.decode_sum(received, out)
        return messages[1:].nbytes

    def _reduce_rounded(
        self,
        pieces: torch.Tensor,
        out: torch.Tensor,
        group: dist.ProcessGroup,
        errors: torch.Tensor | None,
    ) -> int:
        """The others' messages and this rank's own of `pieces` [size, n] summed into `out` [n]: its
        own crosses no link, so it is not rounded."""
        mine = dist.get_rank(group)
        others = [part for part in (slice(mine), slice(mine + 1, len(pieces))) if len(pieces[part])]
        messages = torch.cat(
            [
                self._encode_with(None if errors is None else errors[part], pieces[part])
                for part in others
            ]
        )
        sizes = [messages.shape[1]] * len(pieces)
        sizes[mine] = 0
        received = torch.empty_like(messages)
        all_to_all(received.view(-1), messages.view(-1), group, sizes)
        self.codec.decode_sum(received, out)
        out.add_(pieces[mine])
        if errors is not None:
            out.add_(errors[mine])
            errors[mine] = 0  # a checkpoint brings some, of others' messages
        return messages.nbytes

    def _encode_with(self, error: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
        """Messages of `values` [rows, n] and, if given, `error` [rows, n], together; their own
        error then stands in `error`."""
        if error is not None:
            values = values.float() + error  # in bf16 the sum would round, and nobody keep it
        messages = self.codec.encode(values)
        if error is not None:
            said = torch.empty_like(values)
            self.codec.decode(messages, said)
            torch.sub(values, said, out=error)
            # The step is skipped; its errors must not come back in the next.
            error.nan_to_num_(0.0, 0.0, 0.0)
        return messages


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CODECS: dict[str, Codec] = {
    **{name: CastCodec(dtype) for name, dtype in DTYPES.items()},
    "int8": INT8,
    "int4": INT4,
    "delta8": DELTA8,
    "delta4": INT4,
}


def make_wire(name: str, rotates: bool = False) -> Wire:
    """The wire of a format's name; only low-bit ones rotate (casts gain nothing by it).

    int8 too, though its error is small against int4's: without a rotation it says nothing of what
    lies far below a block's largest value, in step after step, and Adam would scale that up.
    """
    codec = _CODECS[name]
    if isinstance(codec, BlockCodec):
        codec = replace(codec, rotates=rotates)
    return Wire(codec, name.startswith("delta"))


@dataclass(frozen=True)
class Wires:
    """The wire of each level, fastest first, for weights (gather) and gradients (reduce)."""

    gather: tuple[Wire, ...]
    reduce: tuple[Wire, ...]

    @classmethod
    def plain(cls, levels: int, dtype: torch.dtype) -> "Wires":
        """The same type on every wire."""
        wire = Wire(CastCodec(dtype))
        return cls((wire,) * levels, (wire,) * levels)

    @property
    def have_deltas(self) -> bool:
        """Whether published weights carry an error into the next step."""
        return any(wire.is_delta for wire in self.gather)
