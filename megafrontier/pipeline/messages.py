"""Messages between the ranks of a pipeline, on the comm streams of an engine."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megafrontier.comm.rows import decode_rows, encode_rows
from megafrontier.comm.streams import DONE, WorkHandle
from megafrontier.comm.wires.registry import Codec
from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.parallel.mesh import Mesh
from megafrontier.partition.engine import Engine
from megafrontier.pipeline.table import Transfer


class PendingTensor(NamedTuple):
    """A tensor on its way, or already here."""

    tensor: Tensor
    work: WorkHandle = DONE
    label: str = ""


class Messenger:
    """Sends and receives for one rank of a pipeline.

    The ranks that differ in the pipeline's coordinate alone have a group. Messages are issued in
    the order of the table, on the stream of the engine's collectives of that level.
    """

    def __init__(self, engine: Engine, mesh: Mesh, wires: WorkWires = UNCHANGED) -> None:
        """All ranks of the pipeline make one, after `divide_model` and `shard`. `wires`: the
        formats of the tensors."""
        self._engine, self._mesh = engine, mesh
        self._wires = wires
        self._ranks = mesh.shape.pipeline_ranks(mesh.rank)
        self._group = mesh.group(self._ranks)
        # A communicator's first operation must not be one that only some of its ranks take part in.
        mesh.arbiter.drain()
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=self._group)

    def start(self, transfers: Sequence[tuple[Transfer, Tensor]]) -> list[PendingTensor]:
        """Begin transfers that belong together: send each tensor, or receive into it. The results
        are in the same order."""
        moves = [self._move(transfer, tensor) for transfer, tensor in transfers]
        label = ", ".join(self._describe(transfer) for transfer, _ in transfers)
        outermost = max(move.level for move in moves)

        def task() -> None:
            for level in sorted({move.level for move in moves}):
                with self._engine.ledger.collective(level, label, "activations") as sent:
                    sent += [m.sent_bytes for m in moves if m.level == level]
                    if level == outermost:
                        self._exchange(moves)

        work = self._engine.issue(outermost, task)
        return [PendingTensor(tensor, work, self._describe(t)) for t, tensor in transfers]

    def _move(self, transfer: Transfer, tensor: Tensor) -> "_Move":
        peer = self._ranks[transfer.peer]
        level = self._mesh.levels.level_between(self._mesh.rank, peer)
        codec = self._wires.codec(level, tensor.dtype)
        return _Move(transfer.kind.is_send, tensor, peer, level, codec)

    def wait(self, message: PendingTensor) -> Tensor:
        """The tensor of a message, when it is here."""
        if message.work is not DONE:
            with self._engine.ledger.waiting(message.label):
                message.work.wait()
        return message.tensor

    def _describe(self, transfer: Transfer) -> str:
        direction = "to" if transfer.kind.is_send else "from"
        return (
            f"{transfer.kind} of micro-batch {transfer.micro_batch} at stage {transfer.stage} "
            f"{direction} rank {self._ranks[transfer.peer]}"
        )

    def _exchange(self, moves: Sequence["_Move"]) -> None:
        # gloo tells a sender that its receiver is ready. After a send, that message would wait
        # behind the data.
        moves = sorted(moves, key=lambda move: move.is_send)
        messages = [move.message() for move in moves]
        ops = [
            dist.P2POp(dist.isend if m.is_send else dist.irecv, message, m.peer, self._group)
            for m, message in zip(moves, messages, strict=True)
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for move, message in zip(moves, messages, strict=True):
            if not move.is_send and not move.codec.sends_unchanged(move.tensor.dtype):
                decode_rows(move.codec, message, move.row)


class _Move(NamedTuple):
    """A tensor that is sent to a peer over a level, or received, and its format there."""

    is_send: bool
    tensor: Tensor
    peer: int
    level: int
    codec: Codec

    @property
    def row(self) -> Tensor:
        """The tensor as one row."""
        return self.tensor.view(1, -1)

    @property
    def sent_bytes(self) -> int:
        return self.codec.message_bytes(self.tensor.numel()) if self.is_send else 0

    def message(self) -> Tensor:
        """What is sent, or memory for what is received."""
        if self.tensor.is_cuda:  # its memory must not be reused while this stream uses it
            self.tensor.record_stream(torch.cuda.current_stream())
        if self.is_send:
            return encode_rows(self.codec, self.row)
        if self.codec.sends_unchanged(self.tensor.dtype):
            return self.row
        length = self.codec.message_length(self.tensor.numel())
        return self.tensor.new_empty(1, length, dtype=self.codec.dtype)
