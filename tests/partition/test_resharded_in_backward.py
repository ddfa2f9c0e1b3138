"""Weights are there whenever autograd wants them, and refused where the engine cannot know."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafrontier.partition import Placement, shard
from tests.partition.tiny import TinyModel, batch
from tests.ranks import run_ranks


class Passing(nn.Module):
    """The first block makes something that all pass on and use, as T5 does with its biases."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kind = kind
        self.blocks = nn.ModuleList(PassingBlock(i == 0, kind) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = Both(x, None) if self.kind == "dataclass" else (x, None)
        for block in self.blocks:
            state = block(state)
        return (state.x if self.kind == "dataclass" else state[0]).square().sum()


@dataclass(slots=True)
class Both:
    x: torch.Tensor
    memory: torch.Tensor | None


class PassingBlock(nn.Module):
    def __init__(self, makes: bool, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)
        self.memory = nn.Linear(16, 16, bias=False) if makes else None
        self.kind = kind

    def forward(self, state):
        x, memory = (state.x, state.memory) if self.kind == "dataclass" else state
        if self.memory is not None:
            memory = self.memory(x).tanh()
        y = self.linear(x + memory).tanh()
        if self.kind == "in place":
            x = x.clone() if x.is_leaf else x
            y = x.add_(y)  # the tensor that came, but not what it was
        return Both(y, memory) if self.kind == "dataclass" else (y, memory)


@pytest.mark.parametrize("kind", ["tuple", "dataclass", "in place"])
@pytest.mark.parametrize("overlap", ["none", "safe"])
def test_a_block_may_pass_on_what_another_has_made(overlap, kind):
    def gradients(hierarchy, placement):
        model = Passing(kind)
        blocks = [(f"blocks.{i}", b) for i, b in enumerate(model.blocks)]
        engine = shard(model, blocks, placement, hierarchy, overlap=overlap)
        torch.manual_seed(hierarchy.rank)
        x = torch.randn(2, 16, requires_grad=True)
        engine.backward(model(x), is_last=True)
        return [g.clone() for g in engine.finish_gradients()]

    def body(hierarchy):
        whole = gradients(hierarchy, Placement(0, 0, 2, 2))
        return gradients(hierarchy, Placement(2, 2, 2, 2)), whole

    for sharded, whole in run_ranks((2, 2), body):
        for a, b in zip(sharded, whole, strict=True):
            assert torch.equal(a, b)


class Residual(nn.Module):
    """Hands the residual on by itself, whose backward comes after that of all its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, state):
        hidden, residual = state
        residual = hidden + residual
        return self.linear(residual).tanh(), residual


@pytest.mark.parametrize("overlap", ["none", "safe"])
def test_a_unit_that_is_done_is_not_gathered_once_more(overlap):
    def body(hierarchy):
        blocks = [(f"{i}", Residual()) for i in range(4)]
        model = nn.Sequential(*(block for _, block in blocks))
        engine = shard(model, blocks, Placement(1, 1, 1, 1), hierarchy, overlap=overlap)
        engine.ledger.take()
        x = torch.randn(2, 16, requires_grad=True)
        hidden, residual = model((x, x))
        engine.backward((hidden + residual).sum(), is_last=True)
        engine.finish_gradients()
        return engine.ledger.take()[0], engine.step_bytes(1)

    for sent, formula in run_ranks((2,), body):
        assert sent == formula


@pytest.mark.parametrize("overlap", ["none", "safe"])
def test_a_backward_that_the_engine_did_not_lead_leaves_the_next_step_right(overlap):
    def run(hierarchy, probes):
        model = TinyModel(tied=False)
        engine = shard(model, model.units(), Placement(2, 2, 2, 2), hierarchy, overlap=overlap)
        if probes:
            seen = []
            handle = model.blocks[1].register_forward_hook(lambda *a: seen.append(a[2]))
            torch.autograd.grad(model(batch(0)[:2]), seen)
            handle.remove()
        engine.backward(model(batch(hierarchy.rank)[:4]), is_last=True)
        return [g.clone() for g in engine.finish_gradients()]

    def body(hierarchy):
        return run(hierarchy, False), run(hierarchy, True)

    for plain, probed in run_ranks((2, 2), body):
        for a, b in zip(plain, probed, strict=True):
            assert torch.equal(a, b)


def test_weights_that_are_away_in_backward_are_refused_and_not_another_units():
    """A block whose loss leaves it by a side door: the engine cannot know when it is needed."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False)
            self.aside: list[torch.Tensor] = []

        def forward(self, x):
            y = self.linear(x)
            self.aside.append(y.square().sum())
            return y.detach() + x

    def body(hierarchy):
        messages = []
        for number in (1, 3):  # the last one's weights have stayed
            model = nn.Sequential(*(Aside() for _ in range(4)))
            blocks = [(f"{i}", block) for i, block in enumerate(model)]
            engine = shard(model, blocks, Placement(1, 1, 1, 1), hierarchy)
            model(torch.randn(2, 16, requires_grad=True))
            with pytest.raises(RuntimeError) as error:
                engine.backward(model[number].aside[0])
            messages.append(str(error.value))
        return messages

    for gone, stayed in run_ranks((2,), body):
        assert "modified by an inplace operation" in gone
        assert "parameter 3.linear.weight: a gradient outside of the backward of '3'" in stayed


class Twice(nn.Module):
    """Reentrant checkpoints hand a weight that two of them use its gradient in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: self.shared(block(x)), x, use_reentrant=True)
        return x.sum()


def test_the_root_takes_a_gradient_in_parts():
    def body(hierarchy):
        torch.manual_seed(0)
        model, x = Twice(), torch.randn(2, 4, requires_grad=True)
        model(x).backward()
        expected = 2 * model.shared.weight.grad.flatten()  # of two ranks
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        engine = shard(model, blocks, Placement(0, 0, 0, 0), hierarchy)
        engine.backward(model(x), is_last=True)
        root = engine.finish_gradients()[0]
        place = next(e for e in engine.units[0].layout.entries if e.name == "shared.weight")
        return torch.equal(root[place.offset : place.offset + place.numel], expected)

    assert run_ranks((2,), body) == [True] * 2


def test_a_gradient_that_comes_when_its_unit_is_done_is_refused_by_name():
    def body(hierarchy):
        model = Twice()
        engine = shard(model, [("shared", model.shared)], Placement(0, 0, 1, 1), hierarchy)
        loss = model(torch.randn(2, 4, requires_grad=True))
        with pytest.raises(RuntimeError) as error:
            engine.backward(loss, is_last=True)
        return str(error.value)

    for message in run_ranks((2,), body):
        assert "parameter shared." in message
        assert "use_reentrant=False" in message


def test_a_second_last_backward_is_refused_by_what_it_is():
    """Of two micro-batches both given `is_last`: the first one's has been summed and sent."""

    def body(hierarchy):
        model = TinyModel(tied=False)
        engine = shard(model, model.units(), Placement(1, 1, 1, 1), hierarchy)
        x = batch(hierarchy.rank)
        engine.backward(model(x[:4]), is_last=True)
        with pytest.raises(RuntimeError) as error:
            engine.backward(model(x[4:]), is_last=True)
        engine.finish_gradients()
        return str(error.value)

    for message in run_ranks((2,), body):
        assert "a gradient after the step's last one: `is_last` is for the last" in message


def test_gradients_of_a_backward_that_the_engine_does_not_lead_are_refused():
    """Its end would not be known: what lies outside of the blocks would never be reduced."""

    def body(hierarchy):
        model = TinyModel(tied=True)
        placement = Placement.named("zero2", hierarchy.levels)
        engine = shard(model, model.units(), placement, hierarchy)
        with pytest.raises(RuntimeError, match=r"does not lead; need engine\.backward\(loss\)"):
            model(batch(0)[:2]).backward()
        return engine.hierarchy.size

    assert run_ranks((2,), body) == [2, 2]
