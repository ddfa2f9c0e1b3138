"""A rank may hold a part of a matrix, beside parameters that it holds whole: written by hand, as
tensor parallelism does it. Each rank sees a part of the tokens, but for the matrices."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafrontier.model.init import initial_slice, initialise, with_specs
from megafrontier.optim.gradients import global_norm
from megafrontier.parallel.mesh import Splits
from megafrontier.parallel.param_spec import ParamSpec, global_ranges, set_spec, spec_of
from megafrontier.partition import Placement
from tests.partition.sharding import shard
from tests.ranks import run_mesh

WIDTH, HIDDEN, TOKENS, STEPS, RATE = 6, 10, 8, 3, 0.02


class Gather(torch.autograd.Function):
    """All ranks' tokens [n, width] from a part on each; the gradients of all ranks add up."""

    @staticmethod
    def forward(ctx, tokens, group):
        ctx.group = group
        return torch.cat(all_gather(tokens, group))

    @staticmethod
    def backward(ctx, gradient):
        return own_sum(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """This rank's part of the sum of all ranks' tokens [n, width]."""

    @staticmethod
    def forward(ctx, tokens, group):
        ctx.group = group
        return own_sum(tokens, group)

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat(all_gather(gradient, ctx.group)), None


def all_gather(tensor, group):
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def own_sum(tensor, group):
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def part(shape, dim, index, parts):
    """A matrix or bias [shape] of which a rank holds one of `parts` along `dim`."""
    box = [(0, size) for size in shape]
    length = shape[dim] // parts
    box[dim] = (index * length, (index + 1) * length)
    spec = ParamSpec(
        "", shape, "matrix", tuple(box), axes=("context", "data"), init_mean=0.0, init_std=0.4
    )
    parameter = nn.Parameter(torch.empty(spec.local_shape))
    set_spec(parameter, spec)
    return parameter


class Block(nn.Module):
    """`up` is cut by rows, `down` by columns; the norm is whole, and sees this rank's tokens."""

    def __init__(self, group, index, parts):
        super().__init__()
        self.group = group
        self.norm = with_specs(nn.LayerNorm(WIDTH), "norm")
        self.up = part((HIDDEN, WIDTH), 0, index, parts)
        self.up_bias = part((HIDDEN,), 0, index, parts)
        self.down = part((WIDTH, HIDDEN), 1, index, parts)

    def forward(self, x):
        normed = self.norm(x)
        if self.group is not None:
            normed = Gather.apply(normed, self.group)
        added = torch.tanh(normed @ self.up.t() + self.up_bias) @ self.down.t()
        return x + (added if self.group is None else Scatter.apply(added, self.group))


class Net(nn.Module):
    """Two blocks, and a norm and a head outside of them."""

    def __init__(self, group=None, index=0, parts=1):
        super().__init__()
        self.blocks = nn.ModuleList(Block(group, index, parts) for _ in range(2))
        self.norm = with_specs(nn.LayerNorm(WIDTH), "norm")
        self.head = with_specs(nn.Linear(WIDTH, 1), "matrix", std=0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).square().sum()


def tokens(step, data_rank):
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randn(TOKENS, WIDTH, generator=generator)


def alone(data_ranks):
    """Loss, norm and gradients by name of each step on one process."""
    model = Net()
    initialise(model, seed=7)
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        loss = sum(model(tokens(step, rank)) for rank in range(data_ranks))
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        gradients = {name: p.grad.flatten().clone() for name, p in model.named_parameters()}
        steps.append((loss.item(), norm.item(), gradients))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return steps


def train(mesh, placement, overlap):
    """Loss, norm and this rank's parts of the gradients of each step: (name, first, last, values),
    in elements of the whole tensors."""
    tensor = mesh.hierarchy(("tensor",))
    # Not the tensor split's own group, because the engine's threads use it at the same time.
    group = mesh.world.groups[0]
    with torch.device("meta"):
        model = Net(group, tensor.rank, tensor.size)
    specs = {name: spec_of(name, parameter) for name, parameter in model.named_parameters()}
    engine = shard(
        model,
        [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)],
        placement,
        mesh,
        overlap=overlap,
        initial=partial(initial_slice, 7),
    )
    steps = []
    for step in range(STEPS):
        mine = tokens(step, mesh.data_rank).chunk(tensor.size)[tensor.rank]
        loss = model(mine)
        loss.backward()
        gradients = engine.finish_gradients()
        norm = global_norm(gradients, [unit.counts for unit in engine.units], mesh.world)
        found = []
        for unit, gradient in zip(engine.units, gradients, strict=True):
            for entry, first, last, at in unit.layout.within(*unit.range):
                for start, stop in global_ranges(specs[entry.name], first, last):
                    found.append(
                        (entry.name, start, stop, gradient[at : at + stop - start].clone())
                    )
                    at += stop - start
            unit.master.sub_(gradient, alpha=RATE)
        engine.finish_step(torch.zeros(()))
        total = mesh.world.sum(loss.detach().double().view(1)).item()
        steps.append((total, norm.item(), found))
    return steps


@pytest.mark.parametrize(
    ("sizes", "depths", "overlap"),
    [
        ((2,), (1, 1, 1, 1), "safe"),
        ((2, 2), (2, 2, 2, 2), "safe"),
        ((2, 2), (0, 0, 1, 2), "full"),
        ((2, 2), (1, 1, 2, 2), "none"),
    ],
)
def test_parts_of_matrices_train_as_on_one_process(sizes, depths, overlap):
    """Losses, norms and gradients of 2 × 2 ranks that each hold half of the matrices' columns or
    rows, in training."""
    data_ranks = len(sizes)
    body = partial(train, placement=Placement(*depths), overlap=overlap)
    ranks = run_mesh(sizes, body, splits=Splits(tensor=2))
    for step, (loss, norm, expected) in enumerate(alone(data_ranks)):
        seen = {name: torch.zeros(len(gradient)) for name, gradient in expected.items()}
        for rank in ranks:
            assert rank[step][:2] == pytest.approx((loss, norm), rel=1e-5)
            for name, start, stop, gradient in rank[step][2]:
                seen[name][start:stop] += 1
                torch.testing.assert_close(
                    gradient, expected[name][start:stop], rtol=1e-4, atol=1e-5
                )
        assert all(count.min() >= 1 for count in seen.values())
