"""Which placements strategies and configurations give, and the bytes that follow from them."""

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config import PartitionConfig
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition import STRATEGIES, Placement, Wires
from megafrontier.planner.estimate import state_bytes
from scripts.benchmarks.shared.step_bytes import step_bytes
from tests.partition.tiny import (
    engine_step,
    make_optimizer,
    place,
)
from tests.ranks import make_levels, run_ranks

LEVELS = make_levels((2, 2, 2))
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
                expected = step_bytes(engine, accumulation)
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
            state_bytes(numel, Placement.named(s, LEVELS), LEVELS, wires, a, 2 * a)[-1]
            for a in (1, 4)
        ]
        for s in ("topo", "zero3")
    ]
    shard = numel // 8
    assert world[0] == [shard * sum(sizes)] * 2
    assert world[1] == [shard * 6, shard * 24]


def test_named_strategies_are_the_documented_table():
    levels = make_levels((2, 4, 3))
    table = {name: Placement.named(name, levels) for name in STRATEGIES}
    assert table == {
        "ddp": Placement(0, 0, 0, 0),
        "zero1": Placement(0, 0, 0, 3),
        "zero2": Placement(0, 0, 3, 3),
        "zero3": Placement(3, 3, 3, 3),
        "mics": Placement(2, 2, 2, 2),
        "hpz": Placement(3, 2, 3, 3),
        "topo": Placement(1, 1, 2, 3),
    }


def test_a_strategy_uses_the_levels_of_its_names_at_any_depth():
    inside = Levels(("core", "pair", "node", "world"), (2, 2, 2, 2))
    assert Placement.named("topo", inside) == Placement(2, 2, 3, 4)
    sites = Levels(("pair", "node", "world", "site"), (2, 2, 2, 2))
    assert Placement.named("zero3", sites) == Placement(3, 3, 3, 3)
    assert Placement.named("topo", Levels(("gpu", "box"), (2, 2))) == Placement(1, 1, 1, 2)


@pytest.mark.parametrize("count", range(1, 6))
def test_named_strategies_nest_on_any_number_of_levels(count):
    levels = make_levels((2,) * count)
    for name in STRATEGIES:
        assert Placement.named(name, levels).optimizer <= count


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (PartitionConfig(weights="node", gradients="pair", optimizer="world"), "weights: node"),
        (PartitionConfig(weights="pair", gradients="node", optimizer="pair"), "gradients: node"),
        (
            PartitionConfig(
                weights="pair", backward_weights="node", gradients="node", optimizer="world"
            ),
            "backward_weights: node",
        ),
        (PartitionConfig(weights="pear", gradients="node", optimizer="world"), "'pear'"),
        (PartitionConfig(weights="pair", gradients="node"), "partition.optimizer: missing"),
        (PartitionConfig(strategy="topo", weights="pair"), "not both"),
    ],
)
def test_a_placement_that_is_not_valid_is_refused_by_key_and_value(config, named):
    with pytest.raises(UserError, match="partition") as error:
        Placement.from_config(config, make_levels((2, 4, 3)))
    assert named in str(error.value)


def test_a_free_placement_is_read_level_by_level():
    config = PartitionConfig(
        weights="node", backward_weights="none", gradients="node", optimizer="world"
    )
    assert Placement.from_config(config, make_levels((2, 4, 3))) == Placement(2, 0, 2, 3)


def test_levels_of_a_single_rank_do_not_count_as_sharding():
    topo = Placement(1, 1, 2, 3)
    assert topo.on(make_levels((2, 4, 8))) == topo
    assert topo.on(make_levels((2, 1, 1))) == Placement(1, 1, 1, 1)
    assert topo.on(make_levels((1, 4, 1))) == Placement(0, 0, 2, 2)
    assert topo.on(make_levels((1, 1, 1))) == Placement(0, 0, 0, 0)


def test_a_placement_through_more_levels_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"optimizer=3.*need depths up to 2"):
        Placement(1, 1, 2, 3).on(make_levels((2, 4)))
