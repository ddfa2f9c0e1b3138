"""The overlap policy changes when collectives run, never what they compute."""

import threading
import time

import pytest
import torch

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.partition import Placement
from tests.partition.sharding import shard
from tests.partition.tiny import (
    GLOBAL_BATCH,
    LENGTH,
    TinyModel,
    backward,
    batch,
    place,
    preset,
    watch_collectives,
)
from tests.ranks import run_ranks

CASES = [
    ("topo", "low", True, "bf16", 4),
    ("hpz", "zero++", False, "bf16", 2),
    ("zero3", "low", True, "bf16", 1),
    ("zero2", "exact", False, "fp32", 2),
    ("zero1", "low", True, "fp32", 2),
    ("ddp", "low", False, "bf16", 1),
]
"""Strategy, wires, error feedback, precision and accumulation."""
POLICIES = [("none", 1), ("safe", 1), ("safe", 3), ("full", 2)]
"""Overlap and prefetch."""
OVERLAPPING = pytest.mark.parametrize("policy", ["safe", "full"])


def train(
    hierarchy, strategy, name, error_feedback, overlap, prefetch, precision="fp32", accumulation=2,
    steps=2,
):  # fmt: skip
    """Losses of this rank's micro-batches, and its masters after the last step."""
    device, levels = hierarchy.device, hierarchy.levels
    model = TinyModel(tied=False).to(device)
    engine = shard(
        model, model.units(), Placement.named(strategy, levels), hierarchy,
        dtype=DTYPES[precision], wires=preset(name, strategy, levels, precision),
        error_feedback=error_feedback, overlap=overlap, prefetch=prefetch,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([unit.master for unit in engine.units], lr=0.02)
    losses = []
    for step in range(steps):
        part = batch(step).to(device).chunk(hierarchy.size)[hierarchy.rank]
        for i, tokens in enumerate(part.chunk(accumulation), start=1):
            loss = model(tokens)
            backward(engine, loss, is_last=i == accumulation)
            losses.append(loss.item())
        for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
            unit.master.grad = gradient / (GLOBAL_BATCH * (LENGTH - 1))
        optimizer.step()
        engine.finish_step(torch.zeros((), device=device))
    engine.finish_publishing()
    return losses, [unit.master.clone() for unit in engine.units]


@pytest.mark.parametrize(("sizes", "cases"), [((2, 2, 2), CASES[:1]), ((2, 2), CASES[1:])])
def test_all_policies_give_the_same_losses_and_masters_to_the_bit(sizes, cases):
    def body(hierarchy):
        return [
            [train(hierarchy, *chosen, *policy, precision, count) for policy in POLICIES]
            for *chosen, precision, count in cases
        ]

    for rank in run_ranks(sizes, body):
        for case, ((losses, masters), *others) in zip(cases, rank, strict=True):
            for other_losses, other_masters in others:
                assert losses == other_losses, case
                assert all(map(torch.equal, masters, other_masters)), case


def when_backward_begins(module, act):
    """Call `act` when the backward of a block begins, after its unit is gathered."""

    def after(_module, _arguments, output):
        output.register_hook(lambda _gradient: act())

    module.register_forward_hook(after)


def hold(engine, label, until, level=None):
    """Block collectives of that label, over all levels or one, until the event is set. Returns a
    list that gets for each of them whether it was set in time."""
    in_time = []

    def watch(watched_level, watched_label):
        if watched_label == label and level in (watched_level, None):
            in_time.append(until.wait(10))

    watch_collectives(engine, watch)
    return in_time


@OVERLAPPING
@pytest.mark.parametrize("label", ["gather blocks.1", "publish blocks.1"])
def test_collectives_for_the_next_unit_do_not_delay_a_forward(policy, label):
    """They are blocked here until that forward has begun."""

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap=policy)
        has_begun = threading.Event()
        model.blocks[0].register_forward_pre_hook(lambda *_: has_begun.set())
        in_time = hold(engine, label, has_begun)
        engine.publish()
        with torch.no_grad():
            model(batch(0)[:2])
        return in_time

    assert run_ranks((2, 2), body) == [[True]] * 4


@pytest.mark.parametrize(
    ("policy", "label", "level", "block"),
    [
        *((policy, "gather blocks.0", "pair", 1) for policy in ("safe", "full")),
        *((policy, "reduce blocks.2", "pair", 1) for policy in ("safe", "full")),
        ("full", "finish head", "world", 0),
    ],
)
def test_collectives_for_other_units_do_not_delay_a_backward(policy, label, level, block):
    """They are blocked here until the backward of `block` has begun."""

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap=policy)
        has_begun = threading.Event()
        when_backward_begins(model.blocks[block], has_begun.set)
        loss = model(batch(0)[:2])
        in_time = hold(engine, label, has_begun, level)
        backward(engine, loss, is_last=True)
        engine.finish_gradients()
        return in_time

    assert run_ranks((2, 2), body) == [[True]] * 4


@pytest.mark.parametrize(
    ("strategy", "held", "until", "count"),
    [
        ("zero1", ("pair", "publish blocks.2"), ("world", "publish head"), 1),
        ("zero1", ("world", "finish embedding"), ("pair", "finish blocks.0"), 1),
        # A sum over replicas is a reduction and a gather.
        ("ddp", ("world", "finish head"), ("pair", "finish blocks.2"), 2),
    ],
)
def test_units_use_the_levels_side_by_side(strategy, held, until, count):
    """One unit's collective is blocked until the next unit uses the other level."""

    def body(hierarchy):
        model, engine = place(hierarchy, strategy, overlap="full")
        has_begun = threading.Event()
        watch_collectives(engine, lambda *issued: issued == until and has_begun.set())
        level, label = held
        in_time = hold(engine, label, has_begun, level)
        if strategy == "ddp":
            backward(engine, model(batch(0)[:2]), is_last=True)
        else:
            engine.publish()
        engine.finish_gradients()
        return in_time

    assert run_ranks((2, 2), body) == [[True] * count] * 4


@pytest.mark.parametrize("policy", ["none", "safe", "full"])
def test_masters_may_be_written_when_gradients_are_finished(policy):
    """Earlier publications have then reached every rank, even if no unit has run since."""

    def body(hierarchy):
        _, engine = place(hierarchy, "topo", overlap=policy)
        for unit in engine.units:
            unit.master.fill_(3)
        engine.publish()
        engine.finish_gradients()
        for unit in engine.units:
            unit.master.fill_(7)
        return all((unit.weights == 3).all() for unit in engine.units)

    assert all(run_ranks((2, 2), body))


@pytest.mark.parametrize("policy", ["none", "safe", "full"])
def test_a_dropped_micro_batch_leaves_nothing_behind(policy):
    """Neither in the gradient of a unit that gets none afterwards, nor in the errors."""

    def body(hierarchy):
        levels = hierarchy.levels
        chosen = {"wires": preset("low", "zero2", levels), "error_feedback": True}
        model, engine = place(hierarchy, "zero2", overlap=policy, **chosen)
        watch_collectives(engine, lambda *_: time.sleep(0.03))
        backward(engine, model(batch(hierarchy.rank)[:2]))
        engine.clear_gradients()
        engine.scale_errors(torch.zeros(()))
        found = [gradient.clone() for gradient in engine.finish_gradients()]
        hierarchy.arbiter.drain()
        found += [error for unit in engine.units for error in unit.feedback.errors.values()]
        return len(found), sum(tensor.abs().sum().item() for tensor in found)

    assert run_ranks((2,), body) == [(10, 0.0)] * 2


@pytest.mark.parametrize("is_last", [True, False])
def test_in_the_last_micro_batch_a_unit_is_reduced_to_the_optimizer_level_at_once(is_last):
    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap="none")
        seen = []
        watch_collectives(engine, lambda level, label: seen.append(f"{label} over {level}"))
        when_backward_begins(model.blocks[1], lambda: seen.append("backward blocks.1"))
        backward(engine, model(batch(0)[:2]), is_last)
        seen.append("end of backward")
        engine.finish_gradients()
        return seen

    for seen in run_ranks((2, 2), body):
        finish = seen.index("finish blocks.2 over world")
        assert is_last == (finish < seen.index("backward blocks.1"))
        assert is_last == (finish < seen.index("end of backward"))


def test_as_many_reductions_are_in_flight_as_units_are_gathered_ahead():
    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap="safe")
        threads, in_flight = set(), []
        watch_collectives(engine, lambda *_: threads.add(threading.current_thread().name))
        start = type(engine.units[0]).start_reducing

        def watched_start(unit):
            start(unit)
            in_flight.append(len(engine._hooks.reducing) + 1)

        for unit in engine.units:
            unit.start_reducing = lambda unit=unit: watched_start(unit)
        backward(engine, model(batch(0)[:2]), is_last=True)
        engine.finish_gradients()
        return threads, max(in_flight)

    # The reduction in flight, and the one that has just begun.
    assert run_ranks((2, 2), body) == [({"levels"}, 2)] * 4


@pytest.mark.parametrize(
    ("policy", "prefetch", "begun"), [("safe", 1, 0), ("full", 1, 3), ("full", 0, 1)]
)
def test_publishing_overlaps_with_the_next_forward_in_order_and_bounded(policy, prefetch, begun):
    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap=policy, prefetch=prefetch)
        started, ahead = [], []
        for unit in engine.units:
            start = unit.start_publishing
            unit.start_publishing = lambda unit=unit, start=start: (
                started.append(unit.name),
                start(),
            )
        for index, (_, module) in enumerate(model.units()):
            module.register_forward_hook(lambda *_, index=index: ahead.append(len(started) - index))
        engine.publish()
        at_once = list(started)
        with torch.no_grad():
            model(batch(0)[:2])
        return at_once, started, [unit.name for unit in engine.units], max(ahead)

    for at_once, started, names, ahead in run_ranks((2, 2), body):
        assert at_once == names[:begun]
        assert started == names
        # The running unit, and those after it.
        assert ahead == (prefetch + 1) * (2 if policy == "full" else 1)
