"""Error feedback: the quantisation errors of gradient messages, added to later messages."""

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.partition.layout import Layout


class ErrorFeedback:
    """The quantisation errors of this rank's gradient messages of one unit.

    errors: by level, 1-D bf16, as long as the slice that is reduced over the level. The next
        message over the level includes them. Empty without error feedback.
    """

    def __init__(
        self,
        layout: Layout,
        collectives: LevelCollectives,
        depth: int,
        errors: dict[int, torch.Tensor],
    ) -> None:
        """`depth`: that of the optimizer state."""
        self._layout, self._collectives, self._depth = layout, collectives, depth
        self.errors = errors

    @property
    def error(self) -> torch.Tensor | None:
        """This rank's optimizer shard of the errors, complete after `fold`; None without errors."""
        if not self.errors:
            return None
        first = min(self.errors)
        return self._collectives.local_slice(self.errors[first], first, self._depth)

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply all errors by `factor` []."""
        for error in self.errors.values():
            error.mul_(factor)

    def clear(self) -> None:
        """Set all errors to zero."""
        for error in self.errors.values():
            error.zero_()

    def fold(self) -> None:
        """Sum each element's errors over all ranks into its owner's `error`.

        The errors then fit one optimizer shard whatever the placement, so a checkpoint can hold
        them for any number of ranks. If the optimizer is replicated, the first replica has them.
        """
        label, depth = f"fold {self._layout.name}", self._depth
        totals = [
            self._collectives.reduce_exact(error, level, depth, label).wait()
            for level, error in self.errors.items()
        ]
        if self.error is None:
            return
        total = torch.stack(totals).sum(0)  # a copy, because the totals lie in the errors' memory
        self.clear()
        hierarchy = self._collectives.hierarchy
        if hierarchy.is_first_replica(depth):
            self.error.copy_(total)
            own = self._layout.bounds(*hierarchy.shard_index(depth))
            self.error[self._layout.padding_within(*own)].zero_()  # checkpoints have no padding
