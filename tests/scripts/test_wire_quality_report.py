"""How far each loss is from the exact one, as the comparison of wires tells and draws it."""

from pathlib import Path

import pytest

from megafrontier.report.read import Run
from scripts.benchmarks.wire_quality.report import (
    figures,
    table,
    training_differences,
)


def make_run(losses: dict[int, float], validation: dict[int, float]) -> Run:
    steps = [{"step": step, "loss": loss} for step, loss in losses.items()]
    return Run("", Path(), None, steps, list(validation.items()))


@pytest.fixture
def exact() -> Run:
    return make_run(dict.fromkeys(range(1, 41), 4.0), {20: 5.0, 40: 4.0})


@pytest.fixture
def low() -> Run:
    losses = {step: 4.1 if step % 2 else 4.0 for step in range(1, 41)}
    return make_run(losses, {20: 5.1, 40: 4.01})


def test_the_table_has_every_evaluation_and_the_last_quarter_of_training(
    exact: Run, low: Run
) -> None:
    found = figures({"exact": exact, "low": low})
    assert found["low"]["training"] == pytest.approx(4.05)
    assert table(found).splitlines() == [
        "| wires | 20 steps | 40 steps | against exact | training |  |",
        "|---|---:|---:|---:|---:|---:|",
        "| exact | 5.0000 | 4.0000 | +0.00% | 4.0000 | +0.00% |",
        "| low | 5.1000 | 4.0100 | +0.25% | 4.0500 | +1.25% |",
    ]


def test_training_differs_by_the_mean_of_a_stretch_of_the_same_steps(exact: Run, low: Run) -> None:
    steps, differences = training_differences(low, exact)
    assert steps == [1.5 + 2 * i for i in range(20)]
    assert differences == pytest.approx([1.25] * 20)
