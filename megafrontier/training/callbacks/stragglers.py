"""Ranks that keep the others waiting: name the slow ones, and collect garbage on all at once."""

import gc
from statistics import median_low

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
        self._steps, self._own_seconds = 0, 0.0
        self._slow: set[int] = set()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._steps += 1
        self._own_seconds += result.seconds - result.own_waiting_seconds
        if is_due(trainer.config.log.stragglers_every, result.step):
            self._compare(trainer)
            self._steps, self._own_seconds = 0, 0.0

    def _compare(self, trainer: Trainer) -> None:
        world = trainer.world
        mine = torch.tensor([self._own_seconds / self._steps], dtype=torch.float64)
        own = world.gather(mine.to(world.device)).flatten().tolist()
        middle = median_low(own)
        slow = {rank for rank, s in enumerate(own) if s > trainer.config.log.straggler * middle}
        new = slow - self._slow
        self._slow = slow
        if not new:
            return
        line = None
        if world.rank in new:  # only the rank itself knows its host
            line = (
                f"warning: slow: rank {world.rank} on {self._host}: {own[world.rank]:.3g} s of its "
                f"own a step, the median rank {middle:.3g} s"
            )
        others = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
        trainer.run_logger.info(f"{world.first_error(line)}{others}")


class GarbageCollection(Callback):
    """Runs Python's garbage collector every `every` steps, on all ranks at once; with 0 leaves it
    to Python.

    The automatic collector would stop each rank at another time, and the other ranks would wait
    each time. With `freezes`, objects that exist at the start are never collected nor examined
    again, also if the process begins another run.
    """

    def __init__(self, every: int, freezes: bool = True) -> None:
        self._every, self._freezes = every, freezes

    def at_start(self, trainer: Trainer) -> None:
        if self._every:
            gc.collect()
            if self._freezes:
                gc.freeze()
            gc.disable()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if is_due(self._every, result.step):
            gc.collect()

    def at_end(self, trainer: Trainer) -> None:
        if self._every:
            gc.enable()
            if self._freezes:
                gc.unfreeze()
