"""Tensor parallelism gives one process's losses, norms and gradients."""

from collections import Counter
from itertools import product

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.parallel.mesh import Splits
from megafrontier.splits.tensor import check_tensor_split
from tests.model.small_models import DELTA, LATENT, OLMO, PREDICTION, SHAPES, small_config
from tests.ranks import run_mesh
from tests.splits.matrix import (
    Case,
    assert_cases,
    by_mesh,
    saved_bytes,
    split_model,
    sweep,
    train_alone,
    train_split,
    train_step,
)

LLAMA, GPT2, NEOX = SHAPES["llama"], SHAPES["gpt2"], SHAPES["neox"]
GROUPED = SHAPES["llama grouped, tied, longer texts"]

EVEN = {"vocab_multiple": 2}
LONG = LLAMA | {"layers": 4, "hidden": 64, "sequence_length": 256}

TWO, FOUR = Splits(tensor=2), Splits(tensor=4)
CASES = [
    ((2,), TWO, "zero3", Case(LLAMA)),
    ((2, 2), TWO, "topo", Case(GPT2, accumulation=2)),
    ((2, 2), TWO, "ddp", Case(NEOX, masks="empty rows")),
    ((2, 2), TWO, "zero3", Case(GROUPED, masks="one token", options={"overlap": "full"})),
    ((2, 2), FOUR, "zero1", Case(LLAMA, masks="empty rows", z_loss=0.1)),
    ((2, 2), TWO, "mics", Case(SHAPES["llama one kv head, biases, wide heads, other base"] | EVEN)),
    ((2, 2, 2), FOUR, "hpz", Case(GPT2, options={"overlap": "none"})),
    ((2, 2), FOUR, "topo", Case(OLMO, accumulation=2, steps=2)),
    ((2, 2), TWO, "zero3", Case(DELTA, documents=True, built={"checkpointing": "selective"})),
    (
        (2, 2),
        TWO,
        "zero3",
        Case(LATENT | PREDICTION, documents=True, steps=2, built={"checkpointing": "selective"}),
    ),
]
MORE = [
    ((2, 2), FOUR, "zero3", Case(GROUPED, accumulation=2)),
    ((2, 2, 2), TWO, "topo", Case(GROUPED, accumulation=2, options={"check_order": True})),
]
"""With --exhaustive only."""


@pytest.mark.parametrize(("sizes", "splits", "cases"), by_mesh(CASES, MORE))
def test_tensor_parallelism_gives_one_processs_losses_and_gradients(sizes, splits, cases):
    assert_cases(sizes, splits, cases)


@pytest.mark.parametrize("overlap", ["none", "safe"])
def test_weights_in_16_bits_that_no_other_rank_has_follow_their_masters(overlap):
    """Without other samples, what a tensor rank has of a block is sent to nobody."""
    case = Case(LLAMA, steps=4, options={"overlap": overlap, "dtype": torch.bfloat16})
    exact = train_alone(case)
    for found in run_mesh(
        (2,), lambda mesh: train_split(case, "zero3", mesh), splits=Splits(tensor=2)
    ):
        for (loss, norm, _), (other, other_norm, _) in zip(found, exact, strict=True):
            assert (loss, norm) == pytest.approx((other, other_norm), rel=0.02)


def test_activations_that_a_rank_keeps_for_backward_fall_with_the_number_of_tensor_ranks():
    def body(mesh):
        model, *_ = split_model(Case(LONG), "ddp", mesh)
        tokens = torch.randint(50, (2, 256))
        return saved_bytes(model, tokens, tokens)

    (whole,) = run_mesh((1,), body)
    for size in (2, 4):
        for kept in run_mesh((size,), body, splits=Splits(tensor=size)):
            assert kept <= 1.05 * whole / size


def test_what_several_ranks_hold_stays_the_same_to_the_bit_on_all_of_them():
    """With norms and biases that are not cut, each tensor and context rank has its own gradient."""

    def body(mesh):
        case = Case(NEOX, "one token", steps=6, documents=True)
        model, engine, specs = split_model(case, "ddp", mesh)
        optimizer = torch.optim.AdamW([unit.master for unit in engine.units], lr=0.01)
        for step in range(case.steps):
            train_step(case, step, mesh, model, engine, optimizer, specs)
        engine.finish_publishing()
        return {
            (specs[name].name, specs[name].box): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }

    found = run_mesh((2, 2, 2), body, splits=Splits(2, 2))
    copies = Counter(key for rank in found for key in rank)
    assert set(copies.values()) == {4, 8}
    for rank in found:
        for key, values in rank.items():
            assert all(torch.equal(values, other[key]) for other in found if key in other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [LLAMA, GPT2, NEOX, GROUPED])
@pytest.mark.parametrize(("sizes", "tensor"), [((2, 4), 2), ((2, 4), 8), ((2, 2, 2), 4)])
def test_every_combination_on_8_ranks_gives_one_processs_losses_and_gradients(sizes, tensor, shape):
    """288 combinations, 24 in a test."""
    is_wide = tensor == 8
    changes = shape | ({"heads": 8, "hidden": 64} if is_wide else {})
    cases = [
        Case(changes, masks, accumulation, steps=20)
        for masks, accumulation in product(["none", "empty rows", "one token"], [1, 2])
    ]
    sweep(sizes, Splits(tensor=tensor), cases)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, r"parallel.tensor: 3, does not divide model.heads \(4\), need one of 1, 2, 4"),
        (
            {"heads": 12, "kv_heads": 6, "hidden": 48},
            4,
            r"a divisor or a multiple of model.kv_heads",
        ),
        ({"ffn_hidden": 33}, 2, r"does not divide model.ffn_hidden \(33\)"),
        ({"vocab_multiple": 1, "vocab_size": 51}, 2, r"the padded vocabulary"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_what_fits(changes, size, message):
    with pytest.raises(UserError, match=message):
        check_tensor_split(small_config(**changes), size)
