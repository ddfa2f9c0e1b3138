"""What a model does with its blocks beyond plain use: gradients are those of one process."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafrontier.config import WiresConfig
from megafrontier.partition import Placement, shard
from megafrontier.partition.presets import choose_wires
from megafrontier.partition.wrap import tensors_in
from tests.ranks import make_levels, run_ranks

Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]
WIDTH = 6


def inputs(rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randn(2, 4, WIDTH)


class Stack(nn.Module):
    """Blocks one after another, each of which is run as `call` says."""

    def __init__(self, block: type[nn.Module], call: Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.call = call

    def forward(self, rank: int) -> torch.Tensor:
        x = self.first(inputs(rank))
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x).sum()


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def assert_gradients_are_those_of_one_process(make, placement, overlap, steps=1):
    """Of two ranks, in each of so many steps without a change of weights."""

    def body(hierarchy):
        model = make()
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        engine = shard(model, blocks, placement, hierarchy, overlap=overlap, check_order=True)
        found = []
        for _ in range(steps):
            engine.backward(model(hierarchy.rank), is_last=True)
            finished = engine.finish_gradients()
            found.append(
                [
                    (u.layout, u.range, g.clone())
                    for u, g in zip(engine.units, finished, strict=True)
                ]
            )
            engine.publish()
            engine.clear_gradients()
        return found

    model = make()
    for rank in (0, 1):
        model(rank).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found in run_ranks((2,), body):
        for layout, (start, stop), shard_of_it in [unit for step in found for unit in step]:
            for entry, first, last, at in layout.within(start, stop):
                mine = shard_of_it[at : at + last - first]
                torch.testing.assert_close(mine, expected[entry.name].flatten()[first:last])


class Detached(nn.Module):
    """Uses a weight without its gradient, too: what autograd saved of it is wanted after the last
    of its parameters' gradients has come."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.own = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(self.base(x @ self.own.weight.detach() + x))) + x


@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
@pytest.mark.parametrize("call", [plain, checkpointed])
def test_weights_used_without_their_gradient_stay_until_the_backward_is_over(call, overlap):
    make = lambda: Stack(Detached, call)  # noqa: E731
    assert_gradients_are_those_of_one_process(make, Placement(1, 1, 1, 1), overlap)


class Frozen(Stack):
    """All blocks run twice: without gradients of their parameters, and with."""

    def forward(self, rank: int) -> torch.Tensor:
        self.blocks.requires_grad_(False)
        x = self.first(inputs(rank))
        for is_trained in (False, True):
            self.blocks.requires_grad_(is_trained)
            for block in self.blocks:
                x = self.call(block, x)
        return self.head(x).sum()


@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_may_run_frozen_before_it_is_trained_in_one_pass(overlap, depth):
    make = lambda: Frozen(Linear, plain)  # noqa: E731
    assert_gradients_are_those_of_one_process(make, Placement(depth, depth, 1, 1), overlap)


class Spanning(Stack):
    """One checkpoint goes around the first three blocks, and rank 1 passes by the last of them."""

    def forward(self, rank: int) -> torch.Tensor:
        x = self.first(inputs(rank))
        x = checkpoint(lambda x: self.three(x, rank), x, use_reentrant=False)
        return self.head(self.blocks[3](x, False)).sum()

    def three(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for i in range(3):
            x = self.blocks[i](x, passes_by=rank == 1 and i == 2)
        return x


class Optional(Linear):
    def forward(self, x: torch.Tensor, passes_by: bool) -> torch.Tensor:  # type: ignore[override]
        return x if passes_by else super().forward(x)


@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
def test_a_rank_may_pass_by_the_last_block_of_a_checkpoint_around_several(overlap):
    make = lambda: Spanning(Optional, plain)  # noqa: E731
    assert_gradients_are_those_of_one_process(make, Placement(1, 1, 1, 1), overlap)


class Heads(nn.Module):
    """Its output is a view of a view of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(2, 4, 2, WIDTH // 2).transpose(1, 2)


def changed_in_place(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = block(x).mul_(0.7)
    return torch.tanh(y.transpose(1, 2).reshape(x.shape)) + x


def test_a_view_of_a_view_that_a_block_returns_may_be_changed_in_place():
    make = lambda: Stack(Heads, changed_in_place)  # noqa: E731
    assert_gradients_are_those_of_one_process(make, Placement(1, 1, 1, 1), "safe")


class Positions(nn.Module):
    """Returns its parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self) -> torch.Tensor:
        return self.table


def added(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + block())


@pytest.mark.parametrize("depth", [0, 1])
def test_a_parameter_that_a_block_returns_does_not_collect_hooks(depth):
    """Where its weights are whole; where they go away it is refused."""
    place = Placement(0, 0, depth, 1)
    make = lambda: Stack(Positions, added)  # noqa: E731
    assert_gradients_are_those_of_one_process(make, place, "safe", steps=2)

    def body(hierarchy):
        model = make()
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        engine = shard(model, blocks, place, hierarchy)
        for _ in range(3):
            engine.backward(model(hierarchy.rank), is_last=True)
            engine.finish_gradients()
            engine.publish()
            engine.clear_gradients()
        return [len(block.table._backward_hooks or ()) for block in model.blocks]

    assert run_ranks((2,), body) == [[0] * 4] * 2


def test_modules_that_are_compiled_with_their_hooks_are_right_in_each_step():
    """`block.compile()`: what the hooks bring is another thing each time."""

    def make():
        model = Stack(Linear, plain)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    assert_gradients_are_those_of_one_process(make, Placement(1, 1, 1, 1), "safe", steps=3)


class Between(Stack):
    """The first block runs before the second and after it, and rank 1 passes by its first run."""

    def forward(self, rank: int) -> torch.Tensor:
        x = self.first(inputs(rank))
        x = self.blocks[1](self.blocks[0](x, passes_by=rank == 1), False)
        for block in (self.blocks[0], self.blocks[2], self.blocks[3]):
            x = block(x, False)
        return self.head(x).sum()


@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_rank_may_pass_by_one_of_two_runs_of_a_block(overlap, depth):
    make = lambda: Between(Optional, plain)  # noqa: E731
    assert_gradients_are_those_of_one_process(make, Placement(depth, depth, 1, 1), overlap)


def test_a_graph_that_waits_does_not_keep_full_gradients_of_another():
    """As of a second micro-batch that has run forward already."""

    def body(hierarchy):
        model = Stack(Linear, plain)
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        engine = shard(model, blocks, Placement(1, 1, 1, 1), hierarchy, overlap="none")
        first = model(hierarchy.rank)
        second = model(hierarchy.rank)
        engine.backward(first)
        alone = engine.pool._gradients.held_bytes
        engine.backward(second, is_last=True)
        engine.finish_gradients()
        return alone, max(unit.layout.numel for unit in engine.units)

    for held, largest in run_ranks((2,), body):
        assert held <= 3 * 4 * largest  # the root's, and those of two blocks


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *_):
        raise torch.OutOfMemoryError("no room")


def test_an_engine_whose_backward_has_failed_is_of_no_more_use():
    """Half of the batch would be added to the next one's gradients."""

    def failing(block, x):
        x = plain(block, x)
        return Failing.apply(x) if block is block.fails_at else x

    def body(hierarchy):
        model = Stack(Linear, failing)
        for block in model.blocks:
            block.__dict__["fails_at"] = model.blocks[1]
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        engine = shard(model, blocks, Placement(0, 0, 1, 1), hierarchy)
        with pytest.raises(torch.OutOfMemoryError):
            engine.backward(model(hierarchy.rank), is_last=True)
        model.call = plain
        with pytest.raises(RuntimeError, match="has failed; need it and its model anew"):
            engine.backward(model(hierarchy.rank), is_last=True)
        return True

    assert run_ranks((2,), body) == [True] * 2


@pytest.mark.parametrize("ranks", [(1,), (2,)])
def test_a_loss_that_cannot_be_led_backward_is_refused_and_does_no_harm(ranks):
    """One for each sample, say, of which the sum was forgotten."""

    def body(hierarchy):
        model = Stack(Linear, plain)
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        engine = shard(model, blocks, Placement(0, 0, 1, 1), hierarchy)
        for loss, shape in ((model(hierarchy.rank).expand(2), "2,"), (torch.zeros(()), "")):
            with pytest.raises(RuntimeError, match=rf"loss: of shape \({shape}\), need a scalar"):
                engine.backward(loss)
        engine.backward(model(hierarchy.rank), is_last=True)
        return sum(gradient.abs().sum().item() for gradient in engine.finish_gradients())

    assert sum(run_ranks(ranks, body)) > 0  # a rank may have nothing but padding


@pytest.mark.parametrize("preset", ["exact", "low"])
def test_frozen_parameters_get_zeros_whatever_rounds_and_rotates_their_neighbours(
    preset,
):
    """AdamW makes whole steps of the smallest."""
    place = Placement(0, 0, 1, 2)
    wires = choose_wires(WiresConfig(preset=preset), place, make_levels((2, 2)), "fp32")

    def body(hierarchy):
        model = Stack(Detached, plain)
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        engine = shard(model, blocks, place, hierarchy, wires=wires)
        for block in model.blocks:
            block.base.requires_grad_(False)
        engine.backward(model(hierarchy.rank), is_last=True)
        found = []
        for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
            for entry, first, last, at in unit.layout.within(*unit.range):
                if entry.name.startswith("blocks"):
                    found.append((entry.name, gradient[at : at + last - first].abs().sum().item()))
        return found

    sums: dict[str, float] = {}
    for found in run_ranks((2, 2), body):
        for name, size in found:
            sums[name] = sums.get(name, 0) + size
    assert len(sums) == 8
    assert all((size == 0) == (".base." in name) for name, size in sums.items()), sums


@dataclass
class Node:
    value: torch.Tensor
    others: list["Node"] = field(default_factory=list)


def test_what_blocks_pass_on_may_hold_itself():
    parent, child = Node(torch.zeros(1)), Node(torch.ones(1))
    parent.others, child.others = [child, parent], [parent]
    values = [float(tensor) for tensor in tensors_in((parent, {"again": child}))]
    assert sorted(values) == [0.0, 1.0]
