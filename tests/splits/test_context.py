"""Context parallelism gives one process's losses, norms and gradients."""

from functools import partial
from itertools import product

import pytest
import torch

from megafrontier.comm.wires.wire import UNCHANGED, WorkWires, make_wire
from megafrontier.common.errors import UserError
from megafrontier.config import ScalingConfig
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice
from megafrontier.parallel.mesh import Splits
from megafrontier.partition import Placement, shard
from megafrontier.splits.apply import apply_splits
from megafrontier.splits.context import check_context_split
from megafrontier.splits.documents import assign
from tests.model.moe.shapes import HYBRID
from tests.model.small_models import (
    DELTA,
    GEMMA,
    LATENT_QUERIES,
    OLMO,
    PREDICTION,
    SHAPES,
    small_config,
)
from tests.ranks import run_mesh
from tests.splits.matrix import Case, assert_cases, by_mesh, saved_bytes, sweep
from tests.splits.test_documents import needed_tokens

LLAMA, GPT2, NEOX = SHAPES["llama"], SHAPES["gpt2"], SHAPES["neox"]
GROUPED = SHAPES["llama grouped, tied, longer texts"]
SCALED = {
    "scaling": ScalingConfig(
        base_hidden=8,
        base_layers=1,
        base_head_size=2,
        embedding_multiplier=3.0,
        output_multiplier=5.0,
    )
}
LAYOUTS = [
    ((2, 4), Splits(context=2)),
    ((2, 4), Splits(context=4)),
    ((4, 2), Splits(2, 2)),
    ((2, 2, 2), Splits(2, 4)),
    ((8,), Splits(4, 2)),
]

CASES = [
    ((2,), Splits(context=2), "zero3", Case(LLAMA | PREDICTION, accumulation=2)),
    (
        (2, 2),
        Splits(context=4),
        "topo",
        Case(GROUPED, documents=True, options={"overlap": "full"}),
    ),
    (
        (2, 2),
        Splits(context=2),
        "ddp",
        Case(GPT2, "empty rows", documents=True, built={"checkpointing": "selective"}),
    ),
    (
        (2, 2),
        Splits(2, 2),
        "zero3",
        Case(NEOX, "one token", built={"checkpointing": "block"}, options={"check_order": True}),
    ),
    ((2,), Splits(context=2), "ddp", Case(OLMO, "empty rows", steps=2)),
    (
        (2, 2),
        Splits(2, 2),
        "zero3",
        Case(GEMMA, steps=2, documents=True, built={"checkpointing": "block"}),
    ),
    ((2, 2), Splits(2, 2), "topo", Case(GROUPED | SCALED)),
    ((2,), Splits(context=2), "zero3", Case(DELTA, accumulation=2, options={"overlap": "full"})),
    (
        (2, 2),
        Splits(2, 2),
        "zero3",
        Case(DELTA | SCALED, "one token", documents=True, options={"check_order": True}),
    ),
    (
        (2, 2),
        Splits(context=4),
        "topo",
        Case(HYBRID, documents=True, built={"checkpointing": "block"}),
    ),
    (
        (2, 2),
        Splits(2, 2),
        "topo",
        Case(
            LATENT_QUERIES | PREDICTION, documents=True, steps=2, built={"checkpointing": "block"}
        ),
    ),
]
MORE = [
    ((2, 2, 2), Splits(context=8), "zero3", Case(DELTA | {"sequence_length": 48})),
    ((2, 2, 2), Splits(2, 2), "hpz", Case(GROUPED, "one token", accumulation=2, documents=True)),
]
"""With --exhaustive only."""


@pytest.mark.parametrize(("sizes", "splits", "cases"), by_mesh(CASES, MORE))
def test_context_parallelism_gives_one_processs_losses_and_gradients(sizes, splits, cases):
    assert_cases(sizes, splits, cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [LLAMA, GPT2, NEOX, GROUPED])
@pytest.mark.parametrize(("sizes", "splits"), LAYOUTS)
def test_every_combination_on_8_ranks_gives_one_processs_losses_and_gradients(sizes, splits, shape):
    """320 combinations, 16 in a test."""
    cases = [
        Case(shape, masks, 1 if documents else 2, steps=20, documents=documents)
        for masks, documents in product(["none", "one token"], [False, True])
    ]
    sweep(sizes, splits, cases)


def built(mesh, length, checkpointing="none", chunk=16, wires=UNCHANGED, **changes):
    """A model of sequences of `length` tokens on the ranks of a mesh, and its engine."""
    config = small_config(**{**GROUPED, **changes, "sequence_length": length})
    with torch.device("meta"):
        model = GPT(config, loss_chunk_tokens=chunk, checkpointing=checkpointing)
    connect = apply_splits(model, mesh, wires)
    placement = Placement.named("ddp", mesh.hierarchy().levels)
    initial = partial(initial_slice, 0)
    engine = shard(model, model.units(), placement, mesh, initial=initial)
    connect(engine)
    return model, engine


def ids(length):
    return torch.randint(50, (1, length), generator=torch.Generator().manual_seed(0))


TINY = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "chunk": 4096}


@pytest.mark.parametrize(
    ("length", "longest", "sizes", "changes"),
    [(1024, 1024, (1, 2, 4), {"attention": DELTA["attention"]}), (65_536, 4_096, (1, 4), TINY)],
)
def test_what_a_rank_keeps_for_backward_falls_as_the_number_of_context_ranks(
    length, longest, sizes, changes
):
    """Of a sequence that is one document, in blocks of both kinds of attention, and of one with a
    long and many short documents."""
    documents = torch.tensor([0, *range(longest, length, 1024), length], dtype=torch.int32)

    def kept(mesh):
        model, _ = built(mesh, length, **changes)
        tokens = ids(length)
        return saved_bytes(model, tokens, tokens, documents)

    found = {size: max(run_mesh((size,), kept, splits=Splits(1, size))) for size in sizes}
    for size in sizes[1:]:
        assert 0.9 < found[size] * size / found[1] < 1.03, found


LONG_AND_SHORT = torch.tensor([0, 48, 50, 58, 64], dtype=torch.int32)


@pytest.mark.parametrize(
    ("checkpointing", "documents", "wire"),
    [
        ("none", None, "fp32"),
        ("selective", LONG_AND_SHORT, "int8"),
        ("block", LONG_AND_SHORT, "bf16"),
    ],
)
def test_only_keys_and_values_that_a_rank_needs_cross_ranks_three_times_a_block(
    checkpointing, documents, wire
):
    """Twice in forward's direction and once back, and for no other layer anything. Heads that
    queries share travel once."""
    length, ranks, layers, kv_heads, head_size = 64, 4, 2, 2, 8

    def sent(mesh):
        model, engine = built(
            mesh, length, checkpointing, wires=WorkWires((make_wire(wire).codec,))
        )
        tokens = ids(length)
        engine.ledger.take(wait=True)
        with engine.no_sync(True):
            model(tokens, tokens, documents).backward()
        return sum(engine.ledger.take(wait=True)[0])

    bounds = (0, length) if documents is None else tuple(documents.tolist())
    needed = sum(needed_tokens(assign(bounds, ranks), rank) for rank in range(ranks))
    found = run_mesh((ranks,), sent, splits=Splits(context=ranks))
    # The heads travel in two pieces.
    sizes = 2 * make_wire(wire).codec.message_bytes(kv_heads * head_size)
    assert sum(found) == 3 * layers * needed * sizes
    # All keys and values to all ranks would be more.
    assert needed <= (0.75 if documents is None else 0.7) * length * (ranks - 1)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
def test_dropout_draws_the_same_for_a_seed(checkpointing):
    def run(mesh):
        model, engine = built(mesh, 16, checkpointing, dropout=0.4, layers=1)
        losses, tokens = [], ids(16)
        for seed in (mesh.work_rank, mesh.work_rank, 5):
            torch.manual_seed(seed)
            loss = model(tokens, tokens)
            loss.backward()
            losses.append((loss.item(), [g.sum().item() for g in engine.finish_gradients()]))
            engine.finish_step(torch.zeros(()))
        return losses

    for first, again, other in run_mesh((2,), run, splits=Splits(context=2)):
        assert first == again != other


def test_no_logits_are_made_of_parts_of_sequences():
    def run(mesh):
        with pytest.raises(RuntimeError, match="need a model on one rank"):
            built(mesh, 16)[0](ids(16))

    run_mesh((2,), run, splits=Splits(context=2))


@pytest.mark.parametrize("length", [20, 4096])
def test_sequences_that_do_not_divide_are_refused_with_what_fits(length):
    with pytest.raises(UserError, match=rf"parallel.context: 3, .*\({length}\), need one of 1, 2,"):
        check_context_split(small_config(sequence_length=length), 3)
