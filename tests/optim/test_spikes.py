"""A step is a spike if its loss or gradient norm exceeds a multiple of the recent median."""

import math
import statistics

import pytest
import torch

from megafrontier.config import TrainConfig
from megafrontier.optim.spikes import SpikeRule


def make_rule(loss_factor=0.0, norm_factor=0.0, window=3) -> SpikeRule:
    config = TrainConfig(spike_loss=loss_factor, spike_grad_norm=norm_factor, spike_window=window)
    return SpikeRule(config, torch.device("cpu"))


def detect(rule, values, norm=1.0, is_bad=0.0):
    def number(value):
        return torch.tensor(value, dtype=torch.float64)

    found = [rule.detect(number(value), number(norm), number(is_bad)) for value in values]
    return [bool(is_spike) for is_spike in found]


def test_nothing_is_a_spike_before_the_window_is_full():
    assert detect(make_rule(1.5), [1, 100, 1, 1, 2]) == [False, False, False, False, True]


def test_loss_and_gradient_norm_have_their_own_factors():
    rule = make_rule(norm_factor=3)
    assert detect(rule, [1, 1, 1, 100]) == [False] * 4
    assert detect(rule, [1], norm=2.9) == [False]
    assert detect(rule, [1], norm=3.1) == [True]
    assert detect(make_rule(), [1, 1, 1, 100]) == [False] * 4


def test_a_loss_that_has_risen_for_good_is_soon_no_longer_a_spike():
    assert detect(make_rule(1.5), [1, 1, 1, 2, 2, 2, 2]) == [False] * 3 + [True] * 2 + [False] * 2


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_the_bound_is_the_factor_times_the_median_of_the_window(window):
    values = [3.0, 9.0, 1.0, 7.0, 5.0, 8.0, 2.0, 6.0][:window]
    for factor, is_spike in ((1.49, True), (1.51, False)):
        rule = make_rule(factor, window=window)
        detect(rule, [100.0, *values])  # the first is out of the window again
        assert detect(rule, [1.5 * statistics.median(values)]) == [is_spike]


def test_a_step_that_is_not_finite_is_no_spike_and_does_not_enter_the_window():
    rule = make_rule(1.5)
    detect(rule, [1, 1])
    assert detect(rule, [math.inf, math.nan], is_bad=1.0) == [False, False]
    assert detect(rule, [1, 2]) == [False, True]


def test_a_resumed_run_with_another_window_takes_the_newest_steps():
    rule = make_rule(1.5, window=3)
    detect(rule, [8, 1, 1, 1])
    shorter, longer = make_rule(1.5, window=2), make_rule(1.5, window=4)
    for other in (shorter, longer):
        other.load_state_dict(rule.state_dict())
    assert detect(shorter, [2]) == [True]
    assert detect(longer, [2, 2]) == [False, True]
