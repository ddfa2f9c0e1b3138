"""Python's garbage collector, held to the same steps on all ranks."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


class GarbageCollection(Callback):
    """Collects every so many steps."""

    def __init__(self, every: int) -> None:
        self._every = every

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if is_due(self._every, result.step):
            gc.collect()


@contextmanager
def collect_garbage_every(every: int) -> Iterator[GarbageCollection]:
    """Collect only when the callback says so; with `every` 0 leave it to Python.

    By itself the collector stops each rank at a moment of its own, and all the others wait for
    each. What is there at the start stays for the whole run, and is not looked through again.
    """
    if every:
        gc.collect()
        gc.freeze()
        gc.disable()
    try:
        yield GarbageCollection(every)
    finally:
        if every:
            gc.enable()
            gc.unfreeze()
