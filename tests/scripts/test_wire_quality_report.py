"""How far each loss is from the exact one, as the comparison of wires tells and draws it."""

from pathlib import Path

import pytest
from wire_quality_report import draw, figures, table, training_differences, validation_differences

from megafrontier.report.read import Run


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


def test_a_loss_that_was_not_finite_is_a_dash(exact: Run) -> None:
    broken = make_run(dict.fromkeys(range(1, 41), 4.0), {20: 5.0})
    row = table(figures({"exact": exact, "low": broken})).splitlines()[-1]
    assert row == "| low | 5.0000 | – | – | 4.0000 | +0.00% |"


def test_training_differs_by_the_mean_of_a_stretch_of_the_same_steps(exact: Run, low: Run) -> None:
    steps, differences = training_differences(low, exact)
    assert steps == [1.5 + 2 * i for i in range(20)]
    assert differences == pytest.approx([1.25] * 20)


def test_a_skipped_step_is_left_out_of_both(exact: Run, low: Run) -> None:
    del low.steps[0]
    _, differences = training_differences(low, exact)
    # From here on a stretch ends with an odd step: the same two losses in the other order.
    assert differences == pytest.approx([1.25] * 19)


def test_validation_differs_where_both_were_evaluated(exact: Run, low: Run) -> None:
    del low.evaluations[0]
    steps, differences = validation_differences(low, exact)
    assert steps == [40]
    assert differences == pytest.approx([0.25])


def test_the_picture_is_drawn(exact: Run, low: Run, tmp_path: Path) -> None:
    draw({"exact": exact, "low": low}, tmp_path / "differences.png")
    assert (tmp_path / "differences.png").stat().st_size > 10_000
