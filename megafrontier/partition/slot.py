"""What is on its way over the levels, and in which order two such ways share the lanes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megafrontier.partition.lanes import COMPUTATION, DONE, Ticket

Change = Callable[[torch.Tensor], torch.Tensor]
"""What a crossing, or work beside one, makes of the tensor on its way."""


@dataclass
class Slot:
    """A tensor on its way: each crossing reads it and puts its result in its place.

    `label` says which move of which unit this is, in traces and when ranks disagree.

    Note on memory. A lane of a device has only been given its work when the call returns. What it
    reads and another lane (or the computation) has allocated, torch would hand out again meanwhile;
    so that is kept here until the computation waits for the end. What a lane has allocated itself
    is safe: it is handed out again on that lane alone, behind its reader. So is the result, for
    each lane waits for the computation before it takes up a task.
    """

    value: torch.Tensor
    label: str
    ticket: Ticket = DONE
    _home: int = COMPUTATION
    _kept: list[torch.Tensor] = field(default_factory=list)

    def put(self, value: torch.Tensor, lane: int) -> None:
        """Go on with `value`, which `lane` has made of the one before."""
        if self._home != lane:
            self._kept.append(self.value)
        self.value, self._home = value, lane

    def wait(self) -> torch.Tensor:
        """The tensor at the end of the chain, ready to be used here."""
        self.ticket.wait()
        self.settle()
        return self.value

    def settle(self) -> None:
        """All that was to be done is done: what was read can go."""
        self.ticket = DONE
        self._kept.clear()


Step = tuple[Slot, int, Change]
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
