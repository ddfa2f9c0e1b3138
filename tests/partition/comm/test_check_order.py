"""With `check_order` ranks that come to different collectives are named, and none waits long."""

from contextlib import suppress

import pytest

from megafrontier.partition import Placement, shard
from tests.partition.tiny import TinyModel, batch
from tests.ranks import run_ranks


def checked(hierarchy, placement, overlap):
    """A model and its engine, whose ranks compare what they are about to do."""
    model = TinyModel(tied=False)
    options = {"check_order": True, "overlap": overlap}
    return model, shard(model, model.units(), placement, hierarchy, **options)


@pytest.mark.parametrize("policy", ["none", "safe", "full"])
def test_ranks_that_disagree_on_the_order_are_named_with_their_units(policy):
    """By their numbers in the world, not in the level's group."""

    def body(hierarchy):
        model, engine = checked(hierarchy, Placement(2, 2, 2, 2), policy)
        engine.backward(model(batch(0)[:2]))
        engine.finish_gradients()
        for unit in engine.units:
            unit.reshard()
        deviates = hierarchy.rank in (2, 3)
        engine.units[2 if deviates else 1].unshard()

    def caught(hierarchy):
        with pytest.raises(RuntimeError) as error:
            body(hierarchy)
        if policy != "none":  # what a lane has raised does not get lost with it either
            with pytest.raises(RuntimeError, match="in another order"):
                hierarchy.arbiter.drain()
        return str(error.value)

    _, second, _, fourth = run_ranks((2, 2), caught)
    said = "collectives in another order: "
    first, other = "'gather blocks.0' over 'world'", "'gather blocks.1' over 'world'"
    assert f"{said}rank 1 comes to {first}, rank 3 to {other}" in second
    assert f"{said}rank 3 comes to {other}, rank 1 to {first}" in fourth


@pytest.mark.parametrize("policy", ["none", "safe", "full"])
def test_ranks_that_come_to_different_levels_are_named_and_do_not_wait_in_a_circle(policy):
    """Two come to the pair's reduction while their peers in it come to the world's gathering."""

    def caught(hierarchy):
        _model, engine = checked(hierarchy, Placement(2, 2, 2, 2), policy)
        unit = engine.units[1]
        moves = [unit.start_reducing, unit.unshard]

        def act():
            for move in moves if hierarchy.rank in (0, 3) else reversed(moves):
                move()

        with pytest.raises(RuntimeError) as error:
            act()
        with suppress(RuntimeError):  # which a lane says again at its end
            hierarchy.arbiter.drain()
        return str(error.value)

    moves = {True: "'reduce blocks.0' over 'pair'", False: "'gather blocks.0' over 'world'"}
    for rank, said in enumerate(run_ranks((2, 2), caught)):
        mine, theirs = moves[rank in (0, 3)], moves[rank not in (0, 3)]
        assert f"order: rank {rank} comes to {mine}, rank {rank ^ 1} to {theirs}" in said


@pytest.mark.parametrize(
    ("move", "over"),
    [("gather", "pair"), ("reduce", "pair"), ("finish", "world"), ("publish", "world")],
)
def test_every_move_is_compared(move, over):
    def caught(hierarchy):
        _model, engine = checked(hierarchy, Placement(1, 1, 1, 2), "none")
        unit = engine.units[2 if hierarchy.rank in (2, 3) else 1]
        begin = {
            "gather": unit.start_unshard,
            "reduce": unit.start_reducing,
            "finish": unit.start_finishing,
            "publish": unit.start_publishing,
        }
        with pytest.raises(RuntimeError) as error:
            begin[move]()
        return str(error.value)

    found = run_ranks((2, 2), caught)
    for rank, peer in ((1, 3), (2, 0)):
        mine, theirs = (f"'{move} blocks.{int(r > 1)}' over '{over}'" for r in (rank, peer))
        assert f"order: rank {rank} comes to {mine}, rank {peer} to {theirs}" in found[rank]


@pytest.mark.parametrize("odd", [0, 2])
def test_the_one_rank_of_four_that_does_something_else_is_named(odd):
    def caught(hierarchy):
        _model, engine = checked(hierarchy, Placement(1, 1, 1, 1), "none")
        with pytest.raises(RuntimeError) as error:
            engine.units[2 if hierarchy.rank == odd else 1].unshard()
        return str(error.value)

    for rank, said in enumerate(run_ranks((4,), caught)):
        other = odd if rank != odd else int(odd == 0)
        mine, theirs = ("blocks.1", "blocks.0") if rank == odd else ("blocks.0", "blocks.1")
        mine, theirs = f"'gather {mine}' over 'world'", f"'gather {theirs}' over 'world'"
        assert f"rank {rank} comes to {mine}, rank {other} to {theirs}" in said
