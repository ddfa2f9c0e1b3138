"""The global norm over shards is torch's over whole tensors, and so is clipping to it."""

import pytest
import torch

from megafrontier.optim.clipping import clip_factor, global_norm, square_sum
from tests.ranks import run_ranks

SHAPES = [64, 8, 400]


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator) * n for n in SHAPES]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_norm_of_shards_is_torchs_norm_of_the_whole_with_the_same_bits_on_all_ranks(depth):
    def body(hierarchy):
        number, pieces = hierarchy.shard_index(depth)
        return global_norm([g.chunk(pieces)[number] for g in gradients()], hierarchy, depth).item()

    norms = run_ranks((2, 2, 2), body)
    assert set(norms) == {norms[0]}
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in SHAPES]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(parameters, 2.5).item()
    assert norms[0] == pytest.approx(expected, rel=1e-6)
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        assert torch.allclose(gradient * clip_factor(torch.tensor(norms[0]), 2.5), parameter.grad)


def test_the_norm_of_a_long_shard_is_as_exact_as_that_of_its_parts():
    gradient = torch.randn(20_000_001, generator=torch.Generator().manual_seed(0))
    exact = sum(part.double().square().sum().item() for part in gradient.split(1 << 20))
    assert square_sum([gradient]).item() == pytest.approx(exact, rel=1e-6)


def test_one_non_finite_element_on_one_rank_shows_on_all():
    def body(hierarchy):
        bad = torch.full((4,), float("nan") if hierarchy.rank == 1 else 0.0)
        return global_norm([torch.ones(4), bad], hierarchy, 1).item()

    assert all(norm != norm for norm in run_ranks((2,), body))


def test_small_gradients_are_left_alone_and_zero_does_not_clip():
    def factor(norm, largest):
        return clip_factor(torch.tensor(norm), largest).item()

    assert factor(0.3, 1.0) == 1.0
    assert factor(0.0, 1.0) == 1.0
    assert factor(1e9, 0.0) == 1.0
    assert factor(4.0, 1.0) == pytest.approx(0.25)
