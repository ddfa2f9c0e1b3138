"""What is on its way over the levels, and in which order two such ways share the lanes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megafrontier.common.buffers import BufferPool
from megafrontier.partition.comm.streams import DONE, Ticket

Work = Callable[[torch.Tensor], torch.Tensor]
"""A crossing, or work beside one: what it makes of the tensor on its way."""


@dataclass
class Slot:
    """A tensor on its way: each crossing reads it and puts its result in its place.

    `label` says which move of which unit this is, in traces and when ranks disagree.

    Note on memory. A lane of a device has only been given its work when the call returns. So what
    one lane hands to the next is borrowed when the chain is begun, and goes back when the
    computation has waited for its end: whoever has it next comes after that on every lane, for
    each waits for the computation before it takes up a task.
    """

    value: torch.Tensor
    label: str
    ticket: Ticket = DONE
    _borrowed: list[tuple[BufferPool, torch.Tensor]] = field(default_factory=list)

    def borrow(self, buffer_pool: BufferPool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [numel] until the end of the chain."""
        buffer = buffer_pool.acquire(numel, dtype)
        self._borrowed.append((buffer_pool, buffer))
        return buffer

    def wait(self) -> torch.Tensor:
        """The tensor at the end of the chain, ready to be used here."""
        self.ticket.wait()
        self.ticket = DONE
        for buffer_pool, buffer in self._borrowed:
            buffer_pool.release(buffer)
        self._borrowed.clear()
        return self.value


Step = tuple[Slot, int, Work]
"""A crossing of a level, or work beside one, that a lane is to be given."""


def weave(steps: list[Step]) -> list[Step]:
    """The steps of a gather and then a reduce so that neither's slow crossing holds up the other.

    First the gather's outermost crossing, then what of the reduce lies inside that level, then
    the rest of the gather and the rest of the reduce. So the outermost level gathers while the
    inner ones reduce, and reduces while they gather; were one given whole before the other, the
    second would wait for the first one's slow crossing on the inner levels' lanes.
    """
    gather = [step for step in steps if step[0] is steps[0][0]]
    reduce = [step for step in steps if step[0] is not steps[0][0]]
    inside = [step for step in reduce if step[1] < gather[0][1]]
    beyond = [step for step in reduce if step[1] >= gather[0][1]]
    return gather[:1] + inside + gather[1:] + beyond
