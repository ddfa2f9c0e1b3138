"""Rows that ranks exchange over levels, each row a message of its own in the format of a codec.

A route brings rows over several levels, one step a level. A step is linear: `RowExchange.spread`
copies rows to the peers that need them, and `RowExchange.collect`, its transpose, sums what comes
back. Expert and context parallelism plan their routes; this module executes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.comm.streams import AsyncChain
from megafrontier.comm.wires.registry import Codec
from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.parallel.groups import all_to_all


@dataclass(frozen=True)
class RouteStep:
    """The rows that one rank sends over one level, receives and keeps.

    After the step the rank has the rows that stay, and then those of each peer, in the order of the
    peers.
    """

    level: int
    send: Tensor
    """int64: rows to send, ordered by peer."""
    sent: list[int]
    """Rows for each peer; 0 for the rank itself."""
    received: list[int]
    """Rows of each peer; 0 for the rank itself."""
    rows: int
    """Rows before the step."""
    keep: Tensor | None = None
    """int64: rows that stay on this rank. None: all."""

    @property
    def kept(self) -> int:
        """How many rows stay."""
        return self.rows if self.keep is None else len(self.keep)

    @property
    def rows_after(self) -> int:
        """Rows after the step."""
        return self.kept + sum(self.received)


def encode_rows(codec: Codec, rows: Tensor) -> Tensor:
    """One message for each row [n, h]: [n, m]. The rows themselves if the codec does not change
    them."""
    if codec.sends_unchanged(rows.dtype):
        return rows.contiguous()
    messages = rows.new_empty(len(rows), codec.message_length(rows.shape[1]), dtype=codec.dtype)
    if len(rows):
        codec.encode(rows.contiguous(), messages)
    return messages


def decode_rows(codec: Codec, messages: Tensor, out: Tensor) -> None:
    """Write the values of messages, bytes [n, m] with any stride or the codec's type, into `out`
    [n, h]."""
    if not len(messages):
        return
    # A cast reads a view of bytes that lie apart. Kernels of other codecs need them in one piece.
    codec.decode((messages if codec.is_cast else messages.contiguous()).view(codec.dtype), out)


class RowExchange:
    """Exchanges of rows over the levels of a hierarchy, on the comm streams of an engine."""

    def __init__(self, collectives: LevelCollectives, wires: WorkWires = UNCHANGED) -> None:
        """`wires`: the formats of the rows. The ledger counts them as `collectives` says."""
        self._collectives, self._wires = collectives, wires

    def then(self, chain: AsyncChain, level: int, function: Callable[[Tensor], Tensor]) -> None:
        """Append `function` to a chain, on the stream of `level`."""
        self._collectives.then(chain, level, function)

    def spread(
        self, step: RouteStep, chain: AsyncChain, rows: Tensor, room: Tensor | None = None
    ) -> Tensor:
        """The rows [rows_after, …] after a step that starts with `rows` [rows, …].

        `room`: memory that begins with the rows, if all stay, and has room for those that arrive.
        """
        out = _room_after(step, rows) if room is None else room[: step.rows_after]
        sent = rows.index_select(0, step.send)
        self.exchange(step.level, chain, sent, step.sent, step.received, out[step.kept :])
        return out

    def spread_with(
        self, step: RouteStep, chain: AsyncChain, rows: Tensor, exact: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`spread` of rows [rows, h] and of 4-byte numbers [rows, m] that stay exact, in one
        message. The step keeps some rows."""
        assert step.keep is not None
        out = _room_after(step, rows)
        arrived = self._exchange_with(
            step, chain, rows[step.send], exact[step.send], step.sent, step.received,
            out[step.kept :],
        )  # fmt: skip
        return out, torch.cat([exact[step.keep], arrived])

    def collect(
        self, step: RouteStep, chain: AsyncChain, rows: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The transpose of `spread`: for each row before the step, the fp32 sum [rows, …] of the
        row that stayed and those that come back.

        `dtype`: the type of what is sent; by default, that of `rows`. If all rows stay, `rows` are
        fp32 and the sum is in their memory.
        """
        sent = rows[step.kept : step.rows_after].to(dtype or rows.dtype)
        arrived = sent.new_empty(len(step.send), *rows.shape[1:])
        self.exchange(step.level, chain, sent, step.received, step.sent, arrived)
        return _sum_rows(step, rows, arrived)

    def collect_with(
        self, step: RouteStep, chain: AsyncChain, rows: Tensor, exact: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`collect` of rows [rows_after, h] and of fp32 numbers [rows_after, m] that stay exact."""
        arrived = rows.new_empty(len(step.send), rows.shape[1])
        others = self._exchange_with(
            step, chain, rows[step.kept :], exact[step.kept :], step.received, step.sent, arrived
        )
        return _sum_rows(step, rows, arrived), _sum_rows(step, exact, others)

    def exchange(
        self,
        level: int,
        chain: AsyncChain,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        out: Tensor,
    ) -> None:
        """Send the next `sent[i]` of `rows` [n, …] to peer i of a level, and receive the next
        `received[i]` rows of `out` [m, …] from it."""
        codec = self._wires.codec(level, rows.dtype)
        messages = encode_rows(codec, rows.flatten(1))
        if codec.sends_unchanged(out.dtype):
            self._swap(level, chain, messages, sent, received, out.flatten(1))
            return
        arrived = messages.new_empty(len(out), messages.shape[1])
        self._swap(level, chain, messages, sent, received, arrived)
        decode_rows(codec, arrived, out.flatten(1))

    def _exchange_with(
        self,
        step: RouteStep,
        chain: AsyncChain,
        rows: Tensor,
        exact: Tensor,
        sent: list[int],
        received: list[int],
        out: Tensor,
    ) -> Tensor:
        """`exchange` of rows and exact numbers, whose result is returned, in one message."""
        codec = self._wires.codec(step.level, rows.dtype)
        parts = [part.view(torch.uint8) for part in (exact.contiguous(), encode_rows(codec, rows))]
        messages, start = torch.cat(parts, 1), parts[0].shape[1]
        arrived = messages.new_empty(sum(received), messages.shape[1])
        self._swap(step.level, chain, messages, sent, received, arrived)
        decode_rows(codec, arrived[:, start:], out)
        return arrived[:, :start].contiguous().view(exact.dtype)

    def _swap(
        self,
        level: int,
        chain: AsyncChain,
        messages: Tensor,
        sent: list[int],
        received: list[int],
        out: Tensor,
    ) -> None:
        hierarchy = self._collectives.hierarchy
        group, index = hierarchy.groups[level], hierarchy.coordinates[level]
        assert group is not None
        with self._collectives.record(level, chain) as count:
            all_to_all(out, messages, group, received, sent)
            count.append((len(messages) - sent[index]) * messages[:1].nbytes)


def _room_after(step: RouteStep, rows: Tensor) -> Tensor:
    """Memory [rows_after, …] that begins with the rows that stay."""
    out = rows.new_empty(step.rows_after, *rows.shape[1:])
    if step.keep is not None:
        torch.index_select(rows, 0, step.keep, out=out[: step.kept])
    return out


def _sum_rows(step: RouteStep, rows: Tensor, arrived: Tensor) -> Tensor:
    """The sums fp32 [step.rows, …] of the rows that stayed and those that come back."""
    if step.keep is None:
        total = rows[: step.rows]
    else:
        total = torch.zeros(step.rows, *rows.shape[1:], device=rows.device)
        total[step.keep] = rows[: step.kept].float()
    # One peer after another: no row is there twice, and sums have the same order in every run.
    for places, part in zip(step.send.split(step.sent), arrived.split(step.sent), strict=True):
        total.index_add_(0, places, part.float())
    return total
