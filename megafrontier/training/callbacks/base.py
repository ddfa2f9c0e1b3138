"""What a callback is: something that happens after a step, on every rank alike."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megafrontier.training.step import StepResult
    from megafrontier.training.trainer import Trainer


class Callback:
    """Called in the order of the list before the first step, after each, and at the end of the run.

    Every rank calls the same methods in the same order, so a callback may use collectives.
    """

    def needs_settled_state(self, trainer: "Trainer", step: int) -> bool:
        """Whether it needs the trainer as it is after `step`: then nothing else is begun before
        `after_step` has been called."""
        return False

    def at_start(self, trainer: "Trainer") -> None:
        """The run has taken up its checkpoint; not where it was asked to stop meanwhile."""

    def after_step(self, trainer: "Trainer", result: "StepResult") -> None:
        """A step is done. The next one may have begun: `result` says which it is about."""

    def at_end(self, trainer: "Trainer") -> None:
        """No step follows and every callback has seen the newest one. It need not be the last:
        where the run was asked to stop, `trainer.step` is below `trainer.last_step`."""


def is_due(every: int, step: int) -> bool:
    """Whether something that happens each `every` steps (0: never) happens after `step`."""
    return every > 0 and step % every == 0
