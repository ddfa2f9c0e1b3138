"""Wires in training: the same bits on every rank, bytes as the formula says, sums without bias."""

from functools import cache

import pytest
import torch

from megafrontier.comm import collectives
from megafrontier.comm.wires import wire as wire_module
from megafrontier.comm.wires.block import INT4
from megafrontier.comm.wires.wire import make_wire
from megafrontier.common.buffers import Workspace
from megafrontier.partition import STRATEGIES, Placement
from megafrontier.planner.estimate import state_bytes
from scripts.benchmarks.shared.step_bytes import step_bytes
from tests.partition.tiny import (
    LEVELS,
    bits,
    build,
    engine_step,
    finished_gradients,
    preset,
    train_alone,
    train_sharded,
)
from tests.ranks import run_ranks

PRESETS = ["zero++", "low"]
ON_SHAPES = pytest.mark.parametrize(
    ("name", "sizes"),
    [("low", (2, 2, 2)), ("low", (2, 1, 3)), ("zero++", (2, 1, 3)), ("exact", (3, 2))],
    ids=str,
)
"""Groups of one, two and three ranks."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_with_every_strategy_near_the_exact_losses(name):
    def body(hierarchy):
        found = {}
        for strategy in STRATEGIES:
            placement = Placement.named(strategy, hierarchy.levels)
            wires = preset(name, strategy, hierarchy.levels)
            found[strategy] = train_sharded(hierarchy, placement, False, 3, 1, wires)
        return found

    found = run_ranks((2, 2), body)
    assert all(losses == found[0] for losses in found)
    exact = train_alone(False, 3)
    for strategy, losses in found[0].items():
        assert losses == pytest.approx(exact, rel=0.1), strategy


MIXED = [
    ("topo", {"reduce": {"pair": "fp32", "node": "fp32", "world": "fp32"}}),
    ("topo", {"reduce": {"pair": "int4", "node": "fp32", "world": "int8"}}),
    ("zero3", {"gather": {"pair": "int8", "node": "int4", "world": "int4"}}),
    ("zero1", {"gather": {"pair": "bf16", "node": "int4", "world": "int8"}}),
]


def test_formats_of_no_preset_train_and_send_the_bytes_of_the_formula():
    def train(hierarchy, strategy, chosen):
        wires = preset("exact", strategy, LEVELS, "bf16", **chosen)
        model, engine, optimizer = build(hierarchy, wires, strategy, dtype=torch.bfloat16)
        losses = [engine_step(engine, model, optimizer, step, 2) for step in range(2)]
        engine.finish_publishing()
        sent, _ = engine.ledger.take()
        return losses, sent, [2 * count for count in step_bytes(engine, 2)]

    ranks = run_ranks((2, 2, 2), lambda hierarchy: [train(hierarchy, *case) for case in MIXED])
    for case, found in zip(MIXED, zip(*ranks, strict=True), strict=True):
        assert all(losses == found[0][0] for losses, _, _ in found), case
        assert found[0][0] == pytest.approx(train_alone(False, 2), rel=0.02), case
        assert all(sent == formula for _, sent, formula in found), case


def count_given_bytes(hierarchy, patch):
    """Bytes per level of the buffers that the collectives are given from here on."""
    number = {id(group): level for level, group in enumerate(hierarchy.groups)}
    given = [0] * len(number)

    def all_gather(out, shard, group):
        given[number[id(group)]] += out.nbytes - shard.nbytes
        real_gather(out, shard, group)

    def all_to_all(out, parts, group, sizes=None):
        sent = parts.nbytes if sizes else parts.nbytes // group.size() * (group.size() - 1)
        given[number[id(group)]] += sent
        real_all_to_all(out, parts, group, sizes)

    real_gather, real_all_to_all = wire_module.all_gather, wire_module.all_to_all
    patch.setattr(wire_module, "all_gather", all_gather)
    patch.setattr(collectives, "all_gather", all_gather)
    patch.setattr(wire_module, "all_to_all", all_to_all)
    return given


@cache
def trained(name, sizes):
    """After two steps with each strategy, or with three on other levels, on each rank: bytes by the
    ledger, by the formula and in the buffers of the collectives; and the bits it holds, by
    (strategy, unit, state, shard)."""

    def body(hierarchy):
        sent, held = {}, {}
        for strategy in STRATEGIES if sizes == (2, 2, 2) else ("zero2", "hpz", "topo"):
            wires = preset(name, strategy, hierarchy.levels, "bf16")
            model, engine, optimizer = build(hierarchy, wires, strategy, dtype=torch.bfloat16)
            with pytest.MonkeyPatch.context() as patch:
                given = count_given_bytes(hierarchy, patch)
                for step, accumulation in enumerate((2, 1)):
                    engine_step(engine, model, optimizer, step, accumulation)
                engine.finish_publishing()
            steps = zip(step_bytes(engine, 2), step_bytes(engine, 1), strict=True)
            sent[strategy] = engine.ledger.take()[0], [sum(counts) for counts in steps], given
            for unit in engine.units:
                place = unit.placement
                states = [(place.optimizer, "master"), (place.backward_weights, "weights")]
                for depth, state in states:
                    shard = hierarchy.shard_index(depth)[0]
                    held[strategy, unit.name, state, shard] = bits(getattr(unit, state))
                unit.unshard()
                held[strategy, unit.name, "full", 0] = bits(unit.full)
                unit.reshard()
        return sent, held

    return run_ranks(sizes, body)


@ON_SHAPES
def test_bytes_in_the_ledger_are_those_of_the_formula_and_of_the_collectives(name, sizes):
    for rank, _ in trained(name, sizes):
        for strategy, (sent, formula, given) in rank.items():
            assert sent == formula, strategy
            assert sent == given, strategy
            assert any(sent)


@ON_SHAPES
def test_every_copy_of_a_shard_of_any_state_has_the_same_bits(name, sizes):
    """Masters of replicas, shards of published weights, and full weights as blocks see them."""
    copies = {}
    for _, rank in trained(name, sizes):
        for key, found in rank.items():
            copies.setdefault(key, set()).add(found)
    assert [key for key, found in copies.items() if len(found) > 1] == []
    assert {state for _, _, state, _ in copies} == {"master", "weights", "full"}


@pytest.mark.parametrize(("name", "small"), [("bf16", 2**-9), ("fp16", 2**-12)])
def test_values_sent_in_16_bits_are_summed_in_32(name, small):
    """Each of the small values would vanish beside 1 in the type that was sent."""

    def body(hierarchy):
        shards = torch.full((4, 5), 1.0 if hierarchy.rank == 0 else small)
        workspace = Workspace(shards.device)
        return make_wire(name).reduce(shards, hierarchy.groups[0], workspace)[0].tolist()

    assert run_ranks((4,), body) == [[1 + 3 * small] * 5] * 4


def test_low_sends_a_quarter_of_bf16_between_nodes():
    placement = Placement.named("topo", LEVELS)
    low, exact = (
        state_bytes(2**20, placement, LEVELS, preset(n, "topo", precision="bf16"), 4, 8)[-1]
        for n in ("low", "exact")
    )
    assert low / exact == pytest.approx((4 + 1 / 8) / 16, rel=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_arrive_unscaled_with_every_strategy(name):
    """Adam would hide a gain. Rounding adds a part of the norm, without a bias."""

    def body(hierarchy):
        found = []
        for strategy in STRATEGIES:
            quantized, exact = (
                torch.cat(finished_gradients(build(hierarchy, wires, strategy)[1], hierarchy.rank))
                for wires in (preset(n, strategy, hierarchy.levels) for n in (name, "exact"))
            )
            error = (quantized - exact).square().sum()
            found.append(torch.stack([(quantized * exact).sum(), error, exact.square().sum()]))
        return torch.stack(found)

    for gain, error, norm in sum(run_ranks((2, 2), body)).tolist():
        assert gain / norm == pytest.approx(1, abs=0.01)
        assert 0.001 < (error / norm) ** 0.5 < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ranks_own_part_of_a_sum_is_not_rounded(dtype):
    """It is not sent. Where the sum is stored depends on the type."""

    def body(hierarchy):
        generator = torch.Generator().manual_seed(hierarchy.rank)
        own = torch.randn(300, generator=generator).to(dtype)
        shards, errors = torch.zeros(4, 300, dtype=dtype), torch.zeros(4, 300)
        shards[hierarchy.rank] = own
        errors[hierarchy.rank] = 1.0
        wire, workspace = make_wire("int4", rotates=True), Workspace(own.device)
        out, sent = wire.reduce(shards, hierarchy.groups[0], workspace, errors)
        return torch.equal(out, own.float() + 1.0), errors.abs().sum().item(), sent

    assert run_ranks((4,), body) == [(True, 0.0, 3 * INT4.message_bytes(300))] * 4


def test_small_elements_arrive_with_a_rotation():
    """Plain 4-bit codes drop elements far below the largest of their block."""

    def body(hierarchy):
        values = torch.ones(256)
        values[[7, 150]] = 100.0
        out, plain, workspace = torch.empty(512), torch.empty(512), Workspace(values.device)
        make_wire("int4", rotates=True).gather(values, out, hierarchy.groups[0], workspace)
        make_wire("int4").gather(values, plain, hierarchy.groups[0], workspace)
        return out, plain

    (out, plain), other = run_ranks((2,), body)
    assert torch.equal(out, other[0])
    assert plain.count_nonzero() == 4
    assert out.view(2, 256)[:, 10:140].mean() == pytest.approx(1.0, abs=0.3)


def test_padding_stays_zero_although_rotations_mix_it_with_the_last_parameter():
    def body(hierarchy):
        wires = preset("low", "topo", hierarchy.levels)
        model, engine, optimizer = build(hierarchy, wires, error_feedback=True)
        for step in range(2):
            engine_step(engine, model, optimizer, step, 2)
        engine.finish_publishing()
        engine.fold_errors()
        most = 0.0
        for unit in engine.units:
            start, stop = unit.range
            used = sum(last - first for _, first, last, _ in unit.layout.within(start, stop))
            for state in (unit.master, unit.published, unit.feedback.error):
                most = max(most, state[used:].abs().sum().item())
        return most

    assert run_ranks((2, 2), body) == [0.0] * 4
