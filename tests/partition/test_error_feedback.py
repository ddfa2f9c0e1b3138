"""Later gradient messages carry the errors of earlier ones, unless a step was skipped."""

import torch

from megafrontier.config import WiresConfig
from megafrontier.partition import Placement
from megafrontier.partition.presets import choose_wires
from tests.partition.tiny import LEVELS, backward, batch, build, finished_gradients, preset
from tests.ranks import run_ranks

TOPO, ZERO1, ZERO2, MICS = (
    Placement.named(strategy, LEVELS) for strategy in ("topo", "zero1", "zero2", "mics")
)
REPLICAS = Placement(0, 0, 0, 2)


CASES = [
    (TOPO, {"world": "int4"}, torch.float32),
    (TOPO, {"world": "int4"}, torch.bfloat16),
    (ZERO1, {"node": "int8", "world": "int4"}, torch.bfloat16),
    (REPLICAS, {"pair": "int4", "node": "int4"}, torch.float32),
    # Gradients are reduced in every micro-batch, as in LoCo.
    (ZERO2, {"node": "int8", "world": "int4"}, torch.bfloat16),
    (MICS, {"pair": "int4"}, torch.float32),
]


def test_later_messages_carry_the_errors_of_earlier_ones():
    """Summed over steps, gradients arrive as they were sent, except for the errors that are kept:
    once among the replicas of a shard."""

    def send(hierarchy, placement, reduce, dtype):
        wires = [
            choose_wires(WiresConfig(reduce=chosen), placement, LEVELS, "fp32")
            for chosen in (reduce, {})
        ]
        _, engine, _ = build(hierarchy, wires[0], placement, error_feedback=True, dtype=dtype)
        _, plain, _ = build(hierarchy, wires[1], placement, dtype=dtype)
        arrived = [torch.zeros_like(u.master) for u in engine.units]
        sent = [torch.zeros_like(u.master) for u in engine.units]
        for step in range(4):
            seed = 8 * step + hierarchy.rank
            torch._foreach_add_(arrived, finished_gradients(engine, seed))
            torch._foreach_add_(sent, finished_gradients(plain, seed))
        engine.fold_errors()
        lacking = torch.cat([s - a for s, a in zip(sent, arrived, strict=True)])
        kept = torch.cat([unit.feedback.error for unit in engine.units])
        return hierarchy.shard_index(placement.optimizer)[0], lacking, kept

    ranks = run_ranks((2, 2, 2), lambda hierarchy: [send(hierarchy, *case) for case in CASES])
    for case, found in zip(CASES, zip(*ranks, strict=True), strict=True):
        lacking, kept = {}, {}
        for shard, own, error in found:
            assert torch.equal(lacking.setdefault(shard, own), own), case
            kept[shard] = kept.get(shard, 0) + error
        # Some shards are padding alone, so the largest difference of all counts.
        largest = max((lacking[shard] - kept[shard]).abs().max().item() for shard in lacking)
        assert largest < 0.01, case  # errors are kept in bf16
        assert max(missing.abs().max().item() for missing in lacking.values()) > 5 * largest, case


def test_one_non_finite_element_of_one_rank_reaches_the_norm_through_every_wire():
    names = [("low", s) for s in ("topo", "zero3", "mics", "ddp")] + [("zero++", "hpz")]

    def body(hierarchy):
        found = []
        for name, strategy in names:
            wires = preset(name, strategy, hierarchy.levels)
            for value in (float("nan"), float("inf")):
                _, engine, _ = build(hierarchy, wires, strategy)
                poison = value if hierarchy.rank == 3 else None
                gradients = finished_gradients(engine, hierarchy.rank, poison)
                squares = torch.stack([sum(g.double().square().sum() for g in gradients)])
                found.append(bool(hierarchy.world.sum(squares).isfinite()))
        return found

    assert run_ranks((2, 2), body) == [[False] * 2 * len(names)] * 4


def test_errors_of_a_non_finite_gradient_are_dropped():
    def body(hierarchy):
        wires = preset("low", "topo", hierarchy.levels)
        model, engine, _ = build(hierarchy, wires, error_feedback=True)
        found = []
        for factor in (float("nan"), float("inf"), 1.0):
            backward(engine, model(batch(0)[:2]) * factor)
            gradients = engine.finish_gradients()
            found.append(all(bool(gradient.isfinite().all()) for gradient in gradients))
            engine.clear_gradients()
        return found[2]

    assert run_ranks((2, 2), body) == [True] * 4


def test_errors_are_kept_only_for_levels_with_quantized_gradients():
    def body(hierarchy):
        wires = preset("low", "zero1")
        _, engine, _ = build(hierarchy, wires, "zero1", error_feedback=True)
        _, inner, _ = build(hierarchy, preset("low", "topo"), "topo", error_feedback=True)
        _, way, _ = build(hierarchy, preset("low", "zero3"), "zero3", error_feedback=True)
        return [
            {
                level: error.numel() * 8 // unit.layout.numel
                for level, error in unit.feedback.errors.items()
            }
            for unit in (engine.units[0], inner.units[0], way.units[0])
        ]

    # In eighths of the unit. The gradients of topo lie beyond the node.
    assert run_ranks((2, 2, 2), body) == [[{1: 4, 2: 2}, {2: 2}, {1: 4, 2: 2}]] * 8
