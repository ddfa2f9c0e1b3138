"""Parameters that have no gradient on some ranks: what the ranks do together stays in one order."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.partition import Placement, shard
from tests.ranks import run_ranks


class Experts(nn.Module):
    """Of two experts a rank may need but one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, idle: bool) -> torch.Tensor:
        x = x + self.experts[0](x)
        return x if idle else x + self.experts[1](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        x = self.embedding(torch.randn(2, 8))
        for i, block in enumerate(self.blocks):
            x = block(x, idle=(rank + i) % 4 == 0)
        return self.head(x).sum()


class Dropped(nn.Module):
    """A rank passes by some of its layers: what comes in goes out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        x = torch.randn(2, 8)  # without a gradient, and so is the first layer's then
        for i, block in enumerate(self.blocks):
            x = block(x, self.passes_by(rank, i))
        return self.head(x).sum()

    def passes_by(self, rank: int, i: int) -> bool:
        return (rank + i) % 3 == 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, dropped: bool) -> torch.Tensor:
        return x if dropped else x + self.linear(x)


class Leading(Dropped):
    """Rank 3 passes by the first three layers, rank 2 by two, and rank 0 by none."""

    def passes_by(self, rank: int, i: int) -> bool:
        return i < rank


class Forked(Dropped):
    """Two towers of two layers, and some ranks pass by the second one's first or both."""

    def forward(self, rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        towers = [torch.randn(2, 8) for _ in range(2)]
        for i, block in enumerate(self.blocks):
            towers[i // 2] = block(towers[i // 2], self.passes_by(rank, i))
        return self.head(towers[0] * towers[1]).sum()

    def passes_by(self, rank: int, i: int) -> bool:
        return (i == 2 and rank % 2 == 0) or (i == 3 and rank == 0)


def compare(make, outside, strategy, overlap, order=1):
    """Two micro-batches of each of four ranks against all of them on one process, while the ranks
    compare what they are about to do. `outside` has the modules of no block; blocks are given in
    the `order` in which they run (1) or the other (-1)."""

    def body(hierarchy):
        model = make()
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)][::order]
        placement = Placement.named(strategy, hierarchy.levels)
        engine = shard(model, blocks, placement, hierarchy, overlap=overlap, check_order=True)
        for is_last in (False, True):
            engine.backward(model(hierarchy.rank), is_last)
        shards = engine.finish_gradients()
        return [(u.range, s.clone()) for u, s in zip(engine.units, shards, strict=True)]

    model = make()
    for rank in [0, 1, 2, 3] * 2:
        model(rank).backward()
    units = [outside(model), *([block] for block in [*model.blocks][::order])]
    for found in run_ranks((2, 2), body):
        for (span, shard_), modules in zip(found, units, strict=True):
            whole = torch.cat([p.grad.flatten() for m in modules for p in m.parameters()])
            whole = torch.nn.functional.pad(whole, (0, span[1]))[slice(*span)]
            torch.testing.assert_close(shard_, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "topo"])
def test_blocks_passed_by_on_some_ranks_change_no_order_of_collectives(strategy, overlap):
    compare(Dropped, lambda model: [model.head], strategy, overlap)


@pytest.mark.parametrize(("make", "order"), [(Leading, -1), (Forked, 1), (Forked, -1)])
def test_nor_do_those_that_are_named_in_another_order_or_run_beside_each_other(make, order):
    compare(make, lambda model: [model.head], "zero3", "safe", order)


@pytest.mark.parametrize("without", [(), (0,)])
def test_blocks_passed_by_in_a_forward_without_a_backward_are_forgotten(without):
    """In the evaluation after it they would have stayed gathered, on this rank alone, and begun a
    backward though they do not run."""

    def body(hierarchy):
        model = Shortened()
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        placement = Placement.named("zero3", hierarchy.levels)
        engine = shard(model, blocks, placement, hierarchy, check_order=True, prefetch=3)
        found = []
        for is_spoilt in (True, False):
            if is_spoilt:
                loss = model(hierarchy.rank)  # and rank 0 passes by the first block
                with torch.no_grad():
                    model(hierarchy.rank, without=())
            loss = model(hierarchy.rank, without)
            engine.backward(loss, is_last=True)
            found.append([gradient.clone() for gradient in engine.finish_gradients()])
            engine.clear_gradients()
        return all(torch.equal(*pair) for pair in zip(*found, strict=True))

    assert run_ranks((2,), body) == [True, True]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


def test_a_block_that_only_passes_on_tensors_within_others_is_refused():
    """No rank could tell when its turn in backward comes."""

    def body(hierarchy):
        model = nn.Sequential(nn.Linear(8, 8), Pair())
        engine = shard(
            model, [("pair", model[1])], Placement.named("zero3", hierarchy.levels), hierarchy
        )
        with pytest.raises(UserError, match="block 'pair' returns only what it was given"):
            model(torch.ones(2, 8))
        return engine.hierarchy.size

    torch.manual_seed(0)
    assert run_ranks((2,), body) == [2, 2]


@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "topo"])
def test_parameters_idle_on_some_ranks_change_no_order_of_collectives(strategy, overlap):
    """As experts are that get no token of one rank's."""

    compare(Mixture, lambda model: [model.embedding, model.head], strategy, overlap)


RATE = 0.01


class Shortened(Dropped):
    """Some layers are not even called."""

    def forward(self, rank: int, without: Sequence[int] | None = None) -> torch.Tensor:
        if without is None:
            return super().forward(rank)
        torch.manual_seed(rank)
        x = torch.randn(2, 8)
        for i, block in enumerate(self.blocks):
            if i not in without:
                x = block(x, dropped=False)
        return self.head(x).square().sum()


def losses_alone(without: Sequence[int]) -> list[list[float]]:
    """Of two micro-batches in each of three steps, the losses of four ranks."""
    model, losses = Shortened(), []
    for _ in range(3):
        for left_out in (without, ()):
            parts = [model(rank, left_out) for rank in range(4)]
            sum(parts).backward()
            losses.append([part.item() for part in parts])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=RATE)
                parameter.grad = None
    return losses


@pytest.mark.parametrize("strategy", ["topo", "zero3", "ddp"])
def test_blocks_that_a_step_leaves_out_have_no_gradient_of_the_step_before(strategy):
    def body(hierarchy):
        model = Shortened()
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        placement = Placement.named(strategy, hierarchy.levels)
        engine = shard(model, blocks, placement, hierarchy)
        idle = [unit.name in ("blocks.1", "blocks.2") for unit in engine.units]
        sizes = []
        for without in ((), (1, 2)):
            engine.backward(model(hierarchy.rank, without), is_last=True)
            norms = [gradient.norm() for gradient in engine.finish_gradients()]
            sizes.append(hierarchy.world.sum(torch.stack(norms).double())[idle].tolist())
            engine.clear_gradients()
        return sizes

    for first, second in run_ranks((2, 2), body):
        assert all(size > 0 for size in first)
        assert second == [0, 0]


@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
@pytest.mark.parametrize("without", [[0], [0, 1, 2], [1, 2], [2, 3]], ids=str)
def test_blocks_that_one_micro_batch_leaves_out_have_todays_weights_in_the_next(without, overlap):
    """All ranks leave them out. Gathered ahead in that backward, some would hold old ones."""

    def body(hierarchy):
        model = Shortened()
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        placement = Placement.named("topo", hierarchy.levels)
        engine = shard(model, blocks, placement, hierarchy, overlap=overlap, check_order=True)
        losses = []
        for _ in range(3):
            for left_out in (without, ()):
                loss = model(hierarchy.rank, left_out)
                engine.backward(loss, is_last=not left_out)
                losses.append(loss.item())
            for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
                unit.master.sub_(gradient, alpha=RATE)
            engine.publish()
            engine.clear_gradients()
        return losses

    found = run_ranks((2, 2), body)
    torch.testing.assert_close(torch.tensor(found).T, torch.tensor(losses_alone(without)))
