"""One layout: aligned, contiguous, nested shards that cover a buffer once."""

from itertools import product
from math import prod

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config import PartitionConfig
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition.layout import SHARD_ALIGNMENT, Layout, shard_range
from megafrontier.partition.placement import STRATEGIES, Placement
from tests.ranks import make_levels


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 4, 3), (2, 1, 3, 2, 2)])
def test_shards_are_aligned_nested_contiguous_and_cover_the_buffer_once(sizes):
    layout = Layout.build("u", [("a", (3, 5)), ("b", (1,)), ("c", (1000,))], prod(sizes))
    coordinates = list(product(*(range(size) for size in sizes)))
    for depth in range(len(sizes) + 1):
        ranges = {shard_range(layout.numel, sizes, place, depth) for place in coordinates}
        assert sorted(ranges)[0][0] == 0
        assert sorted(ranges)[-1][1] == layout.numel
        for (_, stop), (start, _) in zip(sorted(ranges), sorted(ranges)[1:], strict=False):
            assert stop == start
        assert all((stop - start) % SHARD_ALIGNMENT == 0 for start, stop in ranges)
    for place in coordinates:
        outer = shard_range(layout.numel, sizes, place, 0)
        for depth in range(1, len(sizes) + 1):
            inner = shard_range(layout.numel, sizes, place, depth)
            assert outer[0] <= inner[0] <= inner[1] <= outer[1]
            outer = inner


def test_the_design_documents_formula_places_frontiers_ranks():
    pairs_per_node, nodes = 4, 3
    for p, q, n in product(range(2), range(pairs_per_node), range(nodes)):
        piece = ((p * pairs_per_node) + q) * nodes + n
        start, _ = shard_range(24, (2, pairs_per_node, nodes), (p, q, n), 3)
        assert start == piece


def test_parts_within_a_slice_are_exactly_its_parameters():
    layout = Layout.build("u", [("a", (3, 5)), ("b", (7,))], 1)
    parts = [(e.name, *numbers) for e, *numbers in layout.within(10, 20)]
    assert parts == [("a", 10, 15, 0), ("b", 0, 5, 5)]
    assert layout.within(22, layout.numel) == []


def test_named_strategies_are_the_table_of_the_design():
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


def test_levels_of_a_strategys_names_are_those_it_means_wherever_they_stand():
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
def test_a_placement_that_cannot_be_is_refused_by_key_and_value(config, named):
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
