"""The engine's cost is measured beside a plain loop that learns the same."""

from pathlib import Path

import pytest

from megafrontier.launch.context import join_machine
from megafrontier.training.loop import train_step
from megafrontier.training.trainer import build_trainer
from scripts.benchmarks.one_device import one_rank
from tests import runs


@pytest.fixture
def trainer(tmp_path: Path):
    config = runs.load(runs.make_config_file(tmp_path), *runs.ONE, "train.micro_batch=8")
    with join_machine(config) as (plan, mesh):
        trainer = build_trainer(config, plan, mesh)
        yield trainer
        trainer.close()


def test_the_plain_loop_learns_what_the_engine_does(trainer) -> None:
    plain = one_rank.Plain(trainer)
    losses = [(train_step(trainer).loss, plain.step()) for _ in range(4)]
    plain.close()
    assert losses[-1][0] < losses[0][0] - 0.1, "it must have learned something"
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_loop_that_learns_something_else_is_not_compared(trainer, monkeypatch) -> None:
    monkeypatch.setattr(one_rank.Plain, "step", lambda self: 1.0)
    with pytest.raises(RuntimeError, match=r"step 0: losses 5\.\d+ and 1\.0000"):
        one_rank.compare(trainer, pairs=2)
