"""Blocks inside of blocks, and units of different hierarchies in one block."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafrontier.parallel.mesh import Splits
from megafrontier.parallel.param_spec import ParamSpec, set_spec
from megafrontier.partition import Placement, Wires
from megafrontier.partition.rules import StateRules
from tests.partition.sharding import shard, shard_by_rules
from tests.partition.tiny import SIDE, named_gradients, stack_input
from tests.ranks import run_mesh, run_ranks


class Outer(nn.Module):
    """Uses its own parameters before, between and after its inner blocks."""

    def __init__(self, inner, recomputes=False):
        super().__init__()
        self.before, self.after = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.between = nn.Parameter(torch.randn(SIDE))
        self.inner = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(inner))
        self.recomputes = recomputes

    def forward(self, x):
        x = torch.tanh(self.before(x))
        for inner in self.inner:
            x = self.between * (
                checkpoint(inner, x, use_reentrant=False) if self.recomputes else inner(x)
            )
        return x + self.after(x).tanh()


class Net(nn.Module):
    """Blocks with different numbers of blocks inside; one runs twice."""

    def __init__(self, recomputes=False, around=False):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.head = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 1)
        self.blocks = nn.ModuleList(Outer(i, recomputes) for i in (2, 0, 3, 1))
        self.around = around

    def named_blocks(self):
        """Inner blocks before those around them, which is not the order in which they run."""
        inner = [
            (f"blocks.{i}.inner.{j}", inner)
            for i, block in enumerate(self.blocks)
            for j, inner in enumerate(block.inner)
        ]
        return [*inner, *((f"blocks.{i}", block) for i, block in enumerate(self.blocks))]

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[2]):
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return self.head(x).square().sum()


def expected_gradients(model, ranks, micro_batches):
    for rank in range(ranks):
        for step in range(micro_batches):
            model(stack_input(rank, step)).backward()
    return {
        name: torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()
        for name, p in model.named_parameters()
    }


def assert_close(found, expected):
    """`found`: of each rank, parts of the gradients, which together have all elements."""
    seen = dict.fromkeys(expected, 0)
    for parts in found:
        for name, first, last, gradient in parts:
            torch.testing.assert_close(gradient, expected[name][first:last], rtol=1e-5, atol=1e-5)
            seen[name] += last - first
    assert all(seen[name] >= gradient.numel() for name, gradient in expected.items())


CASES = [
    (Placement(2, 2, 2, 2), "safe", 1, {}),
    (Placement(2, 2, 2, 2), "full", 2, {"recomputes": True}),
    (Placement(1, 1, 2, 2), "full", 1, {"around": True}),
    (Placement(1, 1, 1, 2), "none", 1, {}),
    (Placement(0, 0, 2, 2), "safe", 1, {"around": True}),
    (Placement(0, 0, 0, 0), "safe", 1, {}),
]


@pytest.mark.parametrize(("placement", "overlap", "prefetch", "kind"), CASES)
def test_blocks_inside_of_blocks_give_one_processs_gradients(placement, overlap, prefetch, kind):
    def body(hierarchy):
        model = Net(**kind)
        engine = shard(
            model,
            model.named_blocks(),
            placement,
            hierarchy,
            overlap=overlap,
            prefetch=prefetch,
            check_order=overlap == "safe",
        )
        for step in range(3):
            with engine.no_sync(step < 2):
                model(stack_input(hierarchy.rank, step)).backward()
        return named_gradients(engine)

    assert_close(run_ranks((2, 2), body), expected_gradients(Net(), 4, 3))


class Experts(nn.Module):
    """Two experts; a rank holds those of its place in the fastest level, and asks its peer for the
    other: written by hand, with an all-gather of the inputs and a reduce-scatter of the results."""

    def __init__(self, group=None, place=None):
        super().__init__()
        self.router = nn.Linear(SIDE, 2)
        weights = torch.randn(2, SIDE, SIDE)
        self.group = group
        self.weights = nn.Parameter(weights if place is None else weights[place : place + 1])

    def forward(self, x):
        share = F.softmax(self.router(x), -1)
        if self.group is None:
            return x + sum(share[..., i, None] * torch.tanh(x @ self.weights[i]) for i in range(2))
        from torch.distributed.nn.functional import all_gather, reduce_scatter

        inputs = torch.cat(all_gather(x.contiguous(), self.group))
        shares = torch.cat(all_gather(share.contiguous(), self.group))
        place = torch.distributed.get_rank(self.group)
        mine = shares[..., place, None] * torch.tanh(inputs @ self.weights[0])
        return x + reduce_scatter(torch.empty_like(x), list(mine.chunk(2)), group=self.group)


class Mixture(nn.Module):
    def __init__(self, group=None, place=None):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.head = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 1)
        self.blocks = nn.ModuleList(Experts(group, place) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "topo"])
def test_units_of_different_hierarchies_in_one_block_equal_one_process(strategy, overlap):
    """Experts are divided over the fastest level, so their data-parallel level is the slow one."""

    def body(mesh):
        place = mesh.hierarchy(("expert",)).rank
        model = Mixture(mesh.world.groups[0], place)
        for block in model.blocks:
            shape, box = (2, SIDE, SIDE), ((place, place + 1), (0, SIDE), (0, SIDE))
            spec = ParamSpec("", shape, "expert", box, axes=("expert_data",))
            set_spec(block.weights, spec)
        engine = shard(
            model,
            [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)],
            Placement.named(strategy, mesh.levels),
            mesh,
            overlap=overlap,
        )
        for step in range(2):
            with engine.no_sync(step == 0):
                model(stack_input(mesh.rank, step)).backward()
        size = SIDE * SIDE
        return [
            (name, first + shift, last + shift, gradient)
            for name, first, last, gradient in named_gradients(engine)
            for shift in [place * size if name.endswith("weights") else 0]
        ]

    found = run_mesh((2, 2), body, splits=Splits(expert=2))
    assert_close(found, expected_gradients(Mixture(), 4, 2))


class Routed(nn.Module):
    """A block whose router computes in fp32, beside a matrix in bf16."""

    def __init__(self):
        super().__init__()
        self.router, self.mix = nn.Linear(SIDE, 2), nn.Linear(SIDE, SIDE)

    def forward(self, x):
        share = F.softmax(self.router(x.float()), -1)
        return x + self.mix(x) * share[..., :1].to(x.dtype)


def test_units_of_one_block_may_differ_in_type_wires_and_placement():
    """Each unit's gradient is that of one process, rounded as its own type."""
    sharded, whole = Placement(1, 1, 1, 1), Placement(0, 0, 1, 1)

    def body(hierarchy):
        torch.manual_seed(1)
        block = Routed()
        exact, half = (Wires.plain(1, dtype) for dtype in (torch.float32, torch.bfloat16))
        in_fp32 = StateRules(whole, exact, torch.float32)
        in_bf16 = StateRules(sharded, half, torch.bfloat16)
        rules = SimpleNamespace(
            default=in_bf16, of=lambda spec: in_fp32 if "router" in spec.name else in_bf16
        )
        engine = shard_by_rules(nn.Sequential(block), [("block", block)], rules, hierarchy)
        assert block.router.weight.dtype == torch.float32
        assert block.mix.weight.dtype == torch.bfloat16
        block(stack_input(hierarchy.rank).bfloat16()).float().square().sum().backward()
        return named_gradients(engine)

    torch.manual_seed(1)
    alone = Routed()
    alone.mix.bfloat16()
    for rank in range(2):
        alone(stack_input(rank).bfloat16()).float().square().sum().backward()
    expected = {f"0.{name}": p.grad.float().flatten() for name, p in alone.named_parameters()}
    for parts in run_ranks((2,), body):
        for name, first, last, gradient in parts:
            tolerance = 1e-5 if "router" in name else 0.03
            torch.testing.assert_close(
                gradient, expected[name][first:last], rtol=tolerance, atol=10 * tolerance
            )
