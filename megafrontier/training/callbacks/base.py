"""Callbacks: what happens around the steps of a run, in the same way on every rank."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from megafrontier.common.errors import UserError
from megafrontier.training.step import StepResult, StepStats
from megafrontier.training.trainer import Trainer


class Callback:
    """Base class of all callbacks. The configuration adds users' classes, by `log.callbacks`.

    Every rank calls the same methods in the same order, so a callback may use collectives, except
    in `on_error`. `trainer.metrics.record(name, value, reduce)` adds a metric to the step's line in
    metrics.jsonl, `trainer.run_logger.info(line)` a line to log.txt.
    """

    priority: int = 0
    """Callbacks of higher priority are called first. Those of 0 that the configuration names come
    after metrics have been written and before checkpoint and evaluation."""
    between_steps: str = "other"
    """What its time between steps counts as (`training.goodput.BETWEEN`)."""

    def at_start(self, trainer: Trainer) -> None:
        """The run has resumed from its checkpoint. Not called if it was asked to stop before."""

    def before_step(self, trainer: Trainer) -> None:
        """A step begins. `trainer.step` steps came before it."""

    def before_optimizer(self, trainer: Trainer, gradients: Sequence[torch.Tensor]) -> None:
        """The gradients are complete, before their norm is computed.

        `gradients` are this rank's 1-D fp32 shards, one for each of `trainer.engine.units`, summed
        over all ranks and tokens, times the loss scale. They may be changed in place. Those of
        offloaded units are in host memory.
        """

    def after_optimizer(self, trainer: Trainer, stats: StepStats) -> None:
        """The masters are updated, and are published to the weights of all ranks after this. They
        may be changed in place."""

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        """Whether `after_step` of this step needs the trainer as the step left it. If so, the next
        step begins only after that."""
        return False

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """A step is done. The next one may have begun: `result.step` is the number of this one."""

    def on_checkpoint_saved(self, trainer: Trainer, path: Path) -> None:
        """A checkpoint is complete, in the folder `path`. With `checkpoint.asynchronous` it may be
        of an earlier step."""

    def at_end(self, trainer: Trainer) -> None:
        """No step follows, and `after_step` has been called for every step.

        If the run was asked to stop, `trainer.step` is less than `trainer.last_step`.
        """

    def on_error(self, trainer: Trainer, error: Exception) -> None:
        """The run ends with an error, perhaps on this rank alone: use no collective."""

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep of this callback, as values that JSON can express. It is the same
        on every rank, because only the first rank's is kept."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the `state_dict` of a checkpoint, if that has one. Called before
        `at_start`."""


def load_class(name: str) -> type[Callback]:
    """The class of a name such as `package.module.Class`. Raises UserError."""
    module_name, _, class_name = name.rpartition(".")
    need = "need package.Class of an importable package"
    try:
        found = getattr(import_module(module_name), class_name)
    except Exception as error:  # a module of the user's may raise anything
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"log.callbacks: {name}, {need} ({why})") from error
    if not (isinstance(found, type) and issubclass(found, Callback)):
        base = f"{Callback.__module__}.{Callback.__name__}"
        raise UserError(f"log.callbacks: {name}, need a subclass of {base}")
    return found


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step`."""
    return every > 0 and step % every == 0
