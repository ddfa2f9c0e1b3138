"""Expert parallelism gives one process's losses, norms and gradients."""

import pytest
import torch

from megafrontier.config.model.moe import ExpertGroupsConfig, MoEConfig
from megafrontier.model.moe.router import Router
from megafrontier.parallel.mesh import Splits
from tests.model.moe.shapes import HYBRID
from tests.model.small_models import SHAPES
from tests.splits.matrix import Case, assert_cases

LLAMA, GPT2 = SHAPES["llama"], SHAPES["gpt2"]
MIXTURE = LLAMA | {
    "activation": "swiglu_clipped",
    "moe": MoEConfig(
        experts=8, active=3, ffn_hidden=16, balance="none", bias=True, router_bias=True
    ),
}
"""As gpt-oss."""
SHARED = GPT2 | {
    "moe": MoEConfig(
        experts=16,
        active=4,
        ffn_hidden=8,
        every=2,
        shared_experts=1,
        router="sigmoid",
        groups=ExpertGroupsConfig(4, 2),
        balance="loss",
        z_loss=0.01,
    )
}

CASES = [
    ((2, 2), Splits(expert=4), "zero3", Case(SHARED, "empty rows", accumulation=2)),
    (
        (2, 2),
        Splits(context=2, expert=2),
        "topo",
        Case(HYBRID, "empty rows", documents=True, options={"overlap": "full"}),
    ),
    (
        (2, 2, 2),
        Splits(expert=8),
        "zero1",
        Case(MIXTURE, "one token", steps=2, token_pieces=2, joined=(0,)),
    ),
    (
        (2, 2, 2),
        Splits(tensor=2, context=2, expert=4),
        "hpz",
        Case(SHARED, steps=2, built={"checkpointing": "selective"}, joined=(0, 1)),
    ),
    (
        (4,),
        Splits(tensor=2, expert=2),
        "zero3",
        Case(MIXTURE, accumulation=2, steps=2, options={"check_order": True}),
    ),
    (
        (2, 2),
        Splits(context=2, expert=4),
        "topo",
        Case(SHARED, steps=2, built={"checkpointing": "block"}, token_pieces=3),
    ),
]


@pytest.mark.parametrize(("sizes", "splits", "strategy", "case"), CASES)
def test_expert_parallelism_gives_one_processs_losses_and_gradients(sizes, splits, strategy, case):
    assert_cases(sizes, splits, [(strategy, case)])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("masks", "accumulation"), [("none", 2), ("one token", 1)])
@pytest.mark.parametrize("shape", [MIXTURE, SHARED])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "topo"])
@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ((2, 4), Splits(expert=1)),
        ((2, 4), Splits(expert=2)),
        ((2, 2, 2), Splits(expert=4)),
        ((8,), Splits(expert=8)),
        ((2, 2, 2), Splits(tensor=2, expert=4)),
        ((2, 4), Splits(context=2, expert=8)),
        ((4, 2), Splits(tensor=2, context=2, expert=2)),
    ],
)
def test_every_combination_on_8_ranks_gives_one_processs_losses_and_gradients(
    sizes, splits, strategy, shape, masks, accumulation
):
    """112 combinations, a few seconds each."""
    case = Case(shape, masks, accumulation, steps=20 if accumulation == 1 else 4)
    assert_cases(sizes, splits, [(strategy, case)])


def test_all_tokens_on_one_rank_in_chunks_give_one_processs_losses_and_gradients(monkeypatch):
    """Of 8 ranks one has all the tokens, which is more than the others' average 4 times over."""
    moe = MoEConfig(experts=16, active=2, ffn_hidden=16, normalise=False, balance="none")
    case = Case(LLAMA | {"moe": moe}, steps=2)
    monkeypatch.setattr(
        Router, "_choose", lambda _router, scores: torch.arange(2).expand(len(scores), 2)
    )
    assert_cases((2, 2, 2), Splits(expert=8), [("zero3", case)])
