"""Error feedback: the quantisation error of a unit's gradient messages, added to its later ones."""

from collections.abc import Iterable

import torch

from megafrontier.partition.layout import Layout
from megafrontier.partition.moves import Moves


class Feedback:
    """The quantisation errors of one rank's gradient messages of one unit.

    `errors`: by level, 1-D bf16, as long as the slice that crosses it; the next message over the
    level carries them. Empty without error feedback.
    """

    def __init__(
        self,
        layout: Layout,
        moves: Moves,
        depth: int,
        levels: Iterable[int],
        device: torch.device,
    ) -> None:
        """`depth` is that of the optimizer state, `levels` are those that may leave errors."""
        self._layout, self._moves, self._depth = layout, moves, depth
        self._number, self._pieces = moves.hierarchy.piece(depth)
        self.errors = {
            level: torch.zeros(
                layout.numel // moves.hierarchy.piece(level)[1], dtype=torch.bfloat16, device=device
            )
            for level in levels
            if moves.may_leave_errors(level)
        }

    @property
    def error(self) -> torch.Tensor | None:
        """This rank's optimizer shard of the errors, after `fold`; None without any."""
        if not self.errors:
            return None
        first = min(self.errors)
        return self._moves.inside(self.errors[first], first, self._depth)

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
            self._moves.reduce_exactly(
                error, level, self._depth, f"fold {self._layout.name}"
            ).wait()
            for level, error in self.errors.items()
        ]
        self.clear()
        if self.error is not None and self._moves.hierarchy.is_first_replica(self._depth):
            self.error.copy_(torch.stack(totals).sum(0))
            # Checkpoints hold parameters only.
            self.error[self._layout.padding_in(self._number, self._pieces)].zero_()
