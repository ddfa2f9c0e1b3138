"""Wires: in what format a slice of weights or gradients crosses one level.

A codec turns elements into messages and back; a wire is a codec put to work in the two moves. The
moves over several levels (`moves.py`) have one wire for each level and direction.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from megafrontier.common.buffers import Workspace
from megafrontier.parallel.groups import all_gather, all_to_all
from megafrontier.partition.wires.block import INT4, INT8, BlockCodec


class Codec(Protocol):
    """A format of messages."""

    @property
    def dtype(self) -> torch.dtype:
        """Of a message's elements."""
        ...

    def message_bytes(self, count: int) -> int:
        """Bytes of a message of `count` elements."""
        ...

    def encode(self, values: torch.Tensor, messages: torch.Tensor) -> None:
        """Write one message a row [rows, m] of `values` [rows, n], any float type."""
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

    def encode(self, values: torch.Tensor, messages: torch.Tensor) -> None:
        """`values` in the type."""
        messages.copy_(values)

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

    def add(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out` [rows, n] the changes that `messages` [rows, m] of a delta wire say."""
        assert isinstance(self.codec, BlockCodec)
        self.codec.decode(messages, out, adds=True)

    def gather(
        self, shard: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, workspace: Workspace
    ) -> int:
        """Fill `out` [size · n] from every peer's `shard` [n], which may lie inside `out`.

        Every rank of the group ends with the same bits, the owner of a piece too. Returns the
        bytes this rank sent.
        """
        peers = out.numel() // shard.numel() - 1
        message = self.encode(shard.view(1, -1), workspace)
        if message.dtype == out.dtype:
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
        """Sum every peer's piece of `full` [size · n], in an order that is the same in each run;
        with a low-bit codec this rank's own comes last. `full` is used up: the sum, fp32 [n], lies
        in its memory, where that is fp32 in its own piece's place.

        With `error` [size · n], the quantisation error of this rank's last message is added before
        it encodes the next one, whose own then stands there. Returns the sum and the bytes sent.
        """
        # All-to-all and a local sum: one rounding per level instead of one per hop of a ring,
        # an order of summation that is the same in every run, and on gloo half the bytes.
        pieces = full.view(dist.get_world_size(group), -1)
        if isinstance(self.codec, BlockCodec):
            errors = None if error is None else error.view_as(pieces)
            return self._reduce_rounded(self.codec, pieces, group, workspace, errors)
        messages = self.encode(pieces, workspace)
        received = workspace.get("received", messages.shape, messages.dtype)
        all_to_all(received.view(-1), messages.view(-1), group)
        out = _place_of_sum(pieces, dist.get_rank(group))
        self.codec.decode_sum(received, out)
        return out, messages[1:].nbytes

    def _reduce_rounded(
        self,
        codec: BlockCodec,
        pieces: torch.Tensor,
        group: dist.ProcessGroup,
        workspace: Workspace,
        errors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int]:
        """The others' messages and this rank's own of `pieces` [size, n] summed: its own crosses no
        link, so it is not rounded."""
        size, mine = len(pieces), dist.get_rank(group)
        shape = size - 1, codec.message_bytes(pieces.shape[1])
        messages, received = (workspace.get(p, shape, codec.dtype) for p in ("sent", "received"))
        _encode_all_but(mine, codec, pieces, messages, errors)
        sizes = [shape[1]] * size
        sizes[mine] = 0
        all_to_all(received.view(-1), messages.view(-1), group, sizes)
        own, out = pieces[mine], _place_of_sum(pieces, mine)
        if own.dtype != out.dtype:  # the sum may begin where it lies
            out.copy_(workspace.get("own", own.shape, own.dtype).copy_(own))
        codec.decode_sum(received, out, adds=True)
        if errors is not None:
            out.add_(errors[mine])
            errors[mine] = 0  # a checkpoint brings some, of others' messages
        return out, messages.nbytes

    def encode(self, values: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """One message for each row of `values` [rows, n]; `values` itself where it has the wire's
        type already."""
        if values.dtype == self.codec.dtype:
            return values
        length = self.codec.message_bytes(values.shape[1]) // self.codec.dtype.itemsize
        messages = workspace.get("sent", (values.shape[0], length), self.codec.dtype)
        self.codec.encode(values, messages)
        return messages


def _encode_all_but(
    mine: int,
    codec: BlockCodec,
    pieces: torch.Tensor,
    messages: torch.Tensor,
    errors: torch.Tensor | None,
) -> None:
    """Messages [size - 1, m] of all `pieces` [size, n] but one, with their `errors` [size, n]."""
    for first, last, at in ((0, mine, 0), (mine + 1, len(pieces), mine)):
        if last > first:
            theirs, rows = slice(first, last), slice(at, at + last - first)
            codec.encode(pieces[theirs], messages[rows], None if errors is None else errors[theirs])


def pass_on(messages: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Fill `out` [size · rows, m] with every peer's `messages` [rows, m], as they are. Returns the
    bytes this rank sent."""
    all_gather(out.view(-1), messages.view(-1), group)
    return out.nbytes - messages.nbytes


def _place_of_sum(pieces: torch.Tensor, mine: int) -> torch.Tensor:
    """Memory of `pieces` [size, n] for fp32 [n]: the own piece's, or the first bytes of all."""
    if pieces.dtype is torch.float32:
        return pieces[mine]
    return pieces.view(-1).view(torch.float32)[: pieces.shape[1]]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CODECS: dict[str, Codec] = {
    **{name: CastCodec(dtype) for name, dtype in DTYPES.items()},
    "int8": INT8,
    "int4": INT4,
    "delta8": INT8,
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
