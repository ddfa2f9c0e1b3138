"""Dynamic loss scaling: halve at an overflow, double after many good steps, never below 1."""

from megafrontier.optim.loss_scale import GROWTH_INTERVAL, LossScale


def test_an_overflow_halves_and_a_good_step_keeps():
    scale = LossScale.create("fp16", 2.0**16)
    scale.update(finite=False)
    assert scale.scale == 2.0**15
    scale.update(finite=True)
    assert scale.scale == 2.0**15


def test_it_doubles_after_exactly_so_many_good_steps_in_a_row():
    scale = LossScale.create("fp16", 8.0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(finite=True)
    assert scale.scale == 8.0
    scale.update(finite=False)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(finite=True)
    assert scale.scale == 4.0
    scale.update(finite=True)
    assert scale.scale == 8.0
    assert scale.good_steps == 0


def test_it_never_falls_below_one():
    scale = LossScale.create("fp16", 2.0)
    for _ in range(5):
        scale.update(finite=False)
    assert scale.scale == 1.0


def test_other_precisions_are_not_scaled():
    for precision in ("bf16", "fp32"):
        scale = LossScale.create(precision, 2.0**16)
        scale.update(finite=False)
        assert scale.scale == 1.0


def test_a_checkpoint_brings_back_scale_and_count_even_at_one():
    for first in (64.0, 1.0):
        saved = LossScale.create("fp16", first)
        for _ in range(7):
            saved.update(finite=True)
        again = LossScale.create("fp16", 2.0**16)
        again.restore(saved.state())
        assert again == saved


def test_another_precision_than_the_checkpoints_starts_afresh():
    fp16 = LossScale.create("fp16", 2.0**16)
    fp16.restore(LossScale.create("bf16", 1.0).state())
    assert fp16.scale == 2.0**16
    bf16 = LossScale.create("bf16", 1.0)
    bf16.restore(fp16.state())
    assert bf16.scale == 1.0
