"""With fp32 wires every placement gives the losses of one process."""

from weakref import ref

import pytest
import torch

from megafrontier.config import WiresConfig
from megafrontier.parallel.mesh import Mesh
from megafrontier.partition import STRATEGIES, Placement, Wires
from megafrontier.partition.presets import choose_wires
from tests.partition.tiny import bits, build, engine_step, train_alone, train_sharded
from tests.ranks import make_levels, run_ranks

STEPS = 20


@pytest.fixture(scope="module")
def alone():
    return {tied: train_alone(tied, STEPS) for tied in (False, True)}


def assert_equal_losses(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-5)


# Each strategy once, and each accumulation with and without a level that holds gradients.
ACCUMULATED = {
    "ddp": (2, True), "zero1": (4, False), "zero2": (1, True), "zero3": (2, True),
    "mics": (1, False), "hpz": (4, True), "topo": (2, False),
}  # fmt: skip


def test_every_strategy_gives_the_losses_of_one_process(alone):
    levels = make_levels((2, 2, 2))
    assert set(ACCUMULATED) == set(STRATEGIES)
    for losses in alone.values():
        assert losses[-1] < 0.9 * losses[0], "it learns"

    def body(hierarchy):
        return [
            train_sharded(hierarchy, Placement.named(name, levels), tied, 3, accumulation)
            for name, (accumulation, tied) in ACCUMULATED.items()
        ]

    for rank in run_ranks((2, 2, 2), body):
        for (_, tied), losses in zip(ACCUMULATED.values(), rank, strict=True):
            assert_equal_losses(losses, alone[tied][:3])


FREE = [
    ((8,), Placement(1, 1, 1, 1)),
    ((2, 4), Placement(0, 0, 1, 2)),
    pytest.param((4, 2), Placement(1, 0, 2, 2), marks=pytest.mark.exhaustive),
    ((2, 1, 2, 2), Placement(2, 1, 3, 4)),
    ((1, 2, 2, 1, 2), Placement(3, 2, 4, 5)),
    ((2, 2, 2), Placement(0, 0, 1, 1)),
    pytest.param((2, 2, 2), Placement(2, 2, 2, 3), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("sizes", "placement"), FREE)
def test_any_nesting_on_1_to_5_levels_gives_the_losses_of_one_process(alone, sizes, placement):
    found = run_ranks(sizes, lambda h: train_sharded(h, placement, False, 3, 2))
    for losses in found:
        assert_equal_losses(losses, alone[False][:3])


def test_one_rank_needs_no_process_group(alone):
    hierarchy = Mesh.single(make_levels((1, 1, 1)), torch.device("cpu")).hierarchy()
    losses = train_sharded(hierarchy, Placement(1, 1, 2, 3), True, STEPS, 2)
    assert_equal_losses(losses, alone[True])


@pytest.mark.parametrize(
    ("sizes", "depths"),
    [
        ((1, 1), (2, 2, 2, 2)),
        ((2, 2), (2, 2, 2, 2)),
        ((2, 2), (1, 1, 1, 1)),
    ],
)
def test_weights_without_a_copy_and_gradients_that_are_freed_change_no_bit(sizes, depths):
    """As on an accelerator, where nothing of a gradient is left after the update."""

    def train(hierarchy, saves_memory):
        placement = Placement(*depths, has_copy=not saves_memory)
        model, engine, optimizer = build(
            hierarchy, Wires.plain(2, torch.bfloat16), placement, dtype=torch.bfloat16
        )
        shards, noted = engine.pool.shards, []
        shards.keeps = not saves_memory
        acquire = shards.acquire

        def note(numel, dtype):
            shard = acquire(numel, dtype)
            noted.append(ref(shard.untyped_storage()))
            return shard

        shards.acquire = note
        losses = []
        for step in range(3):
            losses.append(engine_step(engine, model, optimizer, step, 2))
            assert len(noted) == len(engine.units) * (step + 1 if saves_memory else 1)
            assert all(shard() is None for shard in noted) == saves_memory
        assert (shards.held_bytes == 0) == saves_memory
        assert all((unit.weights.numel() == 0) == saves_memory for unit in engine.units)
        return losses, [bits(unit.master) for unit in engine.units]

    def body(hierarchy):
        return train(hierarchy, saves_memory=True) == train(hierarchy, saves_memory=False)

    if sizes == (1, 1):
        assert body(Mesh.single(make_levels(sizes), torch.device("cpu")).hierarchy())
    else:
        assert all(run_ranks(sizes, body))


def test_bf16_wires_stay_near_and_equal_on_every_rank(alone):
    def body(hierarchy):
        placement = Placement.named("topo", hierarchy.levels)
        config = WiresConfig(gather={"world": "bf16"}, reduce={"node": "bf16"})
        wires = choose_wires(config, placement, hierarchy.levels, "fp32")
        return train_sharded(hierarchy, placement, False, 6, 2, wires)

    found = run_ranks((2, 2, 2), body)
    assert all(losses == found[0] for losses in found)
    assert found[0] == pytest.approx(alone[False][:6], rel=2e-2)
    assert found[0] != pytest.approx(alone[False][:6], rel=1e-6)
