"""Bytes sent and bytes held are those of the formulas, and resharded weights are gone."""

import gc
from collections import Counter

import pytest
import torch

from megafrontier.config import WiresConfig
from megafrontier.partition import STRATEGIES, Placement, Wires
from megafrontier.partition.placement import state_bytes, traffic_bytes
from megafrontier.partition.presets import choose_wires
from megafrontier.partition.unit import Phase
from megafrontier.partition.wires.block import rotate, rotate_back
from scripts.benchmarks.shared.measuring import tensor_bytes
from tests.partition.tiny import (
    LENGTH,
    VOCABULARY,
    TinyModel,
    batch,
    engine_step,
    make_optimizer,
    place,
    pool_formula,
    watch_collectives,
)
from tests.ranks import make_levels, run_ranks

LEVELS = make_levels((2, 2, 2))
NAMES = ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
STEPS = [
    (2, torch.float32, True, {"overlap": "full", "prefetch": 2}),
    (1, torch.bfloat16, True, {"prefetch": 9}),
    (4, torch.bfloat16, False, {"overlap": "none"}),
]
"""Accumulation, computing type, whether embeddings are tied, and how units are gathered."""


def test_bytes_per_level_and_step_equal_the_formula():
    def body(hierarchy):
        found = []
        for strategy in STRATEGIES:
            for accumulation, dtype, tied, options in STEPS:
                model, engine = place(hierarchy, strategy, dtype, tied, **options)
                engine_step(engine, model, make_optimizer(engine), 0, accumulation)
                engine.finish_publishing()
                sent, seconds = engine.ledger.take()
                expected = engine.step_bytes(accumulation)
                found.append(((strategy, dtype, options), sent, expected, seconds))
        return found

    for rank in run_ranks((2, 2, 2), body):
        for what, sent, expected, seconds in rank:
            assert sent == expected, what
            assert all(s > 0 for s in seconds)


def test_topo_uses_slow_levels_once_a_step_and_zero3_in_every_micro_batch():
    numel = 8 * 1024
    sizes = (2, 2)
    wires = Wires.plain(3, torch.bfloat16)
    world = [
        [
            traffic_bytes(numel, Placement.named(s, LEVELS), LEVELS, wires, a, 2 * a)[-1]
            for a in (1, 4)
        ]
        for s in ("topo", "zero3")
    ]
    piece = numel // 8
    assert world[0] == [piece * sum(sizes)] * 2
    assert world[1] == [piece * 6, piece * 24]


@pytest.mark.parametrize(
    ("strategy", "dtype", "wires"),
    [
        *((s, torch.bfloat16, "exact") for s in ("ddp", "zero2", "zero3", "hpz")),
        ("ddp", torch.float32, "exact"),
        ("topo", torch.bfloat16, "low"),
        ("zero1", torch.bfloat16, "low"),
    ],
)
def test_state_held_between_steps_equals_the_formula_within_two_percent(strategy, dtype, wires):
    levels = make_levels((2, 2))
    placement = Placement.named(strategy, levels)
    chosen = choose_wires(WiresConfig(preset=wires), placement, levels, "bf16")
    low = {} if wires == "exact" else {"wires": chosen, "error_feedback": True}
    feedback_wires = chosen if low else None

    def body(hierarchy):
        rotate_back(rotate(torch.zeros(1, 128)))  # makes the matrices that all engines share
        gc.collect()
        before = tensor_bytes()
        model, engine = place(hierarchy, strategy, dtype, **low)
        optimizer = make_optimizer(engine)
        engine_step(engine, model, optimizer, 0, 2)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        assert engine.pool.held_bytes == pool_formula(engine, 1)
        held = tensor_bytes() - before - engine.buffer_bytes
        parts = [
            state_bytes(u.layout.numel, placement, levels, dtype.itemsize, feedback_wires).values()
            for u in engine.units
        ]
        return held, sum(map(sum, parts))

    for held, formula in run_ranks((2, 2), body):
        assert held == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize(
    ("overlap", "prefetch", "most"), [("none", 1, 1), ("safe", 1, 2), ("full", 2, 3)]
)
def test_unsharded_are_the_running_unit_those_ahead_and_those_kept(overlap, prefetch, most):
    """At the end of a forward the last units are kept, because they are the next to run."""

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap=overlap, prefetch=prefetch)
        gathered = []

        def held():
            return {u.name for u in engine.units if u.phase is not Phase.RESHARDED}

        for unit, (_, module) in zip(engine.units, model.units(), strict=True):
            module.register_forward_pre_hook(lambda *_, name=unit.name: note(name))

        def note(name):
            assert name in held()
            gathered.append(len(held()))

        loss = model(batch(0)[:2])
        after_forward = held()
        engine.backward(loss)
        return gathered, after_forward, held()

    for gathered, after_forward, after in run_ranks((2, 2), body):
        assert gathered[0] == most  # with the units ahead of the first one
        assert max(gathered) == most
        assert after_forward == {*NAMES[-most:]}
        assert after == {*NAMES[:most]}


def test_kept_units_are_gathered_once():
    """In a step of four micro-batches: the root, and the units at both ends of a pass."""

    def body(hierarchy):
        model, engine = place(hierarchy, "zero3", tied=True, prefetch=1)
        gathered = Counter()
        watch_collectives(engine, lambda _, label: gathered.update([label]))
        for step in range(2):
            engine_step(engine, model, make_optimizer(engine), step, 4)
        return {label: n for label, n in gathered.items() if label.startswith("gather")}

    # Two levels each, two steps; blocks.1 is at both ends.
    counts = {"root": 1, "blocks.0": 1 + 4, "blocks.1": 1, "blocks.2": 4}
    expected = {f"gather {name}": 4 * count for name, count in counts.items()}
    assert run_ranks((2, 2), body) == [expected] * 4


def test_resharded_weights_are_nan():
    def body(hierarchy):
        model, _ = place(hierarchy, "zero3")
        weight = model.blocks[0].up.weight
        return tuple(weight.shape), bool(weight.isnan().all())

    assert run_ranks((2,), body) == [((31, 13), True)] * 2


def test_evaluation_needs_no_gradient_and_leaves_nothing_gathered():
    def body(hierarchy):
        model, engine = place(hierarchy, "mics")
        with torch.no_grad():
            loss = model(batch(0)[:4])
        left = [u.name for u in engine.units if u.phase is not Phase.RESHARDED]
        return loss.item() / (4 * (LENGTH - 1)), left

    with torch.no_grad():
        alone = TinyModel(False)(batch(0)[:4]).item() / (4 * (LENGTH - 1))
    assert alone < 3 * torch.tensor(float(VOCABULARY)).log().item()
    for loss, left in run_ranks((2, 2), body):
        assert loss == pytest.approx(alone, rel=1e-6)
        assert left == []
