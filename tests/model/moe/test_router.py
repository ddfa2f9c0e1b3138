"""The router's choice and losses beside their formulas, and the products of experts beside a loop
over tokens."""

from dataclasses import replace

import pytest
import torch

from megafrontier.config import MoEConfig
from megafrontier.config.model.moe import ExpertGroupsConfig
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.moe.experts import Experts
from megafrontier.model.moe.layer import MoE
from megafrontier.model.moe.products import grouped_product, loop_product, padded_product
from megafrontier.model.moe.router import Router
from tests.model.moe.shapes import LOSS, SHARED, mixture
from tests.model.small_models import PREDICTION, small_config

TOKENS = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))


def make(kind, seed=0, **changes):
    """A Router, Experts or MoE with random weights."""
    config = small_config(**mixture(**changes))
    module = kind(config, config.moe)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(seed))
    return module


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_experts_are_chosen_by_score_and_bias_and_weighted_by_score_alone(kind, normalise):
    router = make(Router, router=kind, normalise=normalise, active=3, scale=2.0)
    router.bias.copy_(torch.linspace(-0.4, 0.4, 8))
    chosen, weights = router(TOKENS)
    logits = TOKENS @ router.weight.t()
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
    for token in range(len(TOKENS)):
        best = sorted(range(8), key=lambda i: -(scores[token, i] + router.bias[i]))[:3]
        assert chosen[token].tolist() == best
        own = scores[token, best]
        torch.testing.assert_close(weights[token], 2 * own / (own.sum() if normalise else 1.0))


def test_a_tokens_experts_come_from_the_groups_with_the_best_two_experts():
    router = make(Router, experts=8, active=3, groups=ExpertGroupsConfig(4, 2), balance="none")
    chosen, _ = router(TOKENS)
    scores = (TOKENS @ router.weight.t()).softmax(-1).view(-1, 4, 2)
    best = scores.sum(-1).topk(2).indices
    for token, experts in enumerate(chosen):
        assert {int(expert) // 2 for expert in experts} <= set(best[token].tolist())


def test_losses_of_the_router_have_the_gradients_of_their_formulas():
    router = make(Router, balance="loss", loss_coefficient=0.3, z_loss=0.2)
    router.load.copy_(torch.linspace(0, 0.25, 8))
    router.loss_scale = torch.tensor(4.0)
    _, weights = router(TOKENS)
    weights.sum().backward()
    found, router.weight.grad = router.weight.grad, None
    logits = TOKENS @ router.weight.t()
    probabilities = logits.softmax(-1)
    best, _ = probabilities.topk(2)
    balance = 0.3 * 8 * (probabilities * router.load).sum()
    z_loss = 0.2 * logits.exp().sum(-1).log().square().sum()
    ((best / best.sum(-1, keepdim=True)).sum() + 4 * balance + 4 * z_loss).backward()
    torch.testing.assert_close(found, router.weight.grad, rtol=1e-4, atol=1e-4)


def test_tokens_that_do_not_count_are_in_no_loss_and_no_statistic():
    router = make(Router, balance="loss", loss_coefficient=0.3, z_loss=0.2)
    router.load.copy_(torch.linspace(0, 0.25, 8))
    counted = torch.arange(len(TOKENS)) % 3 > 0
    found = []
    for tokens, mask in ((TOKENS, counted), (TOKENS[counted], None)):
        _, weights = router(tokens, mask)
        (0 * weights).sum().backward()
        found.append((router.weight.grad.clone(), *router.statistics.take()))
        router.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert found[0][1].sum() == 2 * counted.sum()


PADDING = torch.arange(24) >= torch.tensor([24, 20, 24, 9])[:, None]


@pytest.mark.parametrize(
    ("starts", "padding", "followed"),
    [([0], None, 4 * 23), ([0, 9, 20], PADDING, 21 + 18 + 21 + 8)],
    ids=["rows", "documents and padding"],
)
def test_what_follows_the_last_token_of_a_row_or_document_changes_nothing(
    starts, padding, followed
):
    """Each row is a micro-batch, then all rows are one: a last token is followed by another one."""
    model = GPT(small_config(**LOSS | PREDICTION))
    initialise(model, 1)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.load.copy_(torch.linspace(0, 0.25, 8))
    rows = torch.randint(50, (4, 24), generator=torch.Generator().manual_seed(2))
    targets = rows.roll(-1, 1).masked_fill(rows % 10 > 0, -100)
    found = []
    for size in (1, 4):
        for part in torch.arange(4).split(size):
            bounds = [24 * row + start for row in range(size) for start in starts]
            documents = torch.tensor([*bounds, 24 * size], dtype=torch.int32)
            hidden = None if padding is None else padding[part]
            model(rows[part], targets[part], documents, padding=hidden).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        found.append((gradients, [router.statistics.take() for router in routers]))
        model.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert found[0][1][-1][0].sum() == 2 * followed


def test_a_mixture_is_the_weighted_sum_of_its_experts():
    layer = make(MoE, shared_experts=1, shared_gate=True)
    chosen, weights = layer.router(TOKENS)
    out = layer(TOKENS[None])[0]
    for token, row in enumerate(TOKENS):
        total = layer.shared(row[None])[0] * (row @ layer.shared_gate[0]).sigmoid()
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate, up = (layer.experts.up[expert] @ row).chunk(2)
            gated = torch.nn.functional.silu(gate) * up
            total = total + weight * (layer.experts.down[expert] @ gated)
        torch.testing.assert_close(out[token], total, rtol=1e-4, atol=1e-4)


COUNTS = {
    "equal": [5] * 8,
    "some empty": [0, 7, 0, 9, 4, 6, 8, 6],
    "one has all": [0, 0, 40] + [0] * 5,
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("product", [padded_product, grouped_product])
def test_each_product_and_its_gradients_equal_the_loop(product, counts):
    experts = make(Experts)
    found = []
    for each in (loop_product, product):
        tokens = TOKENS.clone().requires_grad_()
        out = each(tokens, torch.tensor(counts), experts.mlps)
        grads = torch.autograd.grad(out.square().sum(), (tokens, experts.up, experts.down))
        found.append((out, *grads))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_experts_without_tokens_get_gradients_of_zero():
    layer = make(MoE, experts=8, active=1, balance="none")
    layer(TOKENS[:2][None]).sum().backward()
    norms = layer.experts.up.grad.flatten(1).norm(dim=1)
    assert ((norms == 0).sum(), len(norms)) == (6, 8)


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_tokens_that_backward_recomputes_are_counted_once(mode):
    config = small_config(**LOSS)
    grads = []
    for checkpointing in ("none", mode):
        model = GPT(config, checkpointing=checkpointing)
        initialise(model, 1)
        tokens = torch.arange(48).view(2, 24)
        model(tokens, tokens).backward()
        grads.append([p.grad for p in model.parameters()])
        counts, _ = model.blocks[0].mlp.router.statistics.take()
        assert counts.sum() == 2 * 24 * 2
        with torch.no_grad():
            model(tokens, tokens)
        assert model.blocks[0].mlp.router.statistics.take() == (None, None)
    torch.testing.assert_close(grads[1], grads[0])


def test_only_the_last_of_every_so_many_blocks_has_experts():
    model = GPT(replace(small_config(**SHARED), layers=4))
    assert [isinstance(block.mlp, MoE) for block in model.blocks] == [False, True, False, True]
    later = replace(SHARED["moe"], first=1)
    model = GPT(replace(small_config(**SHARED | {"moe": later}), layers=5))
    assert [isinstance(b.mlp, MoE) for b in model.blocks] == [False, False, True, False, True]
    assert later.blocks(5) == 2


def test_flops_count_the_active_experts():
    from megafrontier.model.flops import flops_per_token

    config = small_config(**mixture(experts=8, active=2))
    dense = replace(config, moe=None, ffn_hidden=2 * 24)
    router = 2 * 8 * 32  # of both blocks
    assert flops_per_token(config) == flops_per_token(dense) + 6 * router
    assert flops_per_token(replace(config, moe=MoEConfig(16, 2, 24))) == (
        flops_per_token(dense) + 6 * 2 * router
    )
