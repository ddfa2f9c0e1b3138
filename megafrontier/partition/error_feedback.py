"""Error feedback: the quantisation error of a unit's gradient messages, added to its later ones."""

import torch

from megafrontier.partition.comm.collectives import LevelCollectives
from megafrontier.partition.layout import Layout


class ErrorFeedback:
    """The quantisation errors of one rank's gradient messages of one unit.

    `errors`: by level, 1-D bf16, as long as the slice that crosses it; the next message over the
    level carries them. Empty without error feedback.
    """

    def __init__(
        self,
        layout: Layout,
        collectives: LevelCollectives,
        depth: int,
        errors: dict[int, torch.Tensor],
    ) -> None:
        """`depth` is that of the optimizer state."""
        self._layout, self._collectives, self._depth = layout, collectives, depth
        self.errors = errors

    @property
    def error(self) -> torch.Tensor | None:
        """This rank's optimizer shard of the errors, after `fold`; None without any."""
        if not self.errors:
            return None
        first = min(self.errors)
        return self._collectives.local_slice(self.errors[first], first, self._depth)

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply all errors by `factor` []."""
        for error in self.errors.values():
            error.mul_(factor)

    def clear(self) -> None:
        """Forget all errors."""
        for error in self.errors.values():
            error.zero_()

    def fold(self) -> None:
        """Sum each element's errors over all ranks into its owner's `error`.

        What is left then fits one shard, whatever the placement: so checkpoints hold it and any
        number of ranks takes it up. Where the optimizer is replicated the first replica has it.
        """
        totals = [
            self._collectives.reduce_exact(
                error, level, self._depth, f"fold {self._layout.name}"
            ).wait()
            for level, error in self.errors.items()
        ]
        if self.error is None:
            return
        total = torch.stack(totals).sum(0)  # each lay where the errors do
        self.clear()
        if self._collectives.hierarchy.is_first_replica(self._depth):
            self.error.copy_(total)
            own = self._layout.bounds(*self._collectives.hierarchy.shard_index(self._depth))
            self.error[self._layout.padding_within(*own)].zero_()  # checkpoints hold parameters
