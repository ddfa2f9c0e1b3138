"""Ranks that keep the others waiting: name the slow ones, and collect garbage on all at once."""

import gc

import torch

from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


class Stragglers(Callback):
    """Compares the ranks' own time every `log.stragglers_every` steps: a step's time without
    waiting for other ranks. The step's whole time shows nothing, because all ranks wait for the
    slowest and end together.

    A slow rank is named once, and again only after it has recovered.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        self._slow: set[int] = set()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._steps += 1
        self._seconds += result.seconds
        self._waited += result.own_waiting_seconds
        if is_due(trainer.config.log.stragglers_every, result.step):
            self._compare(trainer)
            self._steps, self._seconds, self._waited = 0, 0.0, 0.0

    def _compare(self, trainer: Trainer) -> None:
        mine = torch.tensor([self._seconds, self._waited], dtype=torch.float64) / self._steps
        means = trainer.world.gather(mine.to(trainer.world.device)).cpu()
        own = means[:, 0] - means[:, 1]
        limit = trainer.config.log.straggler * float(own.median())
        slow = set(torch.nonzero(own > limit).flatten().tolist())
        new = sorted(slow - self._slow)
        self._slow = slow
        if new:
            self._report(trainer, new, means)

    def _report(self, trainer: Trainer, slow: list[int], means: torch.Tensor) -> None:
        """`means` [ranks, 2] has seconds and seconds waited of a mean step."""
        rank = trainer.world.rank
        line = None
        if rank in slow:  # only the rank itself knows its host
            step_seconds, waited = means[rank].tolist()
            median = float((means[:, 0] - means[:, 1]).median())
            line = (
                f"warning: slow: rank {rank} on {self._host}: {step_seconds - waited:.3g} s of its "
                f"own in a step of {step_seconds:.3g} s, the median rank {median:.3g} s"
            )
        others = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        trainer.run_logger.info(f"{trainer.world.first_error(line)}{others}")


class GarbageCollection(Callback):
    """Runs Python's garbage collector every `every` steps, on all ranks at once; with 0 leaves it
    to Python.

    The automatic collector would stop each rank at another time, and the other ranks would wait
    each time. Objects that exist at the start are never collected nor examined again.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def at_start(self, trainer: Trainer) -> None:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if is_due(self._every, result.step):
            gc.collect()

    def at_end(self, trainer: Trainer) -> None:
        if self._every:
            gc.enable()
            gc.unfreeze()
