"""Skipped steps are reported with their samples, and too many non-finite ones stop the run."""

import math

from megafrontier.launch.main import train
from tests import runs

STEPS = ("machine=laptop", "train.steps=10", "evaluate.batches=0", "train.nonfinite_limit=3")


def test_too_many_non_finite_steps_in_a_row_stop_the_run_also_across_a_restart(
    config_file, tmp_path, multiply_loss, capfd
):
    multiply_loss(math.nan, 64, 80, 96)
    runs.run(config_file, 2, *STEPS, "train.stop_at=6")
    assert train(runs.load(config_file, *STEPS), 2) == 3
    error = capfd.readouterr().err
    assert error == (
        "megafrontier: step 7: the last 3 steps had a non-finite loss or gradient "
        "(train.nonfinite_limit), the newest with samples 96 to 111\n"
    )
    assert runs.metrics(tmp_path / "run")[-1]["step"] == 7


def test_the_search_for_a_loss_scale_does_not_stop_the_run(config_file, tmp_path):
    """From 2^24 it takes more steps than may be non-finite in a row."""
    chosen = ("train.precision=fp16", f"train.loss_scale={2.0**24}", "train.steps=13")
    lines = runs.run(config_file, 1, *STEPS, *chosen)
    skipped = [line for line in lines if line.get("skipped")]
    assert [line["step"] for line in skipped] == list(range(1, len(skipped) + 1))
    assert 3 < len(skipped) < 13
    assert all(0 < line["loss"] < 10 for line in skipped), "the loss is finite"
    log = runs.log(tmp_path / "run")
    assert log.count("gradient too large for fp16, loss scale lowered to") == len(skipped)
    assert "data.skip" not in log, "the samples are not the cause"
