"""Which models and blocks can be sharded, and what of a sharded model is refused by name."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.partition import Placement, shard
from megafrontier.partition.modules.wrap import tensors_in
from tests.partition.tiny import (
    SIDE,
    Stack,
    assert_gradients_of_one_process,
    backward,
    sharded_stack,
    stack_input,
)
from tests.ranks import run_ranks

SHARDED, PERSISTENT = Placement(1, 1, 1, 1), Placement(0, 0, 1, 1)
PLACEMENTS = pytest.mark.parametrize("placement", [SHARDED, PERSISTENT])


def complex_one(model, _rank):
    model.spectrum = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    return model, model.units()


def on_meta(_model, _rank):
    with torch.device("meta"):
        model = Stack()
    return model, model.units()


def stray(model, _rank):
    return model, [("other", nn.Linear(2, 2))]


def called_root(model, _rank):
    return model, [("root", model.blocks[0])]


def claimed(model, _rank):
    outer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    outer[0].weight = outer[1].weight
    model.outer = outer
    return model, [("outer", outer), ("inner", outer[1])]


def namesakes(model, _rank):
    return model, [("linear", block) for block in model.blocks]


def twice(model, _rank):
    return model, [*model.units(), ("again", model.blocks[0])]


def other_values(model, rank):
    with torch.no_grad():
        model.blocks[2].bias[2] += 1e-6 * rank
    return model, model.units()


def other_buffers(model, rank):
    model.register_buffer("features", torch.ones(3) + rank)
    return model, model.units()


REFUSED = {
    complex_one: "parameter spectrum: complex, need its torch.view_as_real",
    on_meta: "parameter first.weight: on the meta device, need `initial` for its values",
    stray: "block 'other' holds a parameter that is not in the model",
    called_root: "block 'root': reserved for parameters outside of blocks",
    claimed: "block 'inner': shares parameter outer.0.weight with block 'outer' around it",
    namesakes: "block 'linear': given twice, need each block and each name once",
    twice: "block 'blocks.0': given twice, need each block and each name once",
    other_values: "parameter blocks.2.bias: values differ between ranks",
    other_buffers: "buffer features: values differ between ranks",
}


def test_what_cannot_be_sharded_is_refused_by_name():
    def body(hierarchy):
        messages = []
        for case in REFUSED:
            model, blocks = case(Stack(), hierarchy.rank)
            with pytest.raises(UserError) as error:
                shard(model, blocks, SHARDED, hierarchy)
            messages.append(str(error.value))
        return messages

    for messages in run_ranks((2,), body):
        for message, expected in zip(messages, REFUSED.values(), strict=True):
            assert message.startswith(expected)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return x + self.empty.sum()


def test_a_block_without_parameters_or_elements_runs_as_it_is():
    def body(hierarchy):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1), Empty())
        x = torch.randn(3, 4)
        model(x).sum().backward()
        expected = 2 * model[0].weight.grad.flatten()
        engine = shard(model, [(str(i), m) for i, m in enumerate(model)], SHARDED, hierarchy)
        backward(engine, model(x).sum())
        start, stop = engine.units[0].range
        got = engine.finish_gradients()[0][: max(0, min(stop, 16) - start)]
        return [u.name for u in engine.units], torch.allclose(got, expected[start:][: got.numel()])

    assert run_ranks((2,), body) == [(["0", "2"], True)] * 2


class Head(nn.Sequential):
    def forward(self, x):
        return self[0](x)


class Tied(nn.Module):
    """The head is a block, and its weight, or the module itself, is the embedding outside."""

    def __init__(self, ties):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(6, 4, sparse=True)
        self.block, self.head = nn.Linear(4, 4), Head(nn.Linear(4, 6, bias=False))
        if ties == "weight":
            self.head[0].weight = self.embedding.weight
        if ties == "module":
            self.head.append(self.embedding)
        self.register_buffer("mask", torch.eye(4).to_sparse())

    def units(self):
        return [("block", self.block), ("head", self.head)]

    def forward(self, tokens):
        hidden = self.block(self.embedding(tokens) @ self.mask.to_dense())
        return self.head(hidden).square().sum()


@pytest.mark.parametrize("ties", ["weight", "module"])
def test_what_a_block_shares_with_the_rest_is_unsharded_for_the_entire_pass(ties):
    """Gradients and buffers may be sparse."""
    tokens = torch.tensor([[0, 3], [3, 5]])
    assert_gradients_of_one_process(
        lambda: Tied(ties), "zero3", lambda model, rank: model(tokens[rank])
    )


def test_a_view_of_weights_that_will_be_resharded_is_refused():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.ones(6, 4))

        def forward(self, x):
            return x.tanh(), self.queries[:3]

    def body(hierarchy):
        model = Learned()
        outer = nn.ModuleList([model])
        shard(outer, [("block", model)], SHARDED, hierarchy)
        with pytest.raises(UserError) as error, torch.no_grad():
            model(torch.ones(3, 4))
        return str(error.value)

    message = "block 'block': returns a view of its own parameter, need a copy (.clone())"
    assert run_ranks((2,), body) == [message] * 2


class Listed(nn.Module):
    """Uses its weight from a list of its own too, which `shard` does not change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE)
        self.weights = [self.linear.weight]

    def forward(self, x):
        return self.linear(x) + x @ self.weights[0]


@pytest.mark.parametrize("ranks", [(1,), (2,)])
def test_a_replaced_parameter_that_a_module_still_uses_is_named_and_not_left_untrained(ranks):
    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, PERSISTENT, Listed)
        with pytest.raises(RuntimeError) as error:
            backward(engine, model(stack_input(hierarchy.rank)))
        return str(error.value)

    for message in run_ranks(ranks, body):
        assert message.startswith("parameter blocks.3.linear.weight: `shard` has replaced it")


@PLACEMENTS
def test_a_model_that_is_sharded_already_its_parts_and_copies_are_refused(placement):
    """They have the hooks of another engine, and if resharded, no values."""

    def body(hierarchy):
        model, _ = sharded_stack(hierarchy, placement)
        part = model.blocks[0]
        for again in (model, nn.Sequential(part)):
            with pytest.raises(UserError, match="model: sharded already"):
                shard(again, [], placement, hierarchy)
        for whole in (model, part):
            with pytest.raises(RuntimeError, match="deepcopy of a sharded model"):
                copy.deepcopy(whole)
        return True

    assert all(run_ranks((2,), body))


@pytest.mark.parametrize(
    ("placement", "dtype"),
    [
        (SHARDED, torch.float32),
        (SHARDED, torch.bfloat16),
        (PERSISTENT, torch.float32),
        (Placement(0, 0, 0, 0), torch.bfloat16),
        (Placement(0, 0, 0, 0), torch.float32),
    ],
)
def test_state_dicts_are_of_full_masters_and_load_what_plain_modules_load(placement, dtype):
    def body(hierarchy):
        model, plain = Stack(), Stack()
        for module in (model, plain):
            module.register_buffer("count", torch.tensor(3))
            module.again = module.first  # one parameter under two names
        before = copy.deepcopy(plain.state_dict())
        sharded_stack(hierarchy, placement, make=lambda: model, dtype=dtype)
        found = model.state_dict()
        assert list(found) == list(before)
        assert all(torch.equal(found[name], value) for name, value in before.items())
        # In a wrapper, whose prefix the keys then have; and a part of them.
        given = {f"0.{name}": 2 * value for name, value in before.items()}
        nn.Sequential(model).load_state_dict(given)
        found = model.state_dict()
        assert all(torch.equal(found[name], 2 * value) for name, value in before.items())
        one = "blocks.2.bias"
        result = model.load_state_dict({one: before[one], "what": before[one]}, strict=False)
        assert one not in result.missing_keys
        assert "blocks.1.bias" in result.missing_keys
        assert result.unexpected_keys == ["what"]
        plain.load_state_dict({name[2:]: value for name, value in given.items()})
        plain.load_state_dict({one: before[one]}, strict=False)
        with torch.no_grad():
            x = stack_input(0).to(dtype)
            assert torch.equal(model(x), plain.to(dtype)(x))
        if placement == Placement(0, 0, 0, 0) and dtype is torch.float32:
            copied = copy.deepcopy(model).state_dict()  # the parameters are the masters
            return torch.equal(copied[one], before[one])
        with pytest.raises(RuntimeError, match=r"blocks.0.bias: shape \[2\], need \[6\]"):
            model.load_state_dict(before | {"blocks.0.bias": torch.zeros(2)})
        with pytest.raises(RuntimeError, match="state dict of a Linear in a sharded model"):
            model.blocks[1].state_dict()
        with pytest.raises(RuntimeError, match="deepcopy of a sharded model"):
            copy.deepcopy(model)
        return True

    assert all(run_ranks((2,), body))


@dataclass
class Node:
    value: torch.Tensor
    others: list["Node"] = field(default_factory=list)


def test_containers_of_tensors_may_hold_each_other():
    parent, child = Node(torch.zeros(1)), Node(torch.ones(1))
    parent.others, child.others = [child, parent], [parent]
    values = [float(tensor) for tensor in tensors_in((parent, {"again": child}))]
    assert sorted(values) == [0.0, 1.0]
