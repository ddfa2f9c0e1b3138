"""The formats that presets and single choices give, and the choices that are refused."""

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config import PartitionConfig, WiresConfig
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition import Placement
from megafrontier.partition.presets import auto_activations, has_error_feedback
from tests.partition.tiny import LEVELS, preset
from tests.ranks import make_levels


def names(wires):
    return [wire.name for wire in (*wires.gather, *wires.reduce)]


def test_presets_give_the_documented_formats():
    frontier = Levels(("pair", "node", "world"), (2, 4, 3))
    assert names(preset("low", "topo", frontier, "bf16")) == [
        "bf16", "delta4", "delta4",
        "bf16", "int8", "int4",
    ]  # fmt: skip
    assert names(preset("zero++", "hpz", frontier, "bf16")) == [
        "bf16", "bf16", "int8", "bf16", "int4", "int4",
    ]  # fmt: skip
    low = preset("low", "zero3", frontier, "bf16")
    assert not low.have_deltas
    assert [w.codec.rotates for w in low.reduce] == [False, True, True]


@pytest.mark.parametrize(
    ("name", "strategy", "chosen", "rotates", "feeds_back"),
    [
        # On request also if the errors take more than a shard, but not by default.
        ("low", "zero3", True, [False, True, True], True),
        ("zero++", "hpz", True, [False, True, True], True),
        ("exact", "topo", None, [False, False, False], False),
        ("zero++", "topo", None, [False, False, False], False),
        ("zero++", "topo", True, [False, True, True], True),
        ("low", "topo", None, [False, True, True], True),
        ("low", "topo", False, [False, False, False], False),
        # No level lies between the gradients and the optimizer state.
        ("low", "zero3", None, [False, True, True], False),
        ("low", "mics", None, [False, True, True], False),
    ],
)
def test_rotation_and_error_feedback_are_as_chosen_or_those_of_low(
    name, strategy, chosen, rotates, feeds_back
):
    wires = preset(name, strategy, rotation=chosen)
    assert [wire.codec.rotates for wire in wires.reduce] == rotates
    config = PartitionConfig(error_feedback=chosen, wires=WiresConfig(preset=name))
    placement = Placement.named(strategy, LEVELS)
    assert has_error_feedback(config, wires, placement, LEVELS) is feeds_back


@pytest.mark.parametrize(
    ("borders", "formats"),
    [
        ({"node": 50.0, "world": 12.5}, {"world": "int8"}),
        ({"node": 12.5, "world": 50.0, "site": 25.0}, {"node": "int8"}),
        ({"world": 12.5}, {"world": "int8"}),
        ({"node": 12.5, "world": 12.5}, {"node": "int8", "world": "int8"}),
    ],
)
def test_auto_gives_the_slowest_border_the_fewest_bits(borders, formats):
    assert auto_activations(borders) == formats


def test_on_one_node_low_keeps_errors_only_on_request():
    """No level is left over which topo reduces gradients once a step."""
    node = make_levels((2, 2, 1))
    placement, wires = Placement.named("topo", node), preset("low", "topo", node)
    for chosen, feeds_back in ((None, False), (True, True)):
        config = PartitionConfig(error_feedback=chosen, wires=WiresConfig(preset="low"))
        assert has_error_feedback(config, wires, placement, node) is feeds_back
    config = PartitionConfig(error_feedback=True, wires=WiresConfig(preset="exact"))
    with pytest.raises(UserError, match="error_feedback: true, but no level"):
        has_error_feedback(config, preset("exact", "topo"), placement, node)


def test_a_chosen_wire_outweighs_the_presets_deltas():
    """int8 between nodes leaves no delta to send inside them."""
    wires = preset("low", "topo", gather={"world": "int8"})
    assert names(wires)[:3] == ["fp32", "int8", "int8"]
    single = make_levels((2, 2, 1))  # the slower level has one rank
    assert preset("exact", "topo", single, gather={"node": "delta4"}).gather[1].is_delta


def test_every_level_between_nodes_is_quantized_to_4_bits():
    large = Levels(("pair", "node", "group", "world"), (2, 4, 32, 3))
    assert names(preset("low", "topo", large, "bf16")) == [
        "bf16", *["delta4"] * 3,
        "bf16", "int8", "int4", "int4",
    ]  # fmt: skip
    assert names(preset("zero++", "hpz", large, "bf16")) == [
        "bf16", "bf16", "int8", "int8",
        "bf16", "int4", "int4", "int4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names_", "low", "zero"),
    [
        (("world",), ["int4"], ["int4"]),
        (("pair", "node"), ["bf16", "int4"], ["int4"] * 2),
        (("node", "world"), ["bf16", "int4"], ["int4"] * 2),
    ],
)
def test_on_few_levels_the_last_one_is_quantized_to_4_bits(names_, low, zero):
    levels = Levels(names_, (2,) * len(names_))
    reduce = slice(len(names_), None)
    assert names(preset("low", "topo", levels, "bf16"))[reduce] == low
    assert names(preset("zero++", "topo", levels, "bf16"))[reduce] == zero


@pytest.mark.parametrize(
    ("strategy", "gather", "named"),
    [
        ("zero3", {"world": "delta4"}, "does not publish weights over that level"),
        ("topo", {"node": "delta8"}, "a slower level has no delta"),
        ("topo", {"rack": "int8"}, "no such level"),
    ],
)
def test_an_impossible_wire_is_refused_with_its_level(strategy, gather, named):
    with pytest.raises(UserError, match=named):
        preset("exact", strategy, gather=gather)


@pytest.mark.parametrize(
    ("chosen", "precision", "said"),
    [
        ({"reduce": {"world": "fp16"}}, "bf16", "reduce.world: fp16, but train.precision is bf16"),
        ({"gather": {"world": "fp16"}}, "fp32", "gather.world: fp16, but train.precision is fp32"),
        ({"gather": {"node": "fp32"}}, "bf16", "weights hold no more; need bf16"),
    ],
)
def test_casts_that_lose_range_or_add_nothing_are_refused(chosen, precision, said):
    with pytest.raises(UserError, match=said):
        preset("exact", "topo", precision=precision, **chosen)
    preset("exact", "topo", precision="fp16", reduce={"world": "fp16"})
    preset("exact", "topo", precision="bf16", reduce={"world": "fp32"})
