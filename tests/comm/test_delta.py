"""Published weight deltas: the same bits on every copy, rounded once, errors made up for later."""

from itertools import product

import pytest
import torch

from megafrontier.comm.wires.block import INT4, INT8
from megafrontier.comm.wires.registry import DTYPES
from tests.partition.codecs import read, write
from tests.partition.tiny import bits, build, engine_step, preset
from tests.ranks import make_levels, run_ranks


def publish(engine):
    engine.publish()
    engine.finish_publishing()


def largest_difference(engine, dtype=torch.float32):
    """Between published weights and masters, without what `dtype` cannot hold."""
    differences = [u.published.float() - u.master.to(dtype).float() for u in engine.units]
    return max(difference.abs().max().item() for difference in differences)


def test_published_weights_have_the_same_bits_everywhere_and_follow_the_masters():
    """After many steps, the copies lag behind by less than half of a step's largest change."""

    def body(hierarchy):
        model, engine, optimizer = build(hierarchy, preset("low", "topo"))
        for step in range(10):
            before = [unit.master.clone() for unit in engine.units]
            engine_step(engine, model, optimizer, step, 1)
        engine.finish_publishing()
        moved = [
            (unit.master - old).abs().max().item()
            for unit, old in zip(engine.units, before, strict=True)
        ]
        return [bits(unit.weights) for unit in engine.units], largest_difference(engine), max(moved)

    found = run_ranks((2, 2, 2), body)
    for rank, (weights, _, _) in enumerate(found):
        assert weights == found[rank % 2][0]  # ranks at the same place in their pair
    assert max(lag for _, lag, _ in found) < max(moved for _, _, moved in found) / 2


CONSTANT = [("zero1", ["pair", "world"]), ("topo", ["world"]), ("hpz", ["world"])]
NUMBERS = [("fp32", "delta4"), ("bf16", "delta4"), ("bf16", "delta8")]


def test_a_constant_change_is_published_in_full_over_time():
    """The error of one delta is part of the next one, so the copies end at the masters."""

    def lags(hierarchy, strategy, levels, precision, name):
        gather, dtype = dict.fromkeys(levels, name), DTYPES[precision]
        wires = preset("exact", strategy, hierarchy.levels, precision, gather=gather)
        _, engine, _ = build(hierarchy, wires, strategy, dtype=dtype)
        torch.manual_seed(0)
        for unit in engine.units:
            unit.master.add_(torch.randn_like(unit.master))
        found = []
        for _ in range(8):
            publish(engine)
            found.append(largest_difference(engine, dtype))
        return found

    def body(hierarchy):
        return {
            (strategy, *numbers): lags(hierarchy, strategy, levels, *numbers)
            for (strategy, levels), numbers in product(CONSTANT, NUMBERS)
        }

    for found in run_ranks((2, 2), body):
        for case, behind in found.items():
            assert behind[-1] < 1e-4 * behind[0], case
            assert "fp32" in case or behind[-1] == 0, case


@pytest.mark.parametrize(("name", "codec"), [("delta4", INT4), ("delta8", INT8)])
def test_a_delta_is_rounded_once_however_many_levels_send_it(name, codec):
    def body(hierarchy):
        gather = dict.fromkeys(hierarchy.levels.names, name)
        wires = preset("exact", "zero1", hierarchy.levels, gather=gather)
        _, engine, _ = build(hierarchy, wires, "zero1")
        before = [unit.published.clone() for unit in engine.units]
        for unit in engine.units:
            unit.master.add_(torch.randn(unit.master.shape) * (1 + hierarchy.rank))
        publish(engine)
        return all(
            torch.equal(unit.published, old + read(codec, write(codec, delta), len(old))[0])
            for unit, old in zip(engine.units, before, strict=True)
            for delta in [(unit.master - old).view(1, -1)]
        )

    assert run_ranks((2, 2), body) == [True] * 4


def test_a_level_of_one_rank_does_not_end_the_deltas():
    """Whatever its wire is: it sends nothing, and the levels inside it go on with the delta."""
    levels = make_levels((1, 2, 1, 2))

    def body(hierarchy):
        found = []
        for between in ("delta4", "int8"):
            chosen = {"node": "delta4", "rack": between, "world": "delta4"}
            wires = preset("exact", "topo", levels, gather=chosen)
            model, engine, optimizer = build(hierarchy, wires)
            losses = [engine_step(engine, model, optimizer, step, 1) for step in range(3)]
            engine.finish_publishing()
            found.append((losses, [bits(unit.weights) for unit in engine.units]))
        return found[0] == found[1]

    assert run_ranks((1, 2, 1, 2), body) == [True] * 4


def test_after_a_delta_another_format_is_rounded_alike_on_every_copy():
    """And the rounding of each step is part of the next delta."""
    formats = [("int8", "delta4"), ("delta8", "delta4"), ("delta4", "delta8")]

    def train(hierarchy, node, world):
        wires = preset("exact", "topo", gather={"node": node, "world": world})
        model, engine, optimizer = build(hierarchy, wires)
        for step in range(5):
            engine_step(engine, model, optimizer, step, 1)
        engine.finish_publishing()
        largest = max(u.master.abs().max().item() for u in engine.units)
        weights = [bits(unit.weights) for unit in engine.units]
        return weights, largest_difference(engine), largest

    ranks = run_ranks((2, 2, 2), lambda hierarchy: [train(hierarchy, *pair) for pair in formats])
    for pair, found in zip(formats, zip(*ranks, strict=True), strict=True):
        for rank, (weights, _, _) in enumerate(found):
            assert weights == found[rank % 2][0], pair
        assert max(lag for _, lag, _ in found) < max(largest for _, _, largest in found) / 127, pair
