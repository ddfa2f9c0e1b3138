"""One layout: aligned, contiguous, nested shards that cover a buffer once."""

from itertools import product
from math import prod

import pytest

from megafrontier.parallel.hierarchy import SHARD_ALIGNMENT, shard_range
from megafrontier.partition.layout import Layout


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
        shard = ((p * pairs_per_node) + q) * nodes + n
        start, _ = shard_range(24, (2, pairs_per_node, nodes), (p, q, n), 3)
        assert start == shard


def test_parts_within_a_slice_are_exactly_its_parameters():
    layout = Layout.build("u", [("a", (3, 5)), ("b", (7,))], 1)
    parts = [(e.name, *numbers) for e, *numbers in layout.within(10, 20)]
    assert parts == [("a", 10, 15, 0), ("b", 0, 5, 5)]
    assert layout.within(22, layout.numel) == []
