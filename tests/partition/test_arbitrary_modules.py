"""`shard` takes a stranger's nn.Module: any shape of blocks, outputs and use of parameters."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafrontier.common.errors import UserError
from megafrontier.config import WiresConfig
from megafrontier.partition import Placement, shard
from megafrontier.partition.presets import choose_wires
from tests.partition.tiny import TinyModel, batch
from tests.ranks import run_ranks


class DictBlock(nn.Module):
    """Takes and gives nested containers, and leaves one parameter unused now and then."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seldom = nn.Linear(width, width)

    def forward(self, state: dict) -> dict:
        x = self.linear(state["x"]).tanh()
        if state["extra"]:
            x = x + self.seldom(x)
        return {"x": x, "extra": state["extra"], "seen": [x.detach()]}


class Odd(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(1)
        shared = nn.Linear(width, width)
        self.first, self.second = DictBlock(width), DictBlock(width)
        self.first.linear.weight = shared.weight  # tied across two blocks
        self.second.linear.weight = shared.weight
        self.register_buffer("offset", torch.arange(float(width)))
        self.outside = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        state = {"x": x + self.offset, "extra": extra}
        state = self.second(self.first(state))
        state = self.first(state)  # the same block twice
        return (state["x"] * self.outside).square().sum()

    def units(self):
        return [("first", self.first), ("second", self.second)]


USES = {
    "never": lambda rank: False,
    "always": lambda rank: True,
    "on some ranks": lambda rank: rank % 2 == 0,
}


def test_values_that_differ_between_ranks_are_refused_by_name():
    """Replicas would stay different for good, without a word."""

    def body(hierarchy):
        model = Odd()
        with torch.no_grad():
            model.second.seldom.bias[2] += 1e-6 * hierarchy.rank
        with pytest.raises(UserError, match=r"parameter second\.seldom\.bias: ranks bring other"):
            shard(model, model.units(), Placement.named("mics", hierarchy.levels), hierarchy)
        return True

    assert all(run_ranks((2, 2), body))


def gradients_alone(uses):
    model = Odd()
    for rank in range(4):
        torch.manual_seed(rank)
        model(torch.randn(3, 5), uses(rank)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def whole_gradients(engine, shards):
    """Global gradients by name, from the shards of a placement that replicates them."""
    found = {}
    for unit, flat in zip(engine.units, shards, strict=True):
        for entry in unit.layout.entries:
            piece = flat[entry.offset : entry.offset + entry.numel]
            found[entry.name] = piece.reshape(entry.shape).clone()
    return found


@pytest.mark.parametrize("extra", USES)
@pytest.mark.parametrize(
    ("weights", "overlap"), [(0, "safe"), (1, "safe"), (2, "safe"), (2, "none"), (1, "full")]
)
def test_shared_reused_and_unused_parameters_get_their_summed_gradients(weights, overlap, extra):
    """With one unit whole at a time, too: one of two uses gives its place up between them."""

    def body(hierarchy):
        model = Odd()
        placement = Placement(weights, weights, 2, 2)
        engine = shard(
            model, model.units(), placement, hierarchy, overlap=overlap, check_order=True
        )
        torch.manual_seed(hierarchy.rank)
        engine.backward(model(torch.randn(3, 5), USES[extra](hierarchy.rank)))
        pieces = []
        for shard_ in engine.finish_gradients():
            flat = torch.empty(shard_.numel() * 4)
            engine._collectives.gather(shard_, flat, 2, 0, "test").wait()
            pieces.append(flat)
        return whole_gradients(engine, pieces)

    expected = gradients_alone(USES[extra])
    for found in run_ranks((2, 2), body):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


class Head(nn.Sequential):
    def forward(self, x):
        return self[0](x)


class Tied(nn.Module):
    """The head is a block, its weight or a part of it also the embedding's, which is in none."""

    def __init__(self, ties) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(6, 4, sparse=True)
        self.block, self.head = nn.Linear(4, 4), Head(nn.Linear(4, 6, bias=False))
        if ties == "weight":
            self.head[0].weight = self.embedding.weight
        if ties == "module":
            self.head.append(self.embedding)
        self.register_buffer("mask", torch.eye(4).to_sparse())

    def forward(self, tokens):
        hidden = self.block(self.embedding(tokens) @ self.mask.to_dense())
        return self.head(hidden).square().sum()


@pytest.mark.parametrize("ties", ["weight", "module"])
def test_what_a_block_shares_with_the_rest_is_whole_for_the_entire_pass(ties):
    """An embedding's gradient may be sparse, and a buffer."""
    tokens = torch.tensor([[0, 3], [3, 5]])

    def body(hierarchy):
        model = Tied(ties)
        blocks = [("block", model.block), ("head", model.head)]
        placement = Placement.named("zero3", hierarchy.levels)
        engine = shard(model, blocks, placement, hierarchy)
        loss = model(tokens[hierarchy.rank])
        engine.backward(loss, is_last=True)
        parts = zip(engine.units, engine.finish_gradients(), strict=True)
        return loss.item(), {unit.name: (unit.range, part.clone()) for unit, part in parts}

    alone = Tied(ties)
    losses = [alone(row) for row in tokens]
    sum(losses).backward()
    expected = {n: p.grad.to_dense().flatten() for n, p in alone.named_parameters()}
    for rank, (loss, parts) in enumerate(run_ranks((2,), body)):
        assert loss == pytest.approx(losses[rank].item())
        assert ("head" in parts) == (ties == "module")
        (start, _), part = parts["root"]
        mine = expected["embedding.weight"][start : start + len(part)]
        torch.testing.assert_close(part[: len(mine)], mine)


def test_a_block_that_runs_inside_of_another_is_refused():
    """It would take the outer one's place in the middle of its forward."""

    class Outer(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.linear, self.inner = nn.Linear(4, 4), [inner]  # no part of it

        def forward(self, x):
            return self.linear(self.inner[0](x))

    def body(hierarchy):
        inner = nn.Linear(4, 4)
        model = nn.ModuleList([inner, Outer(inner)])
        blocks = [("inner", inner), ("outer", model[1])]
        engine = shard(model, blocks, Placement.named("zero3", hierarchy.levels), hierarchy)
        for _ in range(2):
            with pytest.raises(UserError) as error:
                model[1](torch.ones(2, 4))
            assert model[0](torch.ones(2, 4)).isfinite().all()
        return str(error.value), len(engine.units)

    torch.manual_seed(6)
    message = "block 'inner': runs inside of block 'outer', need one of them left out of the blocks"
    assert run_ranks((2,), body) == [(message, 2)] * 2


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.empty.sum()


def test_a_block_without_parameters_or_elements_runs_as_it_is():
    def body(hierarchy):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1), Nothing())
        x = torch.randn(3, 4)
        model(x).sum().backward()
        expected = 2 * model[0].weight.grad.flatten()
        engine = shard(
            model, [(str(i), m) for i, m in enumerate(model)], Placement(1, 1, 1, 1), hierarchy
        )
        engine.backward(model(x).sum())
        start, stop = engine.units[0].range
        got = engine.finish_gradients()[0][: max(0, min(stop, 16) - start)]
        return [u.name for u in engine.units], torch.allclose(got, expected[start:][: got.numel()])

    assert run_ranks((2,), body) == [(["0", "2"], True)] * 2


def test_a_view_of_weights_that_will_be_away_is_refused():
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.queries = nn.Linear(4, 4), nn.Parameter(torch.ones(6, 4))

        def forward(self, x):
            return self.linear(x), self.queries[:3]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Learned()

        def forward(self, x):
            x, queries = self.block(x)
            return (x * queries).sum()

    def body(hierarchy):
        model = Model()
        shard(model, [("block", model.block)], Placement(1, 1, 1, 1), hierarchy)
        with pytest.raises(UserError) as error, torch.no_grad():
            model(torch.ones(3, 4))
        return str(error.value)

    message = "block 'block' returns a view of its own parameter, need a copy (.clone())"
    assert run_ranks((2,), body) == [message] * 2


def test_the_first_forward_may_be_for_inference_alone():
    def body(hierarchy):
        model = TinyModel(tied=False)
        engine = shard(model, model.units(), Placement(1, 1, 1, 1), hierarchy)
        with torch.inference_mode():
            before = model(batch(0)[:2]).item()
        loss = model(batch(0)[:2])
        engine.backward(loss)
        return loss.item() == before and all(g.isfinite().all() for g in engine.finish_gradients())

    assert run_ranks((2,), body) == [True] * 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_activation_checkpointing_inside_or_around_a_block_changes_nothing(outside, reentrant):
    def run(hierarchy, recompute):
        model = TinyModel(tied=False)
        if recompute:
            for block in model.blocks:
                wrap_with_checkpoint(block, outside, reentrant)
        engine = shard(model, model.units(), Placement(1, 1, 2, 2), hierarchy)
        engine.ledger.take()
        loss = model(batch(hierarchy.rank)[:4])
        engine.backward(loss, is_last=True)
        gradients = [g.clone() for g in engine.finish_gradients()]
        sent, _ = engine.ledger.take()
        return loss.item(), gradients, sent, engine.units[3].layout.numel

    def body(hierarchy):
        return run(hierarchy, False), run(hierarchy, True)

    for plain, recomputed in run_ranks((2, 2), body):
        assert plain[0] == recomputed[0]
        # Nothing is gathered once more, but for the block before the head where its forward cannot
        # be told from an evaluation's.
        pair, node = plain[2]
        again = plain[3] // 2 * 4 if outside and reentrant else 0
        assert recomputed[2] == [pair + again, node]
        for a, b in zip(plain[1], recomputed[1], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("strategy", "preset", "overlap"),
    [
        ("topo", "low", "none"),
        ("topo", "low", "safe"),
        ("topo", "low", "full"),
        ("mics", "exact", "full"),
        ("ddp", "exact", "safe"),
    ],
)
def test_units_gathered_in_vain_are_not_reduced_for_it(strategy, preset, overlap):
    """Blocks named in another order than they run, and a root that is done before the others."""

    def run(hierarchy, order):
        model = TinyModel(tied=False)
        placement = Placement.named(strategy, hierarchy.levels)
        wires = choose_wires(WiresConfig(preset=preset), placement, hierarchy.levels, "fp32")
        engine = shard(
            model, order(model.units()), placement, hierarchy,
            wires=wires, error_feedback=preset == "low", overlap=overlap,
        )  # fmt: skip
        found = {}
        for step in range(3):
            engine.backward(model(batch(step)[hierarchy.rank :: 8]), is_last=True)
            for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
                found[step, unit.name] = gradient.clone()
            engine.clear_gradients()
        return found

    def body(hierarchy):
        orders = [lambda u: u, lambda u: u[::-1], lambda u: u[1:3], lambda u: u[1:-1]]
        return [run(hierarchy, order) for order in orders]

    results = run_ranks((2, 2, 2), body)
    for plain, turned, *_ in results:
        for key, gradient in plain.items():
            assert torch.equal(gradient, turned[key]), key
    totals = [
        sum(g.square().sum().item() for rank in results for g in rank[order].values())
        for order in range(4)
    ]
    assert totals == pytest.approx([totals[0]] * 4, rel=1e-4 if preset == "exact" else 0.05)


def wrap_with_checkpoint(block, outside, reentrant):
    name = "_call_impl" if outside else "forward"
    inner = getattr(block, name)
    setattr(block, name, lambda *a: checkpoint(inner, *a, use_reentrant=reentrant))


def test_saved_views_of_weights_see_them_again_after_release():
    """A linear layer without bias saves a transposed view; other units use the memory between."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))

        def forward(self, x):
            for block in self.blocks:
                x = block(x).relu() + x
            return x.sum()

    def gradients(hierarchy, placement):
        model = Chain()
        blocks = [(f"blocks.{i}", b) for i, b in enumerate(model.blocks)]
        engine = shard(model, blocks, placement, hierarchy)
        torch.manual_seed(hierarchy.rank)
        engine.backward(model(torch.randn(2, 3, 16)))
        return [g.clone() for g in engine.finish_gradients()]

    def body(hierarchy):
        return gradients(hierarchy, Placement(2, 2, 2, 2)), gradients(
            hierarchy, Placement(0, 0, 2, 2)
        )

    for sharded, whole in run_ranks((2, 2), body):
        for a, b in zip(sharded, whole, strict=True):
            assert torch.equal(a, b)


def test_what_cannot_be_placed_is_refused_by_name():
    def body(hierarchy):
        messages = []
        frozen = TinyModel(tied=False)
        frozen.blocks[1].up.weight.requires_grad_(False)
        with torch.device("meta"):
            meta = TinyModel(tied=False)
        stray = TinyModel(tied=False)
        hooked = TinyModel(tied=False)
        hooked.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        cases = [
            (frozen, frozen.units()),
            (meta, meta.units()),
            (stray, [("other", nn.Linear(2, 2))]),
            (hooked, hooked.units()),
            (stray, [("root", stray.blocks[0])]),
        ]
        for model, blocks in cases:
            with pytest.raises(UserError) as error:
                shard(model, blocks, Placement(1, 1, 1, 1), hierarchy)
            messages.append(str(error.value))
        return messages

    for frozen, meta, stray, hooked, root in run_ranks((2,), body):
        assert "blocks.1.up.weight" in frozen
        assert "meta device" in meta
        assert "'other'" in stray
        assert hooked == "parameter head.weight: has a hook, need it registered after `shard`"
        assert root.startswith("block 'root': the name of what no block owns")


def test_first_values_come_from_the_model_or_slice_by_slice():
    def body(hierarchy):
        def counting(name, shape, start, stop):
            return torch.arange(start, stop, dtype=torch.float32)

        model = TinyModel(tied=True)
        expected = model.blocks[0].up.weight.detach().clone()
        shard(model, model.units(), Placement(0, 0, 1, 2), hierarchy)
        own = torch.equal(model.blocks[0].up.weight, expected)
        with torch.device("meta"):
            model = TinyModel(tied=True)
        shard(model, model.units(), Placement(0, 0, 2, 2), hierarchy, initial=counting)
        weight = model.blocks[2].up.weight.flatten()
        return own, torch.equal(weight, torch.arange(float(weight.numel())))

    assert run_ranks((2, 2), body) == [(True, True)] * 4
