"""Backward as events: whoever starts it, in which order, and for which part of the graph."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from megafrontier.partition import Placement
from tests.partition.tiny import SIDE, Stack, sharded_stack, stack_input
from tests.ranks import run_ranks

SHARDED, HALF, PERSISTENT = Placement(1, 1, 1, 1), Placement(0, 0, 0, 1), Placement(0, 0, 0, 0)
PLACEMENTS = SHARDED, HALF, PERSISTENT, Placement(2, 1, 2, 2)
OVERLAPS = ("none", "safe", "full")
SIZES = (2, 2)


def gradients_of(engine):
    """This rank's shards of the finished gradients, by the name of the unit."""
    finished = engine.finish_gradients()
    found = {u.name: g.clone() for u, g in zip(engine.units, finished, strict=True)}
    engine.finish_step(torch.zeros(()))
    return found


def accumulated(model, engine, rank, order):
    """The gradients of micro-batches whose forwards and backwards run in `order`: ("F", 0), …"""
    losses, ends = {}, [i for kind, i in order if kind == "B"]
    for kind, i in order:
        if kind == "F":
            losses[i] = model(stack_input(rank, step=i))
            continue
        with engine.no_sync(i != ends[-1]):
            losses.pop(i).backward()
    return gradients_of(engine)


PLAIN = [(kind, i) for i in range(4) for kind in "FB"]
ORDERS = {
    "1F1B": ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
    "all forwards first": ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"],
    "newest first": ["F0", "F1", "B1", "F2", "B2", "F3", "B3", "B0"],
}


def test_micro_batches_in_flight_equal_plain_accumulation():
    """1F1B's order of one stage, and others, give the gradients of one forward and backward after
    the other; twice, because the first step leaves its state to the second. Each two of placement,
    overlap and order are tried together."""

    def check(hierarchy, placement, overlap, order):
        steps = [(step[0], int(step[1])) for step in order]
        # Sums are added in the order of the backwards.
        plain = [(kind, i) for done, i in steps if done == "B" for kind in "FB"]
        model, engine = sharded_stack(hierarchy, placement, overlap=overlap)
        for _ in range(2):
            expected = accumulated(model, engine, hierarchy.rank, plain)
            found = accumulated(model, engine, hierarchy.rank, steps)
            for name in expected:
                assert torch.equal(found[name], expected[name]), (placement, overlap, order)

    def body(hierarchy):
        orders = [*ORDERS.values()]
        for (i, placement), (j, overlap) in product(enumerate(PLACEMENTS), enumerate(OVERLAPS)):
            check(hierarchy, placement, overlap, orders[(i + j) % len(orders)])
        return True

    assert all(run_ranks(SIZES, body))


def test_micro_batches_in_flight_keep_no_more_memory_than_one_after_the_other():
    def body(hierarchy):
        held = []
        orders = PLAIN, [(s[0], int(s[1])) for s in ORDERS["1F1B"]]
        for placement, order in product((SHARDED, PERSISTENT), orders):
            model, engine = sharded_stack(hierarchy, placement, make=partial(Stack, count=6))
            accumulated(model, engine, hierarchy.rank, order)
            held.append(engine.buffer_bytes)
        return held

    for sharded, sharded_in_flight, persistent, persistent_in_flight in run_ranks((2,), body):
        assert sharded_in_flight == sharded
        assert persistent_in_flight == persistent


def test_a_gradient_of_a_part_reduces_nothing():
    """A penalty on the gradient of the inputs, for example, whose weights get no gradient."""

    def slope_of(hierarchy, placement, overlap):
        model, engine = sharded_stack(hierarchy, placement, overlap=overlap)
        x = stack_input(hierarchy.rank)
        model(x).backward()
        expected = gradients_of(engine)
        probe = stack_input(hierarchy.rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(probe), probe)
        assert slope.abs().sum() > 0
        model(x).backward()
        found = gradients_of(engine)
        assert all(torch.equal(found[name], expected[name]) for name in expected), placement
        return slope

    def body(hierarchy):
        return [slope_of(hierarchy, *case) for case in product(PLACEMENTS, OVERLAPS)]

    alone = Stack()
    for rank, slopes in enumerate(run_ranks(SIZES, body)):
        probe = stack_input(rank).requires_grad_()
        (expected,) = torch.autograd.grad(alone(probe), probe)
        for slope in slopes:
            torch.testing.assert_close(slope, expected)


def test_two_losses_of_one_step_may_have_a_backward_each():
    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, SHARDED)
        first, second = (model(stack_input(hierarchy.rank, step)) for step in range(2))
        with engine.no_sync():
            first.backward()
        second.backward()
        found = gradients_of(engine)
        (model(stack_input(hierarchy.rank, 0)) + model(stack_input(hierarchy.rank, 1))).backward()
        expected = gradients_of(engine)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])
        return True

    assert all(run_ranks((2,), body))


def test_two_engines_take_part_in_one_backward():
    """As the stages of a pipeline on one rank do, or a model and its critic."""

    def body(hierarchy):
        (one, first), (two, second) = (sharded_stack(hierarchy, SHARDED) for _ in range(2))
        x = stack_input(hierarchy.rank)
        (one(x) + two(x)).backward()
        found = gradients_of(first), gradients_of(second)
        one(x).backward()
        expected = gradients_of(first)
        assert all(torch.equal(f[name], expected[name]) for f in found for name in expected)
        return True

    assert all(run_ranks((2,), body))


def test_hooks_of_parameters_set_before_shard_are_kept():
    """They run before the engine takes the gradient, with that of the micro-batch."""
    seen = []

    def make():
        model = Stack()
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        model.first.bias.register_post_accumulate_grad_hook(
            lambda parameter: seen.append(parameter.grad.clone())
        )
        return model

    def body(hierarchy):
        seen.clear()
        model, engine = sharded_stack(hierarchy, PERSISTENT, make=make)
        model(stack_input(0)).backward()
        (root,) = (unit for unit in engine.units if unit.name == "root")
        found = gradients_of(engine)["root"] / 2
        whole = torch.empty(root.layout.numel)
        whole.copy_(found)
        views = zip(root.layout.entries, root.layout.views(whole), strict=True)
        return {entry.name: view.clone() for entry, view in views}, seen[0]

    alone = make()
    alone(stack_input(0)).backward()
    for gradients, hooked in run_ranks((2,), body):
        torch.testing.assert_close(gradients["head.weight"], alone.head.weight.grad)
        torch.testing.assert_close(hooked, alone.first.bias.grad)


class Shifted(nn.Module):
    """A block in which a frozen matrix has an adapter that is trained (LoRA's form)."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.down, self.up = nn.Linear(SIDE, 2, bias=False), nn.Linear(2, SIDE, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_frozen_parameters_have_a_unit_without_gradient_and_are_never_published_again():
    def step(hierarchy, placement):
        model, engine = sharded_stack(hierarchy, placement, Shifted, check_order=True)
        frozen = [unit for unit in engine.units if unit.is_frozen]
        assert len(frozen) == len(model.blocks)
        assert all(unit.gradient.numel() == 0 for unit in frozen)
        model(stack_input(hierarchy.rank)).backward()
        finished = engine.finish_gradients()
        assert len(finished) == len(engine.trained_units) == len(engine.units) - len(frozen)
        for unit, gradient in zip(engine.trained_units, finished, strict=True):
            unit.master.sub_(gradient, alpha=1e-3)
        engine.finish_step(torch.zeros(()))
        return model(stack_input(hierarchy.rank)).item()

    def body(hierarchy):
        return [step(hierarchy, placement) for placement in PLACEMENTS]

    alone = Stack(Shifted)
    sum(alone(stack_input(rank)) for rank in range(4)).backward()
    with torch.no_grad():
        for parameter in alone.parameters():
            if parameter.requires_grad:
                parameter.sub_(parameter.grad, alpha=1e-3)
    for rank, losses in enumerate(run_ranks(SIZES, body)):
        expected = [alone(stack_input(rank)).item()] * len(PLACEMENTS)
        assert losses == pytest.approx(expected, rel=1e-5)
