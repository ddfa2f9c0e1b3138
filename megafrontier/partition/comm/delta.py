"""Changes of published weights: what delta wires say of them, and to what it is added."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafrontier.common.buffers import Workspace
from megafrontier.partition.wires.wire import Wire, Wires


def levels_of_changes(wires: Wires, sizes: Sequence[int], start: int, stop: int) -> list[int]:
    """Of the levels over which weights are published, from `start` - 1 in to `stop`, those over
    which they go as changes, fastest first: from the slowest on, as long as the wires are deltas.
    Those of one rank are not crossed."""
    found: list[int] = []
    for level in reversed(range(stop, start)):
        if sizes[level] > 1:
            if not wires.gather[level].is_delta:
                break
            found.insert(0, level)
    return found


@dataclass(frozen=True)
class Change:
    """The change of a unit's weights since they were last published, as it is sent over one level.

    `master`: the fp32 shard that this rank owns [n]. `reached`: this rank's copy of the weights
    that the levels crossed so far cover [owners · n], in the owners' order, as their messages are.
    `came_by`: the wire of the level before, None at the first one.
    """

    master: torch.Tensor
    reached: torch.Tensor
    came_by: Wire | None
    wire: Wire

    def messages(self, value: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """What this rank sends [rows, m]: of `value`, its own part of the weights as they were
        published, or the messages [rows, l] that came over the level before."""
        if self.came_by is None:
            return self.wire.encode(self._difference(value, workspace).view(1, -1), workspace)
        if self.came_by.codec == self.wire.codec:
            return value
        said = workspace.get("change", (len(value), self.master.numel()), torch.float32)
        self.came_by.codec.decode(value, said)
        return self.wire.encode(said, workspace)

    def _difference(self, published: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """fp32 [n], to what the copies can hold: the rest of a master in fp32 would stay in every
        difference, and the largest rest of a block would set its scale."""
        change = workspace.get("change", published.shape, torch.float32)
        if published.dtype is torch.float32:
            return torch.sub(self.master, published, out=change)
        rounded = workspace.get("rounded", published.shape, published.dtype).copy_(self.master)
        return change.copy_(rounded).sub_(published)

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        """The weights reached, with what all owners' `messages` say, in fp32 and rounded once."""
        self.wire.add(messages, self.reached.view(len(messages), -1))
        return self.reached
