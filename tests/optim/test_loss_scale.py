"""Dynamic loss scaling: halve at an overflow, double after many good steps, never below a floor."""

import math

import pytest
import torch

from megafrontier.optim.loss_scale import GROWTH_INTERVAL, MIN_SCALE, LossScale, is_scale_overflow

GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)


def make(precision, first):
    return LossScale(precision, first, torch.device("cpu"))


def test_an_overflow_halves_and_a_good_step_keeps():
    scale = make("fp16", 2.0**16)
    scale.update(BAD)
    assert scale.scale == 2.0**15
    scale.update(GOOD)
    assert scale.scale == 2.0**15
    assert scale.scaled(torch.tensor(3.0)) == 3 * 2.0**15


def test_it_doubles_after_exactly_so_many_good_steps_in_a_row():
    scale = make("fp16", 8.0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(GOOD)
    assert scale.scale == 8.0
    scale.update(BAD)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(GOOD)
    assert scale.scale == 4.0
    scale.update(GOOD)
    assert scale.scale == 8.0
    assert scale.state()["good_steps"] == 0


def test_it_falls_far_below_one_for_sums_over_many_tokens_but_has_a_floor():
    scale = make("fp16", 2.0)
    for _ in range(50):
        scale.update(BAD)
    assert scale.scale == MIN_SCALE == 2.0**-24


@pytest.mark.parametrize(
    ("loss_scale", "loss", "asks"),
    [
        (2.0**15, 3.0, True),
        (MIN_SCALE, 3.0, False),
        (0.0, 3.0, False),
        (math.inf, 3.0, False),
        (math.nan, 3.0, False),
        (2.0**15, math.inf, False),
        (2.0**15, None, False),
    ],
)
def test_only_a_scale_that_can_fall_excuses_a_step(loss_scale, loss, asks):
    assert is_scale_overflow(loss_scale, loss) is asks


def test_other_precisions_are_not_scaled():
    for precision in ("bf16", "fp32"):
        scale = make(precision, 2.0**16)
        scale.update(BAD)
        assert scale.scale == 1.0
        assert scale.scaled(torch.tensor(3.0)) == 3


def test_a_checkpoint_brings_back_scale_and_count_even_at_one():
    for first in (64.0, 1.0):
        saved = make("fp16", first)
        for _ in range(7):
            saved.update(GOOD)
        again = make("fp16", 2.0**16)
        again.restore(saved.state())
        assert again.state() == saved.state() == {"scale": first, "good_steps": 7}


def test_another_precision_than_the_checkpoints_starts_afresh():
    fp16 = make("fp16", 2.0**16)
    fp16.restore(make("bf16", 1.0).state())
    assert fp16.scale == 2.0**16
    bf16 = make("bf16", 1.0)
    bf16.restore(fp16.state())
    assert bf16.scale == 1.0
