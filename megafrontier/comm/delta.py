"""Weight deltas: publishing the change of weights instead of the weights, over delta wires."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafrontier.comm.wires.wire import Wire, Wires
from megafrontier.common.buffers import Workspace


def delta_levels(wires: Wires, sizes: Sequence[int], start: int, stop: int) -> list[int]:
    """The levels, fastest first, over which a publication from depth `start` to depth `stop` sends
    deltas: from the slowest level inwards, as long as the wires are deltas. Levels of one rank
    are left out."""
    found: list[int] = []
    for level in reversed(range(stop, start)):
        if sizes[level] > 1:
            if not wires.gather[level].is_delta:
                break
            found.insert(0, level)
    return found


@dataclass(frozen=True)
class WeightDelta:
    """The change of a unit's weights since their last publication, as one level sends it.

    `master`: the shard that this rank owns [n], fp32 or in the type of the copies. `base`: this
    rank's copy of the weights of all owners reached so far [owners · n], in the order of their
    messages. `previous_wire`: the wire of the slower level before this one, None for the first
    level.
    """

    master: torch.Tensor
    base: torch.Tensor
    previous_wire: Wire | None
    wire: Wire

    def messages(self, value: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """The messages [rows, m] that this rank sends. `value` is its own shard of the published
        weights [n] on the first level, else the messages [rows, l] of the level before."""
        if self.previous_wire is None:
            return self.wire.encode(self._difference(value, workspace).view(1, -1), workspace)
        if self.previous_wire.codec == self.wire.codec:
            return value
        decoded = workspace.get("change", (len(value), self.master.numel()), torch.float32)
        self.previous_wire.codec.decode(value, decoded)
        return self.wire.encode(decoded, workspace)

    def _difference(self, published: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """fp32 [n]: the master, rounded to the type of the copies, minus `published`."""
        # Unrounded, the part of an fp32 master that copies cannot hold would stay in every
        # difference, and the largest such part of a block would set its scale.
        change = workspace.get("change", published.shape, torch.float32)
        if published.dtype is torch.float32:
            return torch.sub(self.master, published, out=change)
        rounded = workspace.get("rounded", published.shape, published.dtype).copy_(self.master)
        return change.copy_(rounded).sub_(published)

    def apply(self, messages: torch.Tensor) -> torch.Tensor:
        """Add the deltas of all owners' `messages` to `base`, in fp32 with one rounding."""
        self.wire.codec.decode(messages, self.base.view(len(messages), -1), accumulate=True)
        return self.base
