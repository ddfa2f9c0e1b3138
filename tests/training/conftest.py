"""Fixtures of whole training runs."""

import pytest

from megafrontier.model.gpt import GPT
from megafrontier.training import loop
from tests.training.signalling import VARIABLE


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
            out = forward(self, *arguments, **options)
            is_loss = out.dim() == 0  # and not the hidden states of a stage
            return out * factor if is_loss and current[0] in samples else out

        monkeypatch.setattr(loop, "seed_dropout", note)
        monkeypatch.setattr(GPT, "forward", multiplied)

    return choose


@pytest.fixture
def signalled(monkeypatch):
    """The override that sends a signal, given as STEP PROCESS SIGNAL."""

    def choose(what, callback="SignalInStep"):
        monkeypatch.setenv(VARIABLE, what)
        return f"log.callbacks=[tests.training.signalling.{callback}]"

    return choose
