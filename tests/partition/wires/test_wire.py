"""Low-bit wires in the moves: the same bits on every rank, bytes as promised, errors carried on."""

from functools import cache

import pytest
import torch

from megafrontier.common.buffers import Workspace
from megafrontier.partition import STRATEGIES, Placement
from megafrontier.partition.comm import collectives
from megafrontier.partition.placement import traffic_bytes
from megafrontier.partition.wires import wire as wire_module
from megafrontier.partition.wires.block import INT4, INT8
from megafrontier.partition.wires.wire import make_wire
from tests.partition.codecs import read, write
from tests.partition.tiny import (
    LEVELS,
    batch,
    bits,
    build,
    engine_step,
    finished_gradients,
    preset,
    train_alone,
    train_sharded,
)
from tests.ranks import make_levels, run_ranks

PRESETS = ["zero++", "low"]
SHAPES = [(2, 2, 2), (3, 2), (2, 1, 3), (4,)]
"""Of machines: groups of one, two, three and four ranks."""
ON_SHAPES = pytest.mark.parametrize(
    ("name", "sizes"),
    [("low", sizes) for sizes in SHAPES]
    + [("zero++", (2, 2, 2)), ("zero++", (2, 1, 3)), ("exact", (3, 2))],
    ids=str,
)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_with_every_strategy_near_the_exact_losses(name):
    def body(hierarchy):
        found = {}
        for strategy in STRATEGIES:
            wires, placement = preset(name, strategy), Placement.named(strategy, LEVELS)
            found[strategy] = train_sharded(hierarchy, placement, False, 4, 2, wires)
        return found

    found = run_ranks((2, 2, 2), body)
    assert all(losses == found[0] for losses in found)
    exact = train_alone(False, 4)
    for strategy, losses in found[0].items():
        assert losses == pytest.approx(exact, rel=0.1), strategy


@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [
        ("topo", {"reduce": {"pair": "fp32", "node": "fp32", "world": "fp32"}}),
        ("topo", {"reduce": {"pair": "int4", "node": "fp32", "world": "int8"}}),
        ("zero3", {"gather": {"pair": "int8", "node": "int4", "world": "int4"}}),
        ("zero1", {"gather": {"pair": "bf16", "node": "int4", "world": "int8"}}),
    ],
    ids=str,
)
def test_formats_that_no_preset_has_train_as_promised(strategy, chosen):
    def body(hierarchy):
        wires = preset("exact", strategy, LEVELS, "bf16", **chosen)
        model, engine, optimizer = build(hierarchy, wires, strategy, dtype=torch.bfloat16)
        losses = [engine_step(engine, model, optimizer, step, 2) for step in range(5)]
        engine.finish_publishing()
        sent, _ = engine.ledger.take()
        steps = [5 * count for count in engine.step_bytes(2)]
        return losses, sent, steps

    found = run_ranks((2, 2, 2), body)
    assert all(losses == found[0][0] for losses, _, _ in found)
    assert found[0][0] == pytest.approx(train_alone(False, 5), rel=0.02)
    assert all(sent == steps for _, sent, steps in found)


@pytest.mark.parametrize("name", PRESETS)
def test_two_runs_are_bit_identical(name):
    def body(hierarchy):
        runs = []
        for _ in range(2):
            model, engine, optimizer = build(hierarchy, preset(name, "topo"), error_feedback=True)
            losses = [engine_step(engine, model, optimizer, step, 2) for step in range(4)]
            runs.append((losses, [bits(unit.master) for unit in engine.units]))
        return runs

    for first, second in run_ranks((2, 2, 2), body):
        assert first == second


@cache
def trained(name, sizes):
    """After two steps with each strategy, on each rank: bytes that were sent and those by the
    formula, and the bits of what it holds, by (strategy, unit, state, piece)."""

    def body(hierarchy):
        sent, held = {}, {}
        for strategy in STRATEGIES:
            wires = preset(name, strategy, hierarchy.levels, "bf16")
            model, engine, optimizer = build(hierarchy, wires, strategy, dtype=torch.bfloat16)
            for step, accumulation in enumerate((2, 1)):
                engine_step(engine, model, optimizer, step, accumulation)
            engine.finish_publishing()
            steps = zip(engine.step_bytes(2), engine.step_bytes(1), strict=True)
            sent[strategy] = engine.ledger.take()[0], [sum(counts) for counts in steps]
            for unit in engine.units:
                place = unit.placement
                states = [(place.optimizer, "master"), (place.backward_weights, "weights")]
                for depth, state in states:
                    piece = hierarchy.shard_index(depth)[0]
                    held[strategy, unit.name, state, piece] = bits(getattr(unit, state))
                unit.unshard()
                held[strategy, unit.name, "full", 0] = bits(unit.full)
                unit.reshard()
        return sent, held

    return run_ranks(sizes, body)


@ON_SHAPES
def test_bytes_on_the_wire_equal_the_formula(name, sizes):
    for rank, _ in trained(name, sizes):
        for strategy, (sent, formula) in rank.items():
            assert sent == formula, strategy


@pytest.mark.parametrize(
    ("name", "sizes"), [("low", (2, 1, 3)), ("zero++", (2, 2, 2)), ("exact", (3, 2))], ids=str
)
def test_the_ledger_counts_what_the_collectives_are_given(name, sizes):
    """Its bytes and the formula's are the codecs' own word; here they are those of the buffers."""

    def body(hierarchy):
        number = {id(group): level for level, group in enumerate(hierarchy.groups)}
        given = [0] * len(number)

        def all_gather(out, shard, group):
            given[number[id(group)]] += out.nbytes - shard.nbytes
            real_gather(out, shard, group)

        def all_to_all(out, parts, group, sizes=None):
            whole = parts.nbytes if sizes else parts.nbytes // group.size() * (group.size() - 1)
            given[number[id(group)]] += whole
            real_all_to_all(out, parts, group, sizes)

        real_gather, real_all_to_all = wire_module.all_gather, wire_module.all_to_all
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire_module, "all_gather", all_gather)
            patch.setattr(collectives, "all_gather", all_gather)
            patch.setattr(wire_module, "all_to_all", all_to_all)
            for strategy in STRATEGIES:
                wires = preset(name, strategy, hierarchy.levels)
                model, engine, _ = build(hierarchy, wires, strategy)
                given[:] = [0] * len(number)
                engine.backward(model(batch(0)[:2]))
                engine.finish_gradients()
                engine.publish()
                engine.finish_publishing()
                found.append((engine.ledger.take()[0], list(given)))
        return found

    for rank in run_ranks(sizes, body):
        for counted, given in rank:
            assert counted == given
        assert any(sum(given) for _, given in rank)


@ON_SHAPES
def test_every_copy_of_a_piece_of_any_state_has_the_same_bits(name, sizes):
    """Masters of replicas, shards of published weights, and whole weights as blocks see them."""
    copies = {}
    for _, rank in trained(name, sizes):
        for key, found in rank.items():
            copies.setdefault(key, set()).add(found)
    assert [key for key, found in copies.items() if len(found) > 1] == []
    assert {state for _, _, state, _ in copies} == {"master", "weights", "full"}


@pytest.mark.parametrize(("name", "small"), [("bf16", 2**-9), ("fp16", 2**-12)])
def test_what_is_sent_in_16_bits_is_summed_in_32(name, small):
    """Each of the small values would vanish beside 1 in the type that was sent."""

    def body(hierarchy):
        pieces = torch.full((4, 5), 1.0 if hierarchy.rank == 0 else small)
        workspace = Workspace(pieces.device)
        return make_wire(name).reduce(pieces, hierarchy.groups[0], workspace)[0].tolist()

    assert run_ranks((4,), body) == [[1 + 3 * small] * 5] * 4


def test_low_sends_a_quarter_of_bf16_between_nodes():
    numel = 2**20
    placement = Placement.named("topo", LEVELS)
    low, exact = (
        traffic_bytes(numel, placement, LEVELS, preset(n, "topo", precision="bf16"), 4, 8)[-1]
        for n in ("low", "exact")
    )
    assert low / exact == pytest.approx((4 + 1 / 8) / 16, rel=1e-3)


def test_published_weights_are_the_same_bits_everywhere_and_follow_the_masters():
    """After many steps the copies lag behind the masters by less than one step's quantisation."""

    def body(hierarchy):
        model, engine, optimizer = build(hierarchy, preset("low", "topo"))
        for step in range(15):
            engine_step(engine, model, optimizer, step, 1)
        engine.finish_publishing()
        before = [unit.master.clone() for unit in engine.units]
        engine_step(engine, model, optimizer, 15, 1)
        engine.finish_publishing()
        lag = moved = 0.0
        for unit, old in zip(engine.units, before, strict=True):
            lag = max(lag, (unit.published - unit.master).abs().max().item())
            moved = max(moved, (unit.master - old).abs().max().item())
        return [unit.weights.clone() for unit in engine.units], lag, moved

    found = run_ranks((2, 2, 2), body)
    for rank in range(8):
        peer = rank % 2  # all ranks with the same place in their pair hold the same shard
        for mine, theirs in zip(found[rank][0], found[peer][0], strict=True):
            assert torch.equal(mine, theirs)
    assert max(lag for _, lag, _ in found) < max(moved for _, _, moved in found) / 2


@pytest.mark.parametrize(
    ("strategy", "levels"), [("zero1", ["node", "world"]), ("topo", ["world"]), ("hpz", ["world"])]
)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "delta4"), (torch.bfloat16, "delta4"), (torch.bfloat16, "delta8")],
)
def test_a_constant_change_is_published_in_full_over_time(dtype, strategy, levels, name):
    """What one delta cannot say, the next does: the copies end at the masters, not beside them."""

    def body(hierarchy):
        precision = "fp32" if dtype is torch.float32 else "bf16"
        wires = preset("exact", strategy, LEVELS, precision, gather=dict.fromkeys(levels, name))
        _, engine, _ = build(hierarchy, wires, strategy, dtype=dtype)
        torch.manual_seed(0)
        for unit in engine.units:
            unit.master.add_(torch.randn_like(unit.master))
        lags = []
        for _ in range(12):
            engine.publish()
            engine.finish_publishing()
            # What bf16 copies cannot hold of a master is nothing that could be published.
            differences = [u.published.float() - u.master.to(dtype).float() for u in engine.units]
            lags.append(max(difference.abs().max().item() for difference in differences))
        return lags

    for lags in run_ranks((2, 2, 2), body):
        assert lags[-1] < 1e-4 * lags[0]
        assert dtype is torch.float32 or lags[-1] == 0


@pytest.mark.parametrize(("name", "codec"), [("delta4", INT4), ("delta8", INT8)])
def test_a_delta_is_rounded_once_however_many_levels_it_crosses(name, codec):
    def body(hierarchy):
        wires = preset("exact", "zero1", gather=dict.fromkeys(LEVELS.names, name))
        _, engine, _ = build(hierarchy, wires, "zero1")
        before = [unit.published.clone() for unit in engine.units]
        for unit in engine.units:
            unit.master.add_(torch.randn(unit.master.shape) * (1 + hierarchy.rank))
        engine.publish()
        engine.finish_publishing()
        return all(
            torch.equal(unit.published, old + read(codec, write(codec, said), len(old))[0])
            for unit, old in zip(engine.units, before, strict=True)
            for said in [(unit.master - old).view(1, -1)]
        )

    assert run_ranks((2, 2, 2), body) == [True] * 8


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_arrive_unscaled_over_all_levels(name, strategy):
    """Adam would hide a gain. What rounding adds is a part of the norm, and on no side of it."""

    def body(hierarchy):
        arrived = []
        for preset_name in (name, "exact"):
            _, engine, _ = build(hierarchy, preset(preset_name, strategy), strategy)
            arrived.append(torch.cat(finished_gradients(engine, hierarchy.rank)))
        said, exact = arrived
        return (said * exact).sum(), (said - exact).square().sum(), exact.square().sum()

    gain, error, norm = (float(sum(part)) for part in zip(*run_ranks((2, 2, 2), body), strict=True))
    assert gain / norm == pytest.approx(1, abs=0.01)
    assert 0.001 < (error / norm) ** 0.5 < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_rank_keeps_of_its_own_gradient_is_not_rounded(dtype):
    """Of a sum over a level it holds one piece, which crosses no link; where the sum begins depends
    on the type."""

    def body(hierarchy):
        generator = torch.Generator().manual_seed(hierarchy.rank)
        own = torch.randn(300, generator=generator).to(dtype)
        pieces, errors = torch.zeros(4, 300, dtype=dtype), torch.zeros(4, 300)
        pieces[hierarchy.rank] = own
        errors[hierarchy.rank] = 1.0
        wire, workspace = make_wire("int4", rotates=True), Workspace(own.device)
        out, sent = wire.reduce(pieces, hierarchy.groups[0], workspace, errors)
        return torch.equal(out, own.float() + 1.0), errors.abs().sum().item(), sent

    assert run_ranks((4,), body) == [(True, 0.0, 3 * INT4.message_bytes(300))] * 4


def test_small_elements_arrive_over_every_leg_of_a_sum_over_replicas():
    """Plain 4-bit codes say nothing of what lies far below the largest of its block."""

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


def test_padding_stays_zero_though_rotations_mix_it_with_the_last_parameter():
    def body(hierarchy):
        model, engine, optimizer = build(hierarchy, preset("low", "topo"), error_feedback=True)
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

    assert run_ranks((2, 2, 2), body) == [0.0] * 8


def test_a_level_of_one_rank_does_not_turn_a_change_into_values():
    """Whatever its wire is: nothing crosses it, and the levels inside it go on with the change."""
    levels = make_levels((2, 2, 1, 2))

    def body(hierarchy):
        found = []
        for between in ("delta4", "int8"):
            chosen = {"node": "delta4", "rack": between, "world": "delta4"}
            wires = preset("exact", "topo", levels, gather=chosen)
            model, engine, optimizer = build(hierarchy, wires)
            losses = [engine_step(engine, model, optimizer, step, 2) for step in range(3)]
            engine.finish_publishing()
            found.append((losses, [bits(unit.weights) for unit in engine.units]))
        return found[0] == found[1]

    assert run_ranks((2, 2, 1, 2), body) == [True] * 8


@pytest.mark.parametrize(
    ("node", "world"), [("int8", "delta4"), ("delta8", "delta4"), ("delta4", "delta8")]
)
def test_what_goes_on_from_a_delta_in_another_format_is_rounded_alike_on_every_copy(node, world):
    """And each step's rounding is part of the next change."""

    def body(hierarchy):
        wires = preset("exact", "topo", gather={"node": node, "world": world})
        model, engine, optimizer = build(hierarchy, wires)
        for step in range(12):
            engine_step(engine, model, optimizer, step, 1)
        engine.finish_publishing()
        lag = max((u.published - u.master).abs().max().item() for u in engine.units)
        largest = max(u.master.abs().max().item() for u in engine.units)
        return [bits(unit.weights) for unit in engine.units], lag, largest

    found = run_ranks((2, 2, 2), body)
    for rank, (weights, _, _) in enumerate(found):
        assert weights == found[rank % 2][0]
    assert max(lag for _, lag, _ in found) < max(largest for _, _, largest in found) / 127
