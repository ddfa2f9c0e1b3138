"""Pipelines give one process's losses, norms and gradients."""

import pytest
import torch

from megafrontier.comm.wires.wire import WorkWires, make_wire
from megafrontier.data.sampling.samples import Batch
from megafrontier.parallel.mesh import Splits
from megafrontier.partition import Placement
from megafrontier.pipeline.table import Action, ActionKind
from megafrontier.pipeline.work import Work
from scripts.benchmarks.shared.step_bytes import Pass, step_bytes
from tests.model.moe.shapes import mixture
from tests.model.small_models import DELTA_WINDOWS, GEMMA, LATENT_QUERIES, PREDICTION, SHAPES
from tests.ranks import run_mesh
from tests.splits.matrix import (
    Case,
    assert_cases,
    batch,
    by_mesh,
    connected,
    split_model,
    train_alone,
    train_split,
)

LLAMA, GPT2, NEOX = SHAPES["llama"], SHAPES["gpt2"], SHAPES["neox"]
GROUPED = SHAPES["llama grouped, tied, longer texts"]
FOUR = {"layers": 4}
ZB = {"schedule": "zero_bubble"}
ZBV = ZB | {"stages_per_rank": 2}
INTERLEAVED = {"schedule": "interleaved", "stages_per_rank": 2}
UNEVEN = INTERLEAVED | {"layers": [1, 2, 1, 1]}
PREDICTING = (
    ({}, "zero3", {}, {"changes": LLAMA | FOUR | PREDICTION, "documents": True}),
    ({}, "zero1", INTERLEAVED, {"changes": GROUPED | FOUR | PREDICTION}),
    ({}, "topo", ZBV, {"changes": GROUPED | FOUR | PREDICTION, "steps": 1}),
    ({"tensor": 2}, "topo", ZB, {"changes": GROUPED | FOUR | PREDICTION, "documents": True}),
    ({"context": 2}, "topo", ZBV, {"changes": LLAMA | FOUR | PREDICTION, "documents": True}),
    (
        {"expert": 2},
        "zero3",
        ZB,
        {"changes": mixture() | FOUR | PREDICTION, "built": {"checkpointing": "block"}},
    ),
)
"""Splits, strategy, keys of `parallel` and case of models with a block of prediction, whose
embedding the last stage needs, too."""
CASES = [
    ((2, 2), Splits(pipeline=2), "topo", Case(GPT2 | FOUR, accumulation=4, parallel=ZB)),
    ((2, 2), Splits(pipeline=2), "zero3", Case(NEOX | FOUR, accumulation=4, parallel=ZBV)),
    (
        (2, 2),
        Splits(tensor=2, pipeline=2),
        "topo",
        Case(LLAMA | FOUR, accumulation=4, steps=2, parallel=ZBV, built={"checkpointing": "block"}),
    ),
    (
        (2, 2),
        Splits(tensor=2, pipeline=2),
        "zero3",
        Case(
            GPT2 | FOUR,
            accumulation=4,
            steps=1,
            parallel=ZB,
            built={"checkpointing": "selective"},
            options={"overlap": "full"},
        ),
    ),
    (
        (2, 2),
        Splits(context=2, pipeline=2),
        "topo",
        Case(LLAMA | FOUR, accumulation=4, steps=2, parallel=ZBV, documents=True),
    ),
    (
        (2,),
        Splits(pipeline=2),
        "zero3",
        Case(GEMMA, accumulation=2, steps=2, parallel=ZB, documents=True),
    ),
    (
        (2, 2),
        Splits(expert=2, pipeline=2),
        "topo",
        Case(mixture(shared_experts=1) | FOUR, accumulation=2, steps=2, parallel=ZBV),
    ),
    (
        (2, 2),
        Splits(tensor=2, pipeline=2),
        "ddp",
        Case(LATENT_QUERIES, accumulation=2, steps=2, parallel=ZB),
    ),
    (
        (2, 2),
        Splits(context=2, pipeline=2),
        "topo",
        Case(DELTA_WINDOWS, accumulation=4, parallel=ZBV, documents=True),
    ),
    ((2,), Splits(pipeline=2), "ddp", Case(LLAMA | FOUR, accumulation=4)),
    *(
        ((2, 2), Splits(pipeline=2, **splits), strategy, Case(accumulation=2, parallel=of, **case))
        for splits, strategy, of, case in PREDICTING
    ),
    ((2, 2), Splits(pipeline=4), "topo", Case(NEOX | FOUR, "empty rows", accumulation=8)),
    (
        (2, 2, 2),
        Splits(pipeline=2),
        "topo",
        Case(LLAMA | FOUR, accumulation=2, documents=True, options={"overlap": "full"}),
    ),
    (
        (2, 2),
        Splits(pipeline=2),
        "zero3",
        Case(GPT2 | {"layers": 5}, accumulation=4, steps=2, parallel=UNEVEN),
    ),
    (
        (2, 2, 2),
        Splits(tensor=2, context=2, pipeline=2),
        "zero1",
        Case(GROUPED | {"layers": 3}, "one token", accumulation=3, steps=2, documents=True),
    ),
]
MORE = [
    ((2,), Splits(pipeline=2), "ddp", Case(LLAMA | FOUR, accumulation=4, parallel=ZB)),
    (
        (2, 2, 2),
        Splits(pipeline=2),
        "topo",
        Case(GROUPED | FOUR, accumulation=4, parallel=ZBV),
    ),
    (
        (2, 2, 2),
        Splits(tensor=4, pipeline=2),
        "topo",
        Case(GROUPED | {"layers": 3}, accumulation=4, steps=1, parallel=ZB | {"layers": [2, 1]}),
    ),
    ((2, 2), Splits(pipeline=2), "zero3", Case(LLAMA | FOUR, accumulation=4)),
    ((2, 2), Splits(pipeline=4), "topo", Case(GPT2 | FOUR, accumulation=4, steps=2)),
]
"""With --exhaustive only."""


@pytest.mark.parametrize(("sizes", "splits", "cases"), by_mesh(CASES, MORE))
def test_a_pipeline_gives_one_processs_losses_and_gradients(sizes, splits, cases):
    assert_cases(sizes, splits, cases)


def passes(pipeline, count):
    """The forwards and backwards of a step, for `step_bytes`."""
    return [
        Pass(pipeline._places[item.stage], item.kind is ActionKind.FORWARD)
        for item in pipeline.row(count)
        # The backward of weights reads none of them.
        if isinstance(item, Action) and item.kind is not ActionKind.BACKWARD_WEIGHT
    ]


@pytest.mark.parametrize(
    ("strategy", "parallel"),
    [("zero1", {}), ("topo", INTERLEAVED), ("zero3", {}), ("topo", ZB), ("zero3", ZBV)],
)
def test_weights_cross_the_levels_beyond_theirs_once_a_step(strategy, parallel):
    """However many micro-batches there are, and by the formula. Without sharded weights no level is
    crossed inside a step."""

    case = Case(LLAMA | FOUR, parallel=parallel)
    tokens, targets = batch(case, 0)

    def body(mesh):
        model, engine, _ = split_model(case, strategy, mesh)
        pipeline, found = connected(case, mesh, model, engine), []
        for count in (2, 7):
            engine.ledger.take_kinds(wait=True)
            pipeline.train(Work([Batch(tokens[:1], targets[:1], None, 0)] * count))
            engine.finish_gradients()
            engine.finish_step(torch.zeros(()))
            engine.finish_publishing()
            kinds = engine.ledger.take_kinds(wait=True)
            sent = [level["weights"].bytes + level["gradients"].bytes for level in kinds]
            assert sent == step_bytes(engine, count, passes=passes(pipeline, count))
            found.append([level["weights"].bytes for level in kinds])
        depth = Placement.named(strategy, mesh.hierarchy().levels).weights
        return [numbers[depth:] for numbers in found]

    for few, many in run_mesh((2, 2, 2), body, splits=Splits(pipeline=2)):
        assert few == many


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_hidden_states_and_their_gradients_cross_a_border_in_few_bits(wire):
    """The ledger counts them as activations. The loss stays within 0.3 %, gradients within 5 %."""
    case = Case(LLAMA | FOUR, accumulation=4, steps=1)
    tokens, targets = batch(case, 0)

    def body(mesh):
        wires = WorkWires((make_wire(wire).codec,))
        model, engine, _ = split_model(case, "ddp", mesh)
        pipeline = connected(case, mesh, model, engine, wires)
        engine.ledger.take_kinds(wait=True)
        pipeline.train(Work([Batch(tokens[:2], targets[:2], None, 0)] * 3))
        mesh.drain_and_barrier()
        (kinds,) = engine.ledger.take_kinds(wait=True)
        assert kinds["activations"].bytes == 3 * wires.codec(0, torch.float32).message_bytes(
            2 * 24 * 32
        )
        return train_split(case, "ddp", mesh, wires)

    ((loss, norm, gradients),) = train_alone(case)
    for ((found, found_norm, parts),) in run_mesh((2,), body, splits=Splits(pipeline=2)):
        assert found == pytest.approx(loss, rel=3e-3)
        assert found_norm == pytest.approx(norm, rel=0.05)
        errors = [(values - gradients[name][at : at + len(values)]) for name, at, values in parts]
        assert torch.cat(errors).norm() < 0.05 * norm


@pytest.mark.exhaustive
@pytest.mark.parametrize("masks", ["none", "one token"])
@pytest.mark.parametrize("parallel", [{}, INTERLEAVED, ZB, ZBV])
@pytest.mark.parametrize("shape", [LLAMA, GPT2, NEOX, GROUPED])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "topo"])
@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ((2, 4), Splits(pipeline=2)),
        ((2, 2, 2), Splits(pipeline=4)),
        ((2, 4), Splits(tensor=2, pipeline=2)),
        ((2, 2, 2), Splits(2, 2, pipeline=2)),
    ],
)
def test_every_combination_on_8_ranks_gives_one_processs_losses_and_gradients(
    sizes, splits, strategy, shape, parallel, masks
):
    """512 combinations, a few seconds each."""
    size = 8 // (splits.tensor * splits.context * splits.pipeline)
    case = Case(shape | {"layers": 9}, masks, 8 // size, steps=4, parallel=parallel)
    assert_cases(sizes, splits, [(strategy, case)])
