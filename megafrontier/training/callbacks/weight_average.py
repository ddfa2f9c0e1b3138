"""The average of a run's newest weights, to be evaluated without a checkpoint."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from megafrontier.partition import Engine


class WeightAverage:
    """The mean of the masters at the newest `count` evaluations, `evaluate.average`.

    Each rank keeps copies of its own shards in host memory, 4 bytes an element and copy. They are
    not in checkpoints: a run that resumes begins without copies.
    """

    def __init__(self, count: int) -> None:
        self._copies: deque[list[torch.Tensor]] = deque(maxlen=count)

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, engine: Engine) -> None:
        """Copy the masters, which no update may be writing."""
        masters = [unit.master for unit in engine.trained_units]
        self._copies.append([master.to("cpu", copy=True) for master in masters])

    @contextmanager
    def applied(self, engine: Engine) -> Iterator[None]:
        """The model computes with the mean of the copies, and afterwards with the same bits as
        before. The newest copy must be of the present masters."""
        # Weights that were sent as changes are not a function of the masters.
        has_deltas = engine.have_deltas
        published = [unit.published.clone() for unit in engine.units] if has_deltas else []
        _fill(engine, (torch.stack(each).mean(0) for each in zip(*self._copies, strict=True)))
        engine.restore(has_published=False)
        try:
            yield
        finally:
            _fill(engine, self._copies[-1])
            for unit, weights in zip(engine.units, published, strict=False):
                unit.published.copy_(weights)
            engine.restore(has_published=has_deltas)


def _fill(engine: Engine, values: Iterable[torch.Tensor]) -> None:
    for unit, value in zip(engine.trained_units, values, strict=True):
        unit.master.copy_(value)
