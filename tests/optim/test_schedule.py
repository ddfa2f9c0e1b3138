"""The learning rate at the edges of every schedule."""

from itertools import pairwise

import pytest

from megafrontier.config import OptimizerConfig, ScheduleConfig
from megafrontier.config.optimizer import WeightDecayScheduleConfig
from megafrontier.optim.schedule import learning_rate, weight_decay_factor
from tests import runs

STEPS = 100
PEAK, FLOOR = 1.0, 0.1


def rates(name, warmup=10, floor=FLOOR, decay_fraction=0.2, steps=STEPS, **others):
    schedule = ScheduleConfig(
        name, warmup_steps=warmup, min_lr=floor, decay_fraction=decay_fraction, **others
    )
    return [learning_rate(s, steps, OptimizerConfig(lr=PEAK), schedule) for s in range(STEPS + 5)]


@pytest.mark.parametrize("name", ["cosine", "wsd", "linear", "constant"])
def test_warm_up_climbs_in_equal_steps_to_the_full_rate(name):
    found = rates(name)
    assert found[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert found[10] == pytest.approx(PEAK)
    assert rates(name, warmup=0)[0] == PEAK


@pytest.mark.parametrize("name", ["cosine", "wsd", "linear"])
def test_the_rate_never_rises_after_the_warm_up_and_ends_at_the_minimum(name):
    found = rates(name)[10:]
    assert all(later <= earlier for earlier, later in pairwise(found))
    assert found[STEPS - 10 :] == [FLOOR] * 5
    assert FLOOR < found[STEPS - 11] < FLOOR + 0.06


def test_each_decay_has_its_shape():
    assert rates("cosine")[55] == pytest.approx((PEAK + FLOOR) / 2)
    linear = rates("linear", warmup=0, floor=0.0)
    assert linear[:STEPS] == pytest.approx([1 - step / STEPS for step in range(STEPS)])
    assert set(rates("constant")[10:]) == {PEAK}


def test_wsd_is_flat_and_decays_over_the_last_part_of_all_steps():
    found = rates("wsd", floor=0.0)
    assert set(found[10:81]) == {PEAK}
    assert found[80:STEPS] == pytest.approx([1 - step / 20 for step in range(20)])
    assert set(rates("wsd", decay_fraction=0.0)[10:]) == {PEAK}
    assert rates("wsd", decay_fraction=1.0) == pytest.approx(rates("linear"))


@pytest.mark.parametrize("name", ["cosine", "wsd", "linear"])
def test_the_decay_may_end_before_the_run_or_after_it(name):
    for steps in (STEPS // 2, 2 * STEPS):
        assert rates(name, steps=steps, decay_steps=STEPS) == rates(name)


def test_the_warm_up_may_be_a_fraction_of_the_steps_until_the_decay_ends():
    assert rates("cosine", warmup=0, warmup_fraction=0.1) == rates("cosine", warmup=10)
    found = rates("linear", warmup=0, warmup_fraction=0.13, decay_steps=50)
    assert found == rates("linear", warmup=6, decay_steps=50)


@pytest.mark.parametrize("warmup", [STEPS, STEPS + 1])
def test_a_run_of_warm_up_only_ends_at_the_full_rate(warmup):
    assert rates("cosine", warmup=warmup)[STEPS - 1] == PEAK


def test_by_tokens_the_rate_follows_what_smaller_batches_read():
    """A batch of 1 in the first 50 steps, of 4 afterwards: 250 samples."""
    schedule = ScheduleConfig("linear", warmup_steps=60, by="tokens")
    before = [step if step < 50 else 50 + 4 * (step - 50) for step in range(STEPS + 1)]
    found = [
        learning_rate(s, STEPS, OptimizerConfig(lr=PEAK), schedule, before.__getitem__)
        for s in range(STEPS)
    ]
    warmup = before[60]
    climbing = [before[step + 1] / warmup for step in range(60)]
    assert found[:60] == pytest.approx(climbing)
    falling = [1 - (before[step] - warmup) / (before[STEPS] - warmup) for step in range(60, STEPS)]
    assert found[60:] == pytest.approx(falling)


def factors(start, end, name, **others):
    decay = WeightDecayScheduleConfig(start, end, name)
    schedule = ScheduleConfig(weight_decay=decay)
    return [weight_decay_factor(s, STEPS, schedule, **others) for s in range(STEPS + 5)]


def test_weight_decay_goes_from_its_start_to_its_end_and_stays():
    assert set(factors(1.0, 1.0, "cosine")) == {1.0}
    linear, cosine = factors(0.5, 2.0, "linear"), factors(0.5, 2.0, "cosine")
    for found in (linear, cosine):
        assert found[0] == 0.5
        assert found[STEPS // 2] == pytest.approx(1.25)
        assert found[STEPS:] == [2.0] * 5
    assert linear[20] == pytest.approx(0.8)
    assert cosine[20] == pytest.approx(0.5 + 1.5 * 0.0954915)
    schedule = ScheduleConfig(weight_decay=WeightDecayScheduleConfig(0.0), by="tokens")
    assert weight_decay_factor(5, STEPS, schedule, lambda step: step**2) == pytest.approx(0.0025)


def test_weight_decay_of_all_optimizers_of_a_run_is_scaled(config_file, tmp_path):
    groups = "optimizer.groups=[{match: 'matrix:blocks.*', name: muon, weight_decay: %s}]"

    def run(name, decay, own, *more):
        chosen = (
            f"optimizer.weight_decay={decay}",
            groups % own,
            f"run.directory={tmp_path}/{name}",
        )
        return runs.losses(runs.run(config_file, 1, *runs.ONE, *chosen, "train.steps=4", *more))

    half = [f"schedule.weight_decay.{key}=0.5" for key in ("start", "end")]
    plain = run("plain", 0.5, 1.0)
    assert run("scaled", 1.0, 2.0, *half) == plain
    assert run("other", 1.0, 2.0) != plain
