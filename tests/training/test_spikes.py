"""A step whose loss or gradient is far beyond the usual changes nothing, is told of, and the rule
goes on after a resume as if there had been none."""

import pytest

from megafrontier.model.gpt import GPT
from megafrontier.training import loop
from megafrontier.training.spikes import SpikeRule
from tests.training import runs

CHOSEN = ("train.steps=12", "evaluate.batches=0", "machine=laptop", "train.spike_window=4")


def make_rule(loss_factor=0.0, norm_factor=0.0, window=3) -> SpikeRule:
    rule = SpikeRule.create(runs.Config().train)
    rule.loss_factor, rule.norm_factor = loss_factor, norm_factor
    rule.losses, rule.norms = (type(rule.losses)(maxlen=window) for _ in range(2))
    return rule


def judge(rule, values, norm=1.0):
    return [rule.judge(value, norm) for value in values]


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


@pytest.fixture
def config_file(tmp_path):
    return runs.make_config_file(tmp_path)


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
    log = (tmp_path / "run" / "log.txt").read_text()
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
