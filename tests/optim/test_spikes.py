"""A step whose loss or gradient is far beyond the usual changes nothing, is told of, and the rule
goes on after a resume as if there had been none."""

import math
import statistics

import pytest
import torch

from megafrontier.config import TrainConfig
from megafrontier.optim.spikes import SpikeRule


def make_rule(loss_factor=0.0, norm_factor=0.0, window=3) -> SpikeRule:
    config = TrainConfig(spike_loss=loss_factor, spike_grad_norm=norm_factor, spike_window=window)
    return SpikeRule(config, torch.device("cpu"))


def judge(rule, values, norm=1.0, is_bad=0.0):
    def number(value):
        return torch.tensor(value, dtype=torch.float64)

    found = [rule.detect(number(value), number(norm), number(is_bad)) for value in values]
    return [bool(verdict) for verdict in found]


def test_nothing_is_a_spike_before_there_is_something_to_compare_with():
    assert judge(make_rule(1.5), [1, 100, 1, 1, 2]) == [False, False, False, False, True]


def test_loss_and_gradient_norm_have_each_their_own_factor():
    rule = make_rule(norm_factor=3)
    assert judge(rule, [1, 1, 1, 100]) == [False] * 4
    assert judge(rule, [1], norm=2.9) == [False]
    assert judge(rule, [1], norm=3.1) == [True]
    assert judge(make_rule(), [1, 1, 1, 100]) == [False] * 4


def test_a_loss_that_has_risen_for_good_is_soon_no_spike_any_more():
    assert judge(make_rule(1.5), [1, 1, 1, 2, 2, 2, 2]) == [False] * 3 + [True] * 2 + [False] * 2


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_the_bound_is_the_factor_times_the_median_of_the_window(window):
    values = [3.0, 9.0, 1.0, 7.0, 5.0, 8.0, 2.0, 6.0][:window]
    for factor, is_spike in ((1.49, True), (1.51, False)):
        rule = make_rule(factor, window=window)
        judge(rule, [100.0, *values])  # the first is out of the window again
        assert judge(rule, [1.5 * statistics.median(values)]) == [is_spike]


def test_a_step_that_is_not_finite_is_no_spike_and_nothing_to_judge_by():
    rule = make_rule(1.5)
    judge(rule, [1, 1])
    assert judge(rule, [math.inf, math.nan], is_bad=1.0) == [False, False]
    assert judge(rule, [1, 2]) == [False, True]


def test_a_window_of_another_length_is_taken_up_by_its_newest_steps():
    """The config of a resumed run may have another; what is missing is waited for."""
    rule = make_rule(1.5, window=3)
    judge(rule, [8, 1, 1, 1])
    shorter, longer = make_rule(1.5, window=2), make_rule(1.5, window=4)
    for other in (shorter, longer):
        other.restore(rule.state())
    assert judge(shorter, [2]) == [True]
    assert judge(longer, [2, 2]) == [False, True]
