"""Overlap is a policy: it changes when collectives run, never what comes out."""

import threading
import time

import pytest
import torch

from megafrontier.partition import Placement, shard
from megafrontier.partition import engine as engine_module
from megafrontier.partition.wires.registry import DTYPES
from tests.partition.streams import SimulatedStreams
from tests.partition.tiny import (
    GLOBAL_BATCH,
    LENGTH,
    LEVELS,
    TinyModel,
    batch,
    place,
    preset,
    watch_collectives,
)
from tests.ranks import run_ranks

CASES = [
    ("topo", "low", True, "bf16", 4),
    ("topo", "exact", False, "fp32", 2),
    ("hpz", "zero++", False, "bf16", 2),
    ("zero3", "low", True, "bf16", 1),
    ("zero2", "exact", False, "fp32", 2),
    ("zero1", "low", True, "fp32", 2),
    ("mics", "low", False, "bf16", 2),
    ("ddp", "low", False, "bf16", 1),
]
POLICIES = [("none", 1), ("safe", 0), ("safe", 1), ("safe", 3), ("full", 2)]


def train(
    hierarchy, strategy, name, error_feedback, overlap, prefetch, precision="fp32", accumulation=2,
    steps=2, order=1,
):  # fmt: skip
    device = hierarchy.device
    model = TinyModel(tied=False).to(device)
    engine = shard(
        model, model.units()[::order], Placement.named(strategy, LEVELS), hierarchy,
        dtype=DTYPES[precision], wires=preset(name, strategy, LEVELS, precision),
        error_feedback=error_feedback, overlap=overlap, prefetch=prefetch,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([unit.master for unit in engine.units], lr=0.02)
    losses = []
    for step in range(steps):
        parts = batch(step).to(device).chunk(8)[hierarchy.rank].chunk(accumulation)
        for i, tokens in enumerate(parts, start=1):
            loss = model(tokens)
            engine.backward(loss, is_last=i == accumulation)
            losses.append(loss.item())
        for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
            unit.master.grad = gradient / (GLOBAL_BATCH * (LENGTH - 1))
        optimizer.step()
        engine.clear_gradients()
        engine.publish()
    engine.finish_publishing()
    return losses, [unit.master.clone() for unit in engine.units]


@pytest.mark.parametrize(("strategy", "name", "error_feedback", "precision", "accumulation"), CASES)
def test_all_policies_give_the_same_losses_and_masters_to_the_bit(
    strategy, name, error_feedback, precision, accumulation
):
    def body(hierarchy):
        chosen = strategy, name, error_feedback
        return [
            train(hierarchy, *chosen, overlap, prefetch, precision, accumulation)
            for overlap, prefetch in POLICIES
        ]

    for (losses, masters), *others in run_ranks((2, 2, 2), body):
        for other_losses, other_masters in others:
            assert losses == other_losses
            assert all(torch.equal(a, b) for a, b in zip(masters, other_masters, strict=True))


@pytest.mark.parametrize("policy", ["safe", "full"])
@pytest.mark.parametrize(
    ("strategy", "name", "prefetch", "order"),
    [
        ("topo", "low", 1, 1),
        ("hpz", "zero++", 1, 1),
        ("zero2", "exact", 9, 1),
        ("zero3", "exact", 1, -1),  # units are gathered ahead in vain
    ],
)
def test_memory_that_a_lane_may_still_use_is_not_given_back(
    strategy, name, prefetch, order, policy
):
    """On a device a lane's work is only issued when the call returns; torch would hand out again at
    once what is given back then."""

    def body(hierarchy):
        streams = SimulatedStreams(policy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "CommStreams", lambda *_: streams)
            streams.watch(patch)
            train(hierarchy, strategy, name, name == "low", policy, prefetch, order=order)
        return streams.lost

    assert run_ranks((2, 2, 2), body) == [[]] * 8


def when_backward_begins(module, act):
    """Call `act` in each backward of a block, when the engine has gathered it."""

    def after(_module, _arguments, output):
        output.register_hook(lambda _gradient: act())

    module.register_forward_hook(after)


def hold(engine, label, begun, level=None):
    """Let crossings of that label, over all levels or one, take until the event; a list that gets a
    word for each of them whether it came in time."""
    in_time = []

    def watch(crossed, named):
        if named == label and level in (crossed, None):
            in_time.append(begun.wait(10))

    watch_collectives(engine, watch)
    return in_time


@pytest.mark.parametrize("policy", ["safe", "full"])
@pytest.mark.parametrize(
    ("held", "crossings"), [("gather blocks.1", 1), ("publish blocks.1", 2)], ids=str
)
def test_bringing_the_next_unit_does_not_hold_up_this_ones_forward(policy, held, crossings):
    """Here it takes until that forward has begun."""

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap=policy)
        has_begun = threading.Event()
        model.blocks[0].register_forward_pre_hook(lambda *_: has_begun.set())
        in_time = hold(engine, held, has_begun)
        engine.publish()
        with torch.no_grad():
            model(batch(0)[:2])
        return in_time

    assert run_ranks((2, 2, 2), body) == [[True] * crossings] * 8


@pytest.mark.parametrize("policy", ["safe", "full"])
def test_gathering_a_unit_again_does_not_hold_up_the_backward_of_the_one_after_it(policy):
    """Here it takes until that backward has begun."""

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap=policy)
        has_begun = threading.Event()
        when_backward_begins(model.blocks[1], has_begun.set)
        loss = model(batch(0)[:2])
        in_time = hold(engine, "gather blocks.0", has_begun)
        engine.backward(loss)
        engine.finish_gradients()
        return in_time

    assert run_ranks((2, 2, 2), body) == [[True]] * 8


@pytest.mark.parametrize("policy", ["safe", "full"])
def test_a_reduction_does_not_hold_up_the_backward_of_the_unit_before(policy):
    """Here it takes until that backward has begun."""

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap=policy)
        has_begun = threading.Event()
        when_backward_begins(model.blocks[1], has_begun.set)
        in_time = hold(engine, "reduce blocks.2", has_begun)
        engine.backward(model(batch(0)[:2]))
        engine.finish_gradients()
        return in_time

    assert run_ranks((2, 2, 2), body) == [[True, True]] * 8  # over pair and over node


@pytest.mark.parametrize("policy", ["none", "safe", "full"])
def test_masters_may_be_written_again_when_gradients_are_finished(policy):
    """What has been published before is on every rank by then, though no unit has run since."""

    def body(hierarchy):
        _, engine = place(hierarchy, "topo", overlap=policy)
        for unit in engine.units:
            unit.master.fill_(3)
        engine.publish()
        engine.finish_gradients()
        for unit in engine.units:
            unit.master.fill_(7)
        return all((unit.weights == 3).all() for unit in engine.units)

    assert all(run_ranks((2, 2, 2), body))


@pytest.mark.parametrize("policy", ["none", "safe", "full"])
def test_nothing_of_a_micro_batch_that_is_dropped_comes_after_its_clearing(policy):
    """Neither to the gradient of a unit that has none in the next one, nor to the errors."""

    def body(hierarchy):
        levels = hierarchy.levels
        chosen = {"wires": preset("low", "zero2", levels), "error_feedback": True}
        model, engine = place(hierarchy, "zero2", overlap=policy, **chosen)
        watch_collectives(engine, lambda *_: time.sleep(0.03))
        engine.backward(model(batch(hierarchy.rank)[:2]))
        engine.clear_gradients()
        engine.scale_errors(torch.zeros(()))
        found = [gradient.clone() for gradient in engine.finish_gradients()]
        hierarchy.arbiter.drain()
        found += [error for unit in engine.units for error in unit.feedback.errors.values()]
        return len(found), sum(tensor.abs().sum().item() for tensor in found)

    assert run_ranks((2,), body) == [(10, 0.0)] * 2


def test_the_optimizer_level_does_not_hold_up_a_backward():
    """Crossing it for the first unit takes here until the fourth one's backward has begun."""

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap="full")
        has_begun = threading.Event()
        when_backward_begins(model.blocks[0], has_begun.set)
        in_time = hold(engine, "finish head", has_begun, level="world")
        engine.backward(model(batch(0)[:2]), is_last=True)
        engine.finish_gradients()
        return in_time

    assert run_ranks((2, 2, 2), body) == [[True]] * 8


def test_a_sum_over_replicas_lets_the_next_unit_cross_the_inner_levels():
    """Crossing the outermost one takes here until the next unit has come to the one before it."""
    until = "node", "finish blocks.2"

    def body(hierarchy):
        model, engine = place(hierarchy, "ddp", overlap="full")
        has_come = threading.Event()
        watch_collectives(engine, lambda *crossed: crossed == until and has_come.set())
        in_time = hold(engine, "finish head", has_come, level="world")
        engine.backward(model(batch(0)[:2]), is_last=True)
        engine.finish_gradients()
        return in_time

    assert run_ranks((2, 2, 2), body) == [[True, True]] * 8  # there and back


@pytest.mark.parametrize(
    ("held", "until", "finish"),
    [
        (("node", "publish blocks.2"), ("world", "publish head"), "finish_publishing"),
        (("node", "finish embedding"), ("pair", "finish blocks.0"), "finish_gradients"),
    ],
)
def test_what_is_finished_at_once_runs_side_by_side_on_the_levels(held, until, finish):
    """One unit's crossing takes here until another level has come to the next unit."""

    def body(hierarchy):
        _, engine = place(hierarchy, "zero1", overlap="full")
        has_begun = threading.Event()
        watch_collectives(engine, lambda *crossed: crossed == until and has_begun.set())
        level, label = held
        in_time = hold(engine, label, has_begun, level)
        engine.publish()
        getattr(engine, finish)()
        return in_time

    assert run_ranks((2, 2, 2), body) == [[True]] * 8


@pytest.mark.parametrize("is_last", [True, False])
def test_in_the_last_micro_batch_a_unit_goes_on_to_the_optimizer_level_at_once(is_last):
    def body(hierarchy):
        model = TinyModel(tied=False)
        engine = shard(
            model, model.units(), Placement.named("topo", LEVELS), hierarchy, overlap="none"
        )
        seen = []
        watch_collectives(engine, lambda level, label: seen.append(f"{label} over {level}"))
        when_backward_begins(model.blocks[1], lambda: seen.append("backward blocks.1"))
        engine.backward(model(batch(0)[:2]), is_last)
        seen.append("end of backward")
        engine.finish_gradients()
        return seen

    for seen in run_ranks((2, 2, 2), body):
        before = "backward blocks.1" if is_last else None
        finish = seen.index("finish blocks.2 over world")
        assert is_last == (finish < seen.index("end of backward"))
        assert before is None or finish < seen.index(before)


def test_as_many_reductions_wait_as_units_are_gathered_ahead():
    def body(hierarchy):
        model = TinyModel(tied=False)
        placement = Placement.named("topo", LEVELS)
        engine = shard(model, model.units(), placement, hierarchy, overlap="safe")
        threads, waiting = set(), []
        watch_collectives(engine, lambda *_: threads.add(threading.current_thread().name))
        start = type(engine.units[0]).start_reducing

        def watched_start(unit):
            start(unit)
            waiting.append(len(engine._hooks.reducing) + 1)

        for unit in engine.units:
            unit.start_reducing = lambda unit=unit: watched_start(unit)
        engine.backward(model(batch(0)[:2]), is_last=True)
        engine.finish_gradients()
        return threads, max(waiting)

    for threads, most in run_ranks((2, 2, 2), body):
        assert threads == {"levels"}
        assert most == 2  # the one under way and the one that has just begun


@pytest.mark.parametrize(
    ("policy", "prefetch", "begun"), [("safe", 1, 0), ("full", 1, 3), ("full", 0, 1)]
)
def test_publishing_runs_under_the_next_forward_first_unit_first_and_bounded(
    policy, prefetch, begun
):
    def body(hierarchy):
        model = TinyModel(tied=False)
        engine = shard(
            model, model.units(), Placement.named("topo", LEVELS), hierarchy,
            overlap=policy, prefetch=prefetch,
        )  # fmt: skip
        started, under_way = [], []
        for unit in engine.units:
            inner = unit.start_publishing
            unit.start_publishing = lambda unit=unit, inner=inner: (
                started.append(unit.name),
                inner(),
            )
        for index, (_, module) in enumerate(model.units()):
            module.register_forward_hook(
                lambda *_, index=index: under_way.append(len(started) - index)
            )
        engine.publish()
        at_once = list(started)
        with torch.no_grad():
            model(batch(0)[:2])
        return at_once, started, [unit.name for unit in engine.units], max(under_way)

    for at_once, started, names, under_way in run_ranks((2, 2, 2), body):
        assert at_once == names[:begun]
        assert started == names
        # The running unit, and those after it.
        assert under_way == (prefetch + 1) * (2 if policy == "full" else 1)


def test_a_slow_level_gathers_while_the_levels_inside_it_reduce():
    """Of one unit's reduction and the gathering that begins beside it, on the one lane."""

    def body(hierarchy):
        model = TinyModel(tied=False)
        engine = shard(
            model, model.units(), Placement.named("zero3", LEVELS), hierarchy, overlap="safe"
        )
        crossed = []
        watch_collectives(engine, lambda level, label: crossed.append((level, label)))
        engine.backward(model(batch(0)[:2]))
        engine.finish_gradients()
        return crossed

    expected = [
        ("world", "gather blocks.0"),
        ("pair", "reduce blocks.2"),
        ("node", "reduce blocks.2"),
        ("node", "gather blocks.0"),
        ("pair", "gather blocks.0"),
        ("world", "reduce blocks.2"),
    ]
    for crossed in run_ranks((2, 2, 2), body):
        start = crossed.index(expected[1]) - 1
        assert crossed[start : start + len(expected)] == expected
