"""A step whose loss or gradient is far beyond the usual changes nothing, is told of, and the rule
goes on after a resume as if there had been none."""

import math
import statistics

import pytest
import torch

from megafrontier.config import TrainConfig
from megafrontier.model.gpt import GPT
from megafrontier.optim.spikes import SpikeRule
from megafrontier.training import loop
from tests import runs

CHOSEN = ("train.steps=12", "evaluate.batches=0", "machine=laptop", "train.spike_window=4")


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


@pytest.fixture
def spike(monkeypatch):
    """Make the loss of the micro-batches that begin with these samples a hundred times as large."""
    forward = GPT.forward
    current = []

    def choose(*samples):
        def note(_seed, batch):
            current[:] = [batch.first_sample]

        def spiked(self, *arguments):
            loss = forward(self, *arguments)
            return loss * 100 if current[0] in samples else loss

        monkeypatch.setattr(loop, "seed_dropout", note)
        monkeypatch.setattr(GPT, "forward", spiked)

    return choose


def test_a_spike_is_skipped_and_logged_as_data_skip_takes_it(config_file, tmp_path, spike):
    spike(6 * 16 + 9)  # in the seventh step, on one rank
    lines = runs.run(config_file, 2, *CHOSEN, "train.spike_loss=2")
    skipped = [line for line in lines if line.get("skipped")]
    assert [(line["step"], line["samples"], line["spike"]) for line in skipped] == [
        (7, [96, 112], True)
    ]
    assert skipped[0]["loss"] > 5 * lines[5]["loss"]
    log = runs.log(tmp_path / "run")
    assert "skipped: spike in loss or gradient" in log
    assert "step 7 changed no weight; it read samples 96 to 111, which data.skip=[[6,7]] " in log
    without = runs.run(
        config_file, 2, *CHOSEN, f"run.directory={tmp_path}/without", "data.skip=[[6,7]]"
    )
    # Left out, the later steps move up by one; nothing else differs but the schedule's step.
    assert runs.losses(without)[:7] == [
        pytest.approx(loss) for loss in runs.losses(lines)[:6] + runs.losses(lines)[7:8]
    ]


def test_the_rule_judges_after_a_resume_as_if_there_had_been_none(config_file, tmp_path, spike):
    spike(8 * 16 + 3)
    chosen = (*CHOSEN, "train.spike_grad_norm=3")
    unbroken = runs.run(config_file, 2, *chosen, f"run.directory={tmp_path}/unbroken")
    assert [line["step"] for line in unbroken if line.get("skipped")] == [9]
    runs.run(config_file, 2, *chosen, "train.stop_at=7")
    resumed = runs.run(config_file, 2, *chosen)
    assert runs.losses(resumed) == runs.losses(unbroken)
    assert [line["step"] for line in resumed if line.get("skipped")] == [9]
