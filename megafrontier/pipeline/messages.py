"""Messages between the ranks of a pipeline, on the comm streams of an engine."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megafrontier.comm.streams import DONE, WorkHandle
from megafrontier.comm.wires.registry import Codec
from megafrontier.comm.wires.wire import Wire
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

    def __init__(self, engine: Engine, mesh: Mesh, wires: Sequence[Wire | None] = ()) -> None:
        """All ranks of the pipeline make one, after `divide_model` and `shard`. `wires`: of each
        level; None, and by default, tensors keep their type."""
        self._engine, self._mesh = engine, mesh
        self._wires = tuple(wires) or (None,) * len(mesh.levels.sizes)
        self._ranks = mesh.shape.pipeline_ranks(mesh.rank)
        self._group = mesh.group(self._ranks)
        # A communicator's first operation must not be one that only some of its ranks take part in.
        mesh.arbiter.drain()
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=self._group)

    def start(self, transfers: Sequence[tuple[Transfer, Tensor]]) -> list[PendingTensor]:
        """Begin transfers that belong together: send each tensor, or receive into it. The results
        are in the same order."""
        parcels = [self._parcel(transfer, tensor) for transfer, tensor in transfers]
        label = ", ".join(self._describe(transfer) for transfer, _ in transfers)
        outermost = max(parcel.level for parcel in parcels)

        def task() -> None:
            for level in sorted({parcel.level for parcel in parcels}):
                with self._engine.ledger.collective(level, label, "activations") as sent:
                    sent += [p.sent_bytes for p in parcels if p.level == level]
                    if level == outermost:
                        self._exchange(parcels)

        work = self._engine.issue(outermost, task)
        return [PendingTensor(tensor, work, self._describe(t)) for t, tensor in transfers]

    def _parcel(self, transfer: Transfer, tensor: Tensor) -> "_Parcel":
        peer = self._ranks[transfer.peer]
        level = self._mesh.levels.level_between(self._mesh.rank, peer)
        wire = self._wires[level]
        codec = wire.codec if wire and not wire.codec.sends_unchanged(tensor.dtype) else None
        return _Parcel(transfer.kind.is_send, tensor, peer, level, codec)

    def wait(self, message: PendingTensor) -> Tensor:
        """The tensor of a message, when it is here."""
        if message.work is not DONE:
            with self._engine.ledger.waiting(message.label):
                message.work.wait()
        return message.tensor

    def _describe(self, transfer: Transfer) -> str:
        way = "to" if transfer.kind.is_send else "from"
        return (
            f"{transfer.kind} of micro-batch {transfer.micro_batch} at stage {transfer.stage} "
            f"{way} rank {self._ranks[transfer.peer]}"
        )

    def _exchange(self, parcels: Sequence["_Parcel"]) -> None:
        # gloo tells a sender that its receiver is ready. After a send, that message would wait
        # behind the data.
        parcels = sorted(parcels, key=lambda parcel: parcel.is_send)
        messages = [parcel.message() for parcel in parcels]
        ops = [
            dist.P2POp(dist.isend if p.is_send else dist.irecv, message, p.peer, self._group)
            for p, message in zip(parcels, messages, strict=True)
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for parcel, message in zip(parcels, messages, strict=True):
            parcel.open(message)


class _Parcel(NamedTuple):
    """A tensor on its way over a level, and its format there; None: it is sent unchanged."""

    is_send: bool
    tensor: Tensor
    peer: int
    level: int
    codec: Codec | None

    @property
    def sent_bytes(self) -> int:
        if not self.is_send:
            return 0
        return self.codec.message_bytes(self.tensor.numel()) if self.codec else self.tensor.nbytes

    def message(self) -> Tensor:
        """What is sent, or memory for what is received."""
        if self.tensor.is_cuda:  # its memory must not be reused while this stream uses it
            self.tensor.record_stream(torch.cuda.current_stream())
        if self.codec is None:
            return self.tensor
        row = self.tensor.view(1, -1)
        length = self.codec.message_length(row.numel())
        message = row.new_empty(1, length, dtype=self.codec.dtype)
        if self.is_send:
            self.codec.encode(row, message)
        return message

    def open(self, message: Tensor) -> None:
        """Fill the tensor from a received message."""
        if self.codec is not None and not self.is_send:
            self.codec.decode(message, self.tensor.view(1, -1))
