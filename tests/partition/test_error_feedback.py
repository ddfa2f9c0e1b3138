"""What gradient messages fail to say is said by later ones, and forgotten where it is of no use."""

import pytest
import torch

from megafrontier.config import WiresConfig
from megafrontier.partition import Placement
from megafrontier.partition.presets import choose_wires
from tests.partition.tiny import LEVELS, batch, build, finished_gradients, preset
from tests.ranks import run_ranks

ONE_LEVEL = (Placement.named("topo", LEVELS), {"world": "int4"})
TWO_LEVELS = (Placement.named("zero1", LEVELS), {"node": "int8", "world": "int4"})
REPLICAS = (Placement(0, 0, 0, 2), {"pair": "int4", "node": "int4"})
ON_THE_WAY = [
    (Placement.named("zero2", LEVELS), {"node": "int8", "world": "int4"}),  # as LoCo
    (Placement.named("mics", LEVELS), {"pair": "int4"}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("placement", "reduce"), [ONE_LEVEL, TWO_LEVELS, REPLICAS, *ON_THE_WAY])
def test_error_feedback_says_later_what_it_could_not_say_at_once(placement, reduce, dtype):
    """Summed over steps, gradients arrive as they were sent: what is missing is what is kept, once
    among the replicas of a shard."""

    def body(hierarchy):
        wires = [
            choose_wires(WiresConfig(reduce=chosen), placement, LEVELS, "fp32")
            for chosen in (reduce, {})
        ]
        _, engine, _ = build(hierarchy, wires[0], placement, error_feedback=True, dtype=dtype)
        _, plain, _ = build(hierarchy, wires[1], placement, dtype=dtype)
        arrived = [torch.zeros_like(u.master) for u in engine.units]
        sent = [torch.zeros_like(u.master) for u in engine.units]
        for step in range(6):
            seed = 8 * step + hierarchy.rank
            torch._foreach_add_(arrived, finished_gradients(engine, seed))
            torch._foreach_add_(sent, finished_gradients(plain, seed))
        engine.fold_errors()
        lacking = torch.cat([s - a for s, a in zip(sent, arrived, strict=True)])
        kept = torch.cat([unit.feedback.error for unit in engine.units])
        return hierarchy.shard_index(placement.optimizer)[0], lacking, kept

    lacking, kept = {}, {}
    for piece, mine, error in run_ranks((2, 2, 2), body):
        assert torch.equal(lacking.setdefault(piece, mine), mine)
        kept[piece] = kept.get(piece, 0) + error
    # Some shards are padding alone, so the worst of all is what counts.
    worst = max((lacking[piece] - kept[piece]).abs().max().item() for piece in lacking)
    assert worst < 0.01  # the errors are kept in bf16
    assert max(missing.abs().max().item() for missing in lacking.values()) > 5 * worst


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("low", "topo"), ("low", "zero3"), ("low", "mics"), ("low", "ddp"), ("zero++", "hpz")],
)
def test_one_non_finite_element_of_one_rank_reaches_the_norm_through_every_wire(
    name, strategy, value
):
    def body(hierarchy):
        _, engine, _ = build(hierarchy, preset(name, strategy), strategy)
        poison = value if hierarchy.rank == 5 else None
        gradients = finished_gradients(engine, hierarchy.rank, poison)
        squares = torch.stack([sum(g.double().square().sum() for g in gradients)])
        return bool(hierarchy.world.sum(squares).isfinite())

    assert run_ranks((2, 2, 2), body) == [False] * 8


def test_what_a_non_finite_gradient_could_not_say_is_forgotten():
    def body(hierarchy):
        model, engine, _ = build(hierarchy, preset("low", "topo"), error_feedback=True)
        found = []
        for factor in (float("nan"), float("inf"), 1.0):
            engine.backward(model(batch(0)[:2]) * factor)
            gradients = engine.finish_gradients()
            found.append(all(bool(gradient.isfinite().all()) for gradient in gradients))
            engine.clear_gradients()
        return found[2]

    assert run_ranks((2, 2, 2), body) == [True] * 8


def test_errors_are_kept_only_where_low_bits_are_sent():
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

    # Of the whole unit's eight parts; topo's gradients lie beyond the node.
    assert run_ranks((2, 2, 2), body) == [[{1: 4, 2: 2}, {2: 2}, {1: 4, 2: 2}]] * 8
