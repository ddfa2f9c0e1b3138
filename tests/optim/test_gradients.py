"""The global norm over shards is torch's over full tensors; the loss scale follows overflows."""

import math

import pytest
import torch

from megafrontier.optim.gradients import (
    GROWTH_INTERVAL,
    MIN_SCALE,
    LossScale,
    clip_factor,
    global_norm,
    is_scale_overflow,
    square_sum,
)
from tests.ranks import run_ranks

SHAPES = [64, 8, 400]
GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator) * n for n in SHAPES]


def test_the_norm_of_shards_is_torchs_with_the_same_bits_on_all_ranks():
    def body(hierarchy):
        def norm(depth):
            index, num_shards = hierarchy.shard_index(depth)
            shards = [g.chunk(num_shards)[index] for g in gradients()]
            counted = [hierarchy.is_first_replica(depth)] * len(shards)
            return global_norm(shards, counted, hierarchy.world).item()

        return [norm(depth) for depth in (0, 1, 3)]

    norms = run_ranks((2, 2, 2), body)
    assert norms == [norms[0]] * 8
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in SHAPES]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(parameters, 2.5).item()
    assert norms[0] == pytest.approx([expected] * 3, rel=1e-6)
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        factor = clip_factor(torch.tensor(norms[0][0]), 2.5)
        assert torch.allclose(gradient * factor, parameter.grad)


def test_shards_of_different_replication_count_once_each():
    """A shard that all ranks have beside one that only this rank has."""

    def body(hierarchy):
        both = torch.full((5,), 2.0)
        own = torch.full((3,), 1.0 + hierarchy.rank)
        is_first = hierarchy.rank == 0
        return global_norm([own, both], [True, is_first], hierarchy.world).item()

    expected = (3 * 1 + 3 * 4 + 5 * 4) ** 0.5
    assert run_ranks((2,), body) == [pytest.approx(expected)] * 2


def test_the_norm_of_a_long_shard_is_as_exact_as_that_of_its_parts():
    gradient = torch.randn(20_000_001, generator=torch.Generator().manual_seed(0))
    exact = sum(part.double().square().sum().item() for part in gradient.split(1 << 20))
    assert square_sum([gradient], [True]).item() == pytest.approx(exact, rel=1e-6)


def test_one_non_finite_element_on_one_rank_shows_on_all():
    def body(hierarchy):
        bad = torch.full((4,), float("nan") if hierarchy.rank == 1 else 0.0)
        return global_norm([torch.ones(4), bad], [True, True], hierarchy.world).item()

    assert all(norm != norm for norm in run_ranks((2,), body))


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"), [(0.3, 1.0, 1), (0.0, 1.0, 1), (1e9, 0.0, 1), (4.0, 1.0, 0.25)]
)
def test_small_gradients_are_not_clipped_and_a_limit_of_zero_clips_nothing(norm, max_norm, factor):
    assert clip_factor(torch.tensor(norm), max_norm).item() == pytest.approx(factor)


def make(precision, initial):
    return LossScale(precision, initial, torch.device("cpu"))


def test_an_overflow_halves_the_scale_down_to_a_floor():
    scale = make("fp16", 2.0**16)
    assert scale.update(BAD) == 0.5
    assert scale.update(GOOD) == 1
    assert scale.scale == 2.0**15
    assert scale.scaled(torch.tensor(3.0)) == 3 * 2.0**15
    for _ in range(50):
        scale.update(BAD)
    assert scale.scale == MIN_SCALE == 2.0**-24


def test_the_scale_doubles_after_a_number_of_good_steps_in_a_row():
    scale = make("fp16", 8.0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(GOOD)
    scale.update(BAD)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(GOOD)
    assert scale.scale == 4.0
    assert scale.update(GOOD) == 2
    assert scale.scale == 8.0
    assert scale.state_dict()["good_steps"] == 0


@pytest.mark.parametrize(
    ("loss_scale", "loss", "is_overflow"),
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
def test_only_a_scale_that_can_fall_excuses_a_step(loss_scale, loss, is_overflow):
    assert is_scale_overflow(loss_scale, loss) is is_overflow


def test_other_precisions_are_not_scaled():
    for precision in ("bf16", "fp32"):
        scale = make(precision, 2.0**16)
        assert scale.update(BAD) == 1
        assert scale.scale == 1.0
        assert scale.scaled(torch.tensor(3.0)) == 3


def test_a_checkpoint_restores_scale_and_count_of_the_same_precision():
    for initial in (64.0, 1.0):
        saved = make("fp16", initial)
        for _ in range(7):
            saved.update(GOOD)
        again = make("fp16", 2.0**16)
        again.load_state_dict(saved.state_dict())
        assert again.state_dict() == saved.state_dict() == {"scale": initial, "good_steps": 7}
    fp16, bf16 = make("fp16", 2.0**16), make("bf16", 1.0)
    fp16.load_state_dict(bf16.state_dict())
    assert fp16.scale == 2.0**16
    bf16.load_state_dict(fp16.state_dict())
    assert bf16.scale == 1.0
