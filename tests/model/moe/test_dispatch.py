"""Experts process tokens in the same way whether this rank has all of a token's experts or some."""

import torch
from torch import nn

from megafrontier.model.moe.dispatch import ABSENT, local_dispatch, run_experts
from megafrontier.model.moe.experts import Experts
from tests.model.moe.shapes import mixture
from tests.model.small_models import small_config

CONFIG = small_config(**mixture(active=3, bias=True))


def outcome(run):
    """The result, and the gradients of tokens, weights and experts with their biases."""
    generator = torch.Generator().manual_seed(1)
    experts = Experts(CONFIG, CONFIG.moe)
    for matrices in experts.parameters():
        nn.init.normal_(matrices, 0, 0.3, generator=generator)
    hidden = torch.randn(20, CONFIG.hidden, generator=generator).requires_grad_()
    weights = torch.rand(20, 3, generator=generator).requires_grad_()
    chosen = torch.rand(20, 8, generator=generator).topk(3).indices
    out = run(hidden, chosen, weights, experts)
    out.square().sum().backward()
    gradients = [parameter.grad for parameter in experts.parameters()]
    return [out.detach(), hidden.grad, weights.grad, *gradients]


def test_rows_with_some_of_their_experts_here_get_the_weighted_sums_of_these():
    def each(hidden, chosen, weights, experts):
        """One pair (token, expert) after another."""
        is_here = chosen < 5
        total = torch.zeros(hidden.shape)
        for token, slot in is_here.nonzero().tolist():
            counts = torch.bincount(chosen[token, slot, None], minlength=8)
            output = experts(hidden[token, None], counts)[0]
            total = total.index_add(0, torch.tensor([token]), (output * weights[token, slot])[None])
        return total

    def some(hidden, chosen, weights, experts):
        here = chosen.where(chosen < 5, ABSENT)
        return run_experts(hidden, here, weights, experts, int((here != ABSENT).sum()))

    for found, expected in zip(outcome(some), outcome(each), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_all_experts_here_are_the_local_case():
    found = outcome(lambda *inputs: run_experts(*inputs, pairs=60))
    local = outcome(lambda *inputs: local_dispatch(*inputs)())
    for values, expected in zip(found, local, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
