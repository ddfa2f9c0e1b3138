"""The splits on the levels of a machine: numbering, peers, groups, and what is refused."""

from collections import defaultdict
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist

from megafrontier.common.errors import UserError
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import AXES, DATA_PARALLEL, MIXTURE_AXES, Mesh, MeshShape, Splits
from megafrontier.parallel.world import World
from tests.partition.tiny import place
from tests.ranks import make_levels, run_mesh

FRONTIER = Levels(("pair", "node", "world"), (2, 4, 6))
SUBSETS = [
    ("tensor",), ("context",), ("data",), ("pipeline",), ("expert",), ("expert_data",),
    ("context", "data"), ("tensor", "expert_data"), ("tensor", "context"), DATA_PARALLEL, AXES,
    MIXTURE_AXES,
]  # fmt: skip


def shapes(sizes):
    """Every mesh of levels of these sizes: each combination of splits that fits."""
    numbers = [n for n in range(1, prod(sizes) + 1) if prod(sizes) % n == 0]
    for splits in product(numbers, repeat=4):
        try:
            yield MeshShape(make_levels(sizes), Splits(*splits))
        except UserError:
            continue


def coordinates(shape, axes):
    """The coordinate of every rank by (axis, level), counted up as an odometer does."""
    wheels = [(axis, level) for level in range(len(shape.levels.sizes)) for axis in axes]
    turns = product(*(range(shape.sizes[axis][level]) for axis, level in reversed(wheels)))
    return [dict(zip(reversed(wheels), turn, strict=True)) for turn in turns]


@pytest.mark.parametrize("sizes", [(1,), (6,), (2, 4), (2, 2, 2), (3, 2), (2, 1, 4), (4, 3)])
def test_peers_are_the_ranks_that_differ_in_the_axes_at_one_level_alone(sizes):
    for shape in shapes(sizes):
        for axes in SUBSETS:
            table = coordinates(shape, MIXTURE_AXES if {*axes} <= {*MIXTURE_AXES} else AXES)
            for level in range(len(sizes)):
                expected = defaultdict(list)
                keys = []
                for rank, own in enumerate(table):
                    free = {(axis, level) for axis in axes}
                    keys.append(tuple(own[place] for place in own if place not in free))
                    expected[keys[-1]].append(rank)
                for rank, key in enumerate(keys):
                    assert list(shape.peers(rank, axes)[level]) == expected[key], (shape, axes)
                    assert len(expected[key]) == shape.over(axes).sizes[level]


def alone(shape, rank):
    """The mesh of one rank, without groups."""
    return Mesh(shape, World(rank, shape.levels.ranks, torch.device("cpu")))


def test_numbers_fill_the_levels_from_inside_and_the_pipeline_from_outside():
    shape = MeshShape(FRONTIER, Splits(tensor=4, context=4, pipeline=3))
    assert shape.sizes["tensor"] == (2, 2, 1)
    assert shape.sizes["context"] == (1, 2, 2)
    assert shape.sizes["pipeline"] == (1, 1, 3)
    assert shape.sizes["data"] == (1, 1, 1)
    shape = MeshShape(FRONTIER, Splits(tensor=2, pipeline=12, expert=2))
    assert shape.sizes["pipeline"] == (1, 2, 6)
    assert shape.sizes["data"] == shape.sizes["expert"] == (1, 2, 1)
    assert shape.sizes["expert_data"] == (1, 1, 1)


def test_one_levels_coordinate_is_tensor_context_data_pipeline_innermost_first():
    shape = MeshShape(Levels(("node", "world"), (4, 12)), Splits(2, context=4, pipeline=2))
    rank = 1 + 2 * (0 + 2 * (1 + 2 * (2 + 3 * 1)))
    assert [shape.index(rank, (axis,)) for axis in AXES] == [1, 2, 2, 1]
    assert shape.index(rank, ("context", "data")) == 0 + 2 * (1 + 2 * 2)
    assert shape.index(rank, AXES) == rank


def test_experts_are_the_innermost_of_context_and_data():
    shape = MeshShape(FRONTIER, Splits(tensor=2, context=2, expert=8))
    assert shape.sizes["expert"] == (1, 4, 2)
    assert shape.sizes["expert_data"] == (1, 1, 3)
    assert shape.peers(0, ("expert",)) == ((0,), (0, 2, 4, 6), (0, 8))
    assert shape.peers(8, ("expert_data",)) == ((8,), (8,), (8, 24, 40))


def test_joined_levels_hold_the_ranks_of_those_inside_them_in_the_same_order():
    shape = MeshShape(FRONTIER, Splits(tensor=2, context=2, expert=8))
    levels = shape.over(("expert",))
    assert levels.joined((1,)).sizes == (1, 1, 8)
    assert levels.joined(()) == levels
    assert shape.joined_peers(2, ("expert",), (0, 1)) == ((2,), (2,), (0, 2, 4, 6, 8, 10, 12, 14))
    assert shape.joined_peers(2, ("expert",), ()) == shape.peers(2, ("expert",))
    shape = MeshShape(Levels(("pair", "node", "world"), (2, 4, 3)), Splits(expert=24))
    assert shape.joined_peers(13, ("expert",), (0,)) == ((13,), tuple(range(8, 16)), (5, 13, 21))
    assert shape.over(("expert",)).joined((0, 1)).coordinates(13) == (0, 0, 13)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tensor": "pair"}, Splits(tensor=2)),
        ({"tensor": "pair", "context": "node"}, Splits(tensor=2, context=4)),
        ({"expert": "node"}, Splits(expert=8)),
        ({"tensor": "pair", "expert": "node"}, Splits(tensor=2, expert=4)),
        ({"tensor": "node", "context": "node"}, Splits(tensor=8)),
        ({"pipeline": "world"}, Splits(pipeline=6)),
        ({"pipeline": "node", "tensor": 2}, Splits(tensor=2, pipeline=24)),
        ({"tensor": 2, "context": 2, "pipeline": 3}, Splits(2, 2, pipeline=3)),
    ],
)
def test_a_levels_name_is_all_ranks_up_to_it_that_no_inner_split_takes(values, expected):
    assert Splits.resolve(FRONTIER, values) == expected


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"tensor": 3}, r"parallel\.tensor: 3, .* \(pair 2 × node 4 × world 6 .*\) .* need one of "
         "1, 2, 4, 8, 16, 24, 48"),
        ({"tensor": 12}, r"parallel\.tensor: 12, "),
        ({"tensor": 2, "context": 3}, r"parallel\.context: 3, .*\(pair 1 × node 4 × world 6 .* "
         "need one of 1, 2, 4, 8, 12, 24$"),
        ({"pipeline": 4}, r"parallel\.pipeline: 4, .*\(world 6 × node 4 × pair 2 .* need one of "
         "1, 2, 3, 6, 12, 24, 48$"),
        ({"tensor": 8, "context": 6, "pipeline": 2}, r"parallel\.pipeline: 2, .* need one of 1$"),
        ({"pipeline": 6, "expert": 16}, r"parallel\.expert: 16, .* need one of 1, 2, 4, 8$"),
        ({"tensor": 96}, r"parallel\.tensor: 96, "),
        ({"tensor": 0}, r"parallel\.tensor: 0, "),
        ({"context": -2}, r"parallel\.context: -2, "),
        ({"tensor": "rack"}, r"parallel\.tensor: no level 'rack' on this machine, need a whole "
         "number or one of pair, node, world$"),
        ({"pipeline": "none"}, r"parallel\.pipeline: no level 'none'"),
    ],
)  # fmt: skip
def test_what_does_not_fill_the_levels_is_refused_with_the_numbers_that_do(values, line):
    with pytest.raises(UserError, match=f"^{line}"):
        Splits.resolve(FRONTIER, values)


def test_a_mesh_refuses_splits_that_do_not_fit_its_levels():
    with pytest.raises(UserError, match=r"parallel\.context: 3"):
        MeshShape(make_levels((2, 2)), Splits(context=3))


def test_axes_of_experts_and_of_context_or_data_are_not_mixed():
    with pytest.raises(ValueError, match="need some of"):
        MeshShape(FRONTIER).peers(0, ("context", "expert_data"))
    with pytest.raises(ValueError, match="need some of"):
        MeshShape(FRONTIER).over(("world",))


def test_without_splits_the_data_parallel_levels_are_the_machines():
    shape = MeshShape(FRONTIER)
    assert shape.over(DATA_PARALLEL) == FRONTIER
    for rank in range(48):
        assert shape.peers(rank, DATA_PARALLEL) == shape.peers(rank, AXES)
        mesh = alone(shape, rank)
        assert (mesh.data_rank, mesh.data_size, mesh.counts_loss) == (rank, 48, True)


@pytest.mark.parametrize("splits", [Splits(2, 2, 1, 3), Splits(8, 1, 1, 2), Splits(1, 2, 2, 6)])
def test_each_sample_is_read_by_all_of_a_data_coordinate_and_its_loss_counts_once(splits):
    shape = MeshShape(FRONTIER, splits)
    meshes = [alone(shape, rank) for rank in range(48)]
    counted = [mesh.data_rank for mesh in meshes if mesh.counts_loss]
    # Each context rank has the loss of its part of the sequences. In a pipeline one rank has a
    # loss, and the others have 0.
    times = splits.context * splits.pipeline
    assert sorted(counted) == sorted([*range(meshes[0].data_size)] * times)
    readers = splits.tensor * splits.context * splits.pipeline
    assert meshes[0].data_size * readers == 48


FAMILIES = (
    DATA_PARALLEL, ("context", "data"), ("tensor", "expert_data"), ("expert_data",), ("tensor",),
    ("context",), ("expert",), ("pipeline",),
)  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 4, 16), (8, 16), (2, 4, 4, 4), (2, 4, 2, 4, 2), (12, 6)])
def test_a_rank_has_at_most_9_communicators_besides_those_of_the_world(sizes):
    """Whatever the splits: on most levels, the peers of several kinds of parameters are the same,
    and share a group."""
    for shape in shapes(sizes):
        groups = {ranks for axes in FAMILIES for ranks in shape.peers(0, axes) if len(ranks) > 1}
        assert len(groups) <= 9, shape


def test_groups_reach_the_peers_of_their_axes_and_are_made_once():
    """tensor 2 on pair 2, context 2 on node 2, data 2 on world 2."""
    every = [("tensor",), ("context",), ("data",), ("context", "data"), DATA_PARALLEL]

    def body(mesh):
        at_start = mesh.describe_groups()
        found = {}
        for axes in every:
            total = torch.tensor([2.0**mesh.rank])
            hierarchy = mesh.hierarchy(axes)
            assert mesh.hierarchy(list(reversed(axes))) is hierarchy
            assert hierarchy.arbiter is mesh.arbiter
            for group in hierarchy.groups:
                if group is not None:
                    dist.all_reduce(total, group=group)
            found[axes] = (int(total), hierarchy.levels.sizes, hierarchy.rank)
        return found, at_start, mesh.describe_groups()

    results = run_mesh((2, 2, 2), body, splits=Splits(tensor=2, context=2))
    for rank, (found, at_start, at_end) in enumerate(results):
        assert at_start == at_end == "communicators: 6 a rank (3 control, 3 tensor+context+data)"
        tensor, context, data = rank & 1, rank >> 1 & 1, rank >> 2
        pair = {rank, rank ^ 1}
        assert found["tensor",] == (sum(1 << r for r in pair), (2, 1, 1), tensor)
        assert found["context",] == (sum(1 << r for r in (rank, rank ^ 2)), (1, 2, 1), context)
        assert found["data",] == (sum(1 << r for r in (rank, rank ^ 4)), (1, 1, 2), data)
        others = sum(1 << r for r in range(8) if r & 1 == tensor)
        assert found["context", "data"] == (others, (1, 2, 2), context + 2 * data)
        assert found[DATA_PARALLEL] == (255, (2, 2, 2), rank)


def test_a_pipeline_and_a_level_that_splits_share_have_groups_of_their_own():
    def body(mesh):
        rank = torch.tensor([2.0**mesh.rank])
        found = []
        for axes in (("tensor",), ("context", "data"), ("pipeline",)):
            total = rank.clone()
            for group in mesh.hierarchy(axes).groups:
                if group is not None:
                    dist.all_reduce(total, group=group)
            found.append({r for r in range(8) if int(total) >> r & 1})
        return found, mesh.describe_groups()

    results = run_mesh((4, 2), body, splits=Splits(tensor=2, pipeline=2))
    for rank, (found, line) in enumerate(results):
        assert found == [{rank, rank ^ 1}, {rank, rank ^ 2}, {rank, rank ^ 4}]
        assert line == (
            "communicators: 6 a rank (2 control, 1 tensor+context+data, 1 pipeline, 1 tensor, "
            "1 context+data)"
        )


def test_two_engines_on_different_hierarchies_take_turns():
    def body(mesh):
        hierarchies = mesh.hierarchy(), mesh.hierarchy(("context", "data"))
        engines = [place(hierarchy, "zero2", overlap="full")[1] for hierarchy in hierarchies]
        for units in zip(*(engine.units for engine in engines), strict=True):
            for unit in units:
                for index, parameter in enumerate(unit.parameters):
                    parameter.grad = torch.full(parameter.shape, 2.0**mesh.rank)
                    unit.collect_gradient(index, parameter)
                unit.start_reducing()
        found = [torch.cat(engine.finish_gradients()) for engine in engines]
        return [set(gradients.tolist()) - {0.0} for gradients in found]  # 0: padding

    results = run_mesh((2, 2), body, splits=Splits(tensor=2))
    assert results == [[{15.0}, {5.0}], [{15.0}, {10.0}]] * 2
