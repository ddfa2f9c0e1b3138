"""What a model may not do with its blocks is refused by name, on each rank that does it."""

import pytest
import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.partition import Placement, shard
from tests.partition.tiny import (
    SIDE,
    Shared,
    Shortened,
    Stack,
    assert_gradients_of_one_process,
    backward,
    sharded_stack,
    stack_input,
)
from tests.ranks import run_ranks

SHARDED, PERSISTENT = Placement(1, 1, 1, 1), Placement(0, 0, 1, 1)


def refusal(body, sizes=(2,)):
    """The message of the RuntimeError or UserError that `body` raises on each rank."""

    def caught(hierarchy):
        with pytest.raises((RuntimeError, UserError)) as error:
            body(hierarchy)
        return str(error.value)

    return run_ranks(sizes, caught)


def test_a_gradient_that_comes_after_its_unit_is_finished_is_refused_by_name():
    def body(hierarchy):
        model = Shared()
        engine = shard(model, [("shared", model.shared)], PERSISTENT, hierarchy)
        backward(engine, model(stack_input(hierarchy.rank)), is_last=True)

    for message in refusal(body):
        assert message.startswith("parameter shared.")
        assert "use_reentrant=False" in message


def test_a_second_last_backward_is_refused():
    """The gradient of the first one has been summed and sent."""

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, SHARDED)
        backward(engine, model(stack_input(hierarchy.rank)), is_last=True)
        backward(engine, model(stack_input(hierarchy.rank)), is_last=True)

    for message in refusal(body):
        assert "gradient after the last one of the step; need `no_sync()` around all" in message


def test_a_loss_that_leaves_a_block_in_secret_is_refused():
    """The engine cannot know when its backward begins, and its weights are resharded."""

    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            y = self.linear(x)
            self.aside = [y.square().sum()]
            return y.detach() + x

    def body(hierarchy, number):
        model = nn.Sequential(*(Aside() for _ in range(4)))
        blocks = [(f"{i}", block) for i, block in enumerate(model)]
        engine = shard(model, blocks, SHARDED, hierarchy)
        model(torch.randn(2, 16, requires_grad=True))
        backward(engine, model[number].aside[0])

    torch.manual_seed(0)
    for message in refusal(lambda hierarchy: body(hierarchy, 1)):
        assert "modified by an inplace operation" in message
    for message in refusal(lambda hierarchy: body(hierarchy, 3)):  # it has stayed unsharded
        assert "parameter 3.linear.weight: gradient outside of the backward of '3'" in message


@pytest.mark.parametrize("returns_tuple", [False, True])
@pytest.mark.parametrize("placement", [SHARDED, PERSISTENT])
def test_a_block_that_a_rank_skips_is_refused_by_name(placement, returns_tuple):
    """It returns its input on one rank. Other ranks would wait for its reduction."""

    class Skipped(nn.Linear):
        def forward(self, x):
            y = x if self.is_skipped else super().forward(x)
            return (y, None) if returns_tuple else y

    def body(hierarchy):
        def call(block, x):
            block.is_skipped = hierarchy.rank == 1 and block is model.blocks[2]
            found = block(x)
            return found[0] if returns_tuple else found

        model, _ = sharded_stack(hierarchy, placement, lambda: Skipped(SIDE, SIDE), call)
        model(stack_input(0))
        raise UserError("not skipped here")

    _, skipped = refusal(body)
    assert skipped.startswith("block 'blocks.2': returns only its inputs, need a new tensor")


def test_a_block_that_a_rank_does_not_call_is_named_by_check_order():
    def body(hierarchy):
        model, engine = sharded_stack(
            hierarchy, SHARDED, make=Shortened, check_order=True, overlap="none"
        )
        left_out = (1,) if hierarchy.rank else ()
        backward(engine, model(stack_input(0), left_out))

    for message in refusal(body):
        assert "collectives in another order" in message
        assert "gather blocks.1" in message


@pytest.mark.parametrize("placement", [SHARDED, PERSISTENT])
def test_an_output_that_is_a_view_may_not_be_changed_in_place(placement):
    """The change would take the engine's hook out of the graph."""

    def body(hierarchy, change):
        def call(block, x):
            return x + change(block(x))

        model, _ = sharded_stack(hierarchy, placement, lambda: nn.Linear(SIDE, SIDE), call)
        model(stack_input(hierarchy.rank))

    for change in (torch.Tensor.relu_, lambda y: y.transpose(1, 2).mul_(2).transpose(1, 2)):
        for message in refusal(lambda hierarchy, change=change: body(hierarchy, change)):
            assert "replace the inplace operation by an out-of-place one" in message


def test_an_output_that_is_no_view_may_be_changed_in_place():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def changed(block, x):
        y = block(x)
        y += x
        return y

    def make():
        return Stack(lambda: Scaled(SIDE, SIDE), changed)

    for placement in (SHARDED, PERSISTENT):
        assert_gradients_of_one_process(make, placement)


def test_a_block_that_runs_inside_of_another_is_refused():
    """It may have taken the buffer of the outer one in the middle of its forward."""

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.linear, self.inner = nn.Linear(4, 4), [inner]  # not a submodule

        def forward(self, x):
            return self.linear(self.inner[0](x))

    def body(hierarchy):
        inner = nn.Linear(4, 4)
        model = nn.ModuleList([inner, Outer(inner)])
        blocks = [("inner", inner), ("outer", model[1])]
        shard(model, blocks, Placement.named("zero3", hierarchy.levels), hierarchy)
        with pytest.raises(UserError):
            model[1](torch.ones(2, 4))
        assert model[0](torch.ones(2, 4)).isfinite().all()
        model[1](torch.ones(2, 4))

    torch.manual_seed(6)
    message = (
        "block 'inner': runs inside of block 'outer' and is no submodule of it, "
        "need one of them left out of the blocks"
    )
    assert refusal(body) == [message] * 2


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *_):
        raise torch.OutOfMemoryError("no room")


def test_an_engine_whose_backward_has_failed_refuses_the_next():
    """Half of the batch would be added to the next one's gradients."""

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, PERSISTENT)
        plain_call = model.call
        fails_at = model.blocks[1]
        model.call = lambda b, x: Failing.apply(plain_call(b, x)) if b is fails_at else b(x)
        with pytest.raises(torch.OutOfMemoryError):
            backward(engine, model(stack_input(hierarchy.rank)), is_last=True)
        model.call = plain_call
        backward(engine, model(stack_input(hierarchy.rank)), is_last=True)

    assert refusal(body) == ["engine: an earlier backward failed, need a new engine and model"] * 2
