"""Fixtures of whole training runs."""

import pytest

from megafrontier.model.gpt import GPT
from megafrontier.training import loop


@pytest.fixture
def multiply_loss(monkeypatch):
    """Multiply the loss of the micro-batches that begin with some samples by a factor. Only one
    rank has each of these micro-batches."""
    forward = GPT.forward
    current = []

    def choose(factor, *samples):
        def note(_seed, batch, *_place):
            current[:] = [batch.first_sample]

        def multiplied(self, *arguments, **options):
            loss = forward(self, *arguments, **options)
            return loss * factor if current[0] in samples else loss

        monkeypatch.setattr(loop, "seed_dropout", note)
        monkeypatch.setattr(GPT, "forward", multiplied)

    return choose
