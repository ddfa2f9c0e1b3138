"""Messages between the ranks of a pipeline, on the comm streams of an engine."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megafrontier.parallel.mesh import Mesh
from megafrontier.partition.comm.streams import DONE, WorkHandle
from megafrontier.partition.engine import Engine
from megafrontier.pipeline.table import Transfer


class Message(NamedTuple):
    """A tensor on its way, or already here."""

    tensor: Tensor
    work: WorkHandle = DONE
    label: str = ""


class Messenger:
    """Sends and receives for one rank of a pipeline.

    The ranks that differ in the pipeline's coordinate alone have a group. Messages are issued in
    the order of the table, on the stream of the engine's collectives of that level.
    """

    def __init__(self, engine: Engine, mesh: Mesh) -> None:
        """All ranks of the pipeline make one, after `divide_model` and `shard`."""
        self._engine, self._mesh = engine, mesh
        self._ranks = mesh.shape.pipeline_ranks(mesh.rank)
        self._group = mesh.group(self._ranks)
        # A communicator's first operation must not be one that only some of its ranks take part in.
        mesh.arbiter.drain()
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=self._group)

    def start(self, transfers: Sequence[tuple[Transfer, Tensor]]) -> list[Message]:
        """Begin transfers that belong together: send each tensor, or receive into it. The results
        are in the same order."""
        peers = [self._ranks[transfer.peer] for transfer, _ in transfers]
        shape, rank = self._mesh.shape, self._mesh.rank
        levels = [shape.level_between(rank, peer) for peer in peers]
        label = ", ".join(self._describe(transfer) for transfer, _ in transfers)

        def task() -> None:
            ledger = self._engine.ledger
            for level in {*levels} - {max(levels)}:
                with ledger.collective(level, label, "activations") as sent:
                    sent += self._sent(transfers, levels, level)
            with ledger.collective(max(levels), label, "activations") as sent:
                self._exchange(transfers, peers)
                sent += self._sent(transfers, levels, max(levels))

        work = self._engine.issue(max(levels), task)
        return [Message(tensor, work, self._describe(t)) for t, tensor in transfers]

    def wait(self, message: Message) -> Tensor:
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

    def _exchange(self, transfers: Sequence[tuple[Transfer, Tensor]], peers: list[int]) -> None:
        ops = []
        for (transfer, tensor), peer in zip(transfers, peers, strict=True):
            if tensor.is_cuda:  # its memory must not be reused while this stream reads it
                tensor.record_stream(torch.cuda.current_stream())
            function = dist.isend if transfer.kind.is_send else dist.irecv
            ops.append(dist.P2POp(function, tensor, peer, self._group))
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    @staticmethod
    def _sent(
        transfers: Sequence[tuple[Transfer, Tensor]], levels: list[int], level: int
    ) -> list[int]:
        """The bytes that are sent over a level."""
        return [
            tensor.nbytes
            for (transfer, tensor), own in zip(transfers, levels, strict=True)
            if own == level and transfer.kind.is_send
        ]
