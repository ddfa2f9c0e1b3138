"""Collectives of several levels are issued in the same order by all ranks, or the ranks are named.

What they compute is tested with the engine and in `wires/test_wire.py`.
"""

from contextlib import suppress

import pytest

from megafrontier.partition import Placement
from tests.partition.sharding import shard
from tests.partition.tiny import TinyModel, backward, batch, watch_collectives
from tests.ranks import run_ranks

POLICIES = pytest.mark.parametrize("policy", ["none", "full"])


def build_checked(hierarchy, placement, policy):
    """A model and its engine with `check_order`."""
    model = TinyModel(tied=False)
    options = {"check_order": True, "overlap": policy}
    return model, shard(model, model.units(), placement, hierarchy, **options)


def error_of(act):
    with pytest.raises(RuntimeError) as error:
        act()
    return str(error.value)


def expect(rank, own, peer, other):
    return f"collectives in another order: rank {rank} comes to {own}, rank {peer} to {other}"


@POLICIES
def test_ranks_that_disagree_on_the_order_are_named_with_their_units(policy):
    """By their ranks in the world, not in the group of the level."""

    def body(hierarchy):
        model, engine = build_checked(hierarchy, Placement(2, 2, 2, 2), policy)
        backward(engine, model(batch(0)[:2]))
        engine.finish_gradients()
        for unit in engine.units:
            unit.reshard()
        deviates = hierarchy.rank in (2, 3)
        error = error_of(engine.units[2 if deviates else 1].unshard)
        if policy != "none":  # an engine that uses the groups later learns of the error, too
            with pytest.raises(RuntimeError, match="in another order"):
                hierarchy.arbiter.drain()
        return error

    _, second, _, fourth = run_ranks((2, 2), body)
    first, other = "'gather blocks.0' over 'world'", "'gather blocks.1' over 'world'"
    assert expect(1, first, 3, other) in second
    assert expect(3, other, 1, first) in fourth


@POLICIES
def test_ranks_at_different_levels_are_named_and_do_not_wait_in_a_circle(policy):
    """Two ranks reduce over their pair while their peers in it gather over the world."""

    def body(hierarchy):
        _model, engine = build_checked(hierarchy, Placement(2, 2, 2, 2), policy)
        unit = engine.units[1]
        calls = [unit.start_reducing, unit.unshard]

        def act():
            for call in calls if hierarchy.rank in (0, 3) else reversed(calls):
                call()

        error = error_of(act)
        with suppress(RuntimeError):  # the stream raises it again
            hierarchy.arbiter.drain()
        return error

    labels = {True: "'reduce blocks.0' over 'pair'", False: "'gather blocks.0' over 'world'"}
    for rank, error in enumerate(run_ranks((2, 2), body)):
        own, other = labels[rank in (0, 3)], labels[rank not in (0, 3)]
        assert expect(rank, own, rank ^ 1, other) in error


LABELS = {"gather": "pair", "reduce": "pair", "finish": "world", "publish": "world"}
"""Of all collectives, with the first level that each uses here."""


def test_the_order_of_every_collective_is_compared():
    def body(hierarchy):
        errors = []
        for label in LABELS:
            _model, engine = build_checked(hierarchy, Placement(1, 1, 1, 2), "none")
            unit = engine.units[2 if hierarchy.rank in (2, 3) else 1]
            calls = {
                "gather": unit.start_unshard,
                "reduce": unit.start_reducing,
                "finish": unit.start_finishing,
                "publish": unit.start_publishing,
            }
            errors.append(error_of(calls[label]))
        return errors

    found = run_ranks((2, 2), body)
    for rank, peer in ((1, 3), (2, 0)):
        for error, (label, level) in zip(found[rank], LABELS.items(), strict=True):
            own, other = (f"'{label} blocks.{int(r > 1)}' over '{level}'" for r in (rank, peer))
            assert expect(rank, own, peer, other) in error


@pytest.mark.parametrize("odd", [0, 2])
def test_the_one_rank_of_four_that_deviates_is_named(odd):
    def body(hierarchy):
        _model, engine = build_checked(hierarchy, Placement(1, 1, 1, 1), "none")
        return error_of(engine.units[2 if hierarchy.rank == odd else 1].unshard)

    for rank, error in enumerate(run_ranks((4,), body)):
        peer = odd if rank != odd else int(odd == 0)
        blocks = ("blocks.1", "blocks.0") if rank == odd else ("blocks.0", "blocks.1")
        own, other = (f"'gather {block}' over 'world'" for block in blocks)
        assert expect(rank, own, peer, other) in error


def test_a_slow_level_gathers_while_the_levels_inside_it_reduce():
    """One unit's reduction and the gather that starts with it, on one stream."""

    def body(hierarchy):
        model = TinyModel(tied=False)
        placement = Placement.named("zero3", hierarchy.levels)
        engine = shard(model, model.units(), placement, hierarchy, overlap="safe")
        issued = []
        watch_collectives(engine, lambda level, label: issued.append((level, label)))
        backward(engine, model(batch(0)[:2]))
        engine.finish_gradients()
        return issued

    expected = [
        ("world", "gather blocks.0"),
        ("pair", "reduce blocks.2"),
        ("node", "reduce blocks.2"),
        ("node", "gather blocks.0"),
        ("pair", "gather blocks.0"),
        ("world", "reduce blocks.2"),
    ]
    for issued in run_ranks((2, 2, 2), body):
        start = issued.index(expected[1]) - 1
        assert issued[start : start + len(expected)] == expected
