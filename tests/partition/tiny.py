"""Small models, and their training on one process and on a hierarchy, for comparison."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafrontier.config import WiresConfig
from megafrontier.optim.gradients import global_norm
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.partition import Placement, Wires
from megafrontier.partition.engine import Engine
from megafrontier.partition.presets import choose_wires
from tests.partition.sharding import shard
from tests.ranks import make_levels, run_ranks

VOCABULARY, WIDTH, LENGTH, GLOBAL_BATCH = 37, 13, 9, 32
CLIP = 0.5
SIDE = 6
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]
LEVELS = make_levels((2, 2, 2))


def preset(
    name: str, strategy: str, levels: Levels = LEVELS, precision: str = "fp32", **chosen: object
) -> Wires:
    """The wires of a preset for a strategy, but for what is chosen otherwise."""
    placement = Placement.named(strategy, levels)
    return choose_wires(WiresConfig(preset=name, **chosen), placement, levels, precision)


class TinyBlock(nn.Module):
    """Odd sizes, biases, and parameters smaller than a shard's alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 31)
        self.down = nn.Linear(31, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.cumsum(self.norm(x), dim=1) / LENGTH
        return x + self.scale * self.down(F.gelu(self.up(mixed)))


class TinyModel(nn.Module):
    def __init__(self, tied: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def units(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        if self.head.weight is self.embedding.weight:
            return blocks
        return [("embedding", self.embedding), *blocks, ("head", self.head)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def batch(step: int) -> torch.Tensor:
    """Sequences that can be learnt: each token is twice the one before, plus one."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(VOCABULARY, (GLOBAL_BATCH,), generator=generator)]
    for _ in range(LENGTH - 1):
        tokens.append((2 * tokens[-1] + 1) % VOCABULARY)
    return torch.stack(tokens, dim=1)


def train_alone(tied: bool, steps: int) -> list[float]:
    """The reference: plain PyTorch on one process."""
    model = TinyModel(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    losses = []
    for step in range(steps):
        tokens = batch(step)
        loss = model(tokens) / (GLOBAL_BATCH * (LENGTH - 1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def backward(engine: Engine, loss: torch.Tensor, is_last: bool = False) -> None:
    """Backward of a micro-batch, the last one of its step or not."""
    with engine.no_sync(not is_last):
        loss.backward()


def engine_step(
    engine: Engine,
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
    accumulation: int,
) -> float:
    """One optimizer step on this rank's part of the global batch; the global mean loss."""
    hierarchy = engine.hierarchy
    mine = batch(step).chunk(hierarchy.size)[hierarchy.rank].chunk(accumulation)
    total = torch.zeros(1, dtype=torch.float64)
    for tokens in mine:
        loss = model(tokens)
        backward(engine, loss)
        total += loss.detach()
    count = GLOBAL_BATCH * (LENGTH - 1)
    gradients = engine.finish_gradients()
    counted = [unit.counts for unit in engine.units]
    norm = global_norm(gradients, counted, hierarchy.world) / count
    clip = min(1.0, CLIP / (norm.item() + 1e-6))
    for unit, gradient in zip(engine.units, gradients, strict=True):
        unit.master.grad = gradient * (clip / count)
    optimizer.step()
    engine.clear_gradients()
    engine.publish()
    return (hierarchy.world.sum(total) / count).item()


def build(
    hierarchy: Hierarchy,
    wires: Wires,
    strategy: str | Placement = "topo",
    error_feedback: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[TinyModel, Engine, torch.optim.Optimizer]:
    """A model, its engine, whose ledger is empty, and AdamW on its masters."""
    model = TinyModel(tied=False)
    named = isinstance(strategy, str)
    placement = Placement.named(strategy, hierarchy.levels) if named else strategy
    engine = shard(
        model,
        model.units(),
        placement,
        hierarchy,
        wires=wires,
        error_feedback=error_feedback,
        dtype=dtype,
    )
    engine.ledger.take()
    optimizer = torch.optim.AdamW([unit.master for unit in engine.units], lr=0.02)
    return model, engine, optimizer


def place(
    hierarchy: Hierarchy,
    strategy: str,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    rest_is_root: bool = False,
    **options: Any,
) -> tuple[TinyModel, Engine]:
    """A model and its engine, whose ledger is empty; `options` are those of `shard`. With
    `rest_is_root` embedding and head have no units of their own."""
    model = TinyModel(tied)
    placement = Placement.named(strategy, hierarchy.levels)
    units = [u for u in model.units() if not rest_is_root or u[0].startswith("blocks")]
    engine = shard(model, units, placement, hierarchy, dtype=dtype, **options)
    engine.ledger.take()
    return model, engine


def make_optimizer(engine: Engine) -> torch.optim.Optimizer:
    return torch.optim.AdamW([unit.master for unit in engine.units], lr=0.01)


def finished_gradients(
    engine: Engine, seed: int, poison: float | None = None
) -> list[torch.Tensor]:
    """What arrives of random gradients, handed over as backward does; one element of one is
    `poison`."""
    torch.manual_seed(seed)
    for unit in engine.units:
        for index, parameter in enumerate(unit.parameters):
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
            if poison is not None and (unit, index) == (engine.units[2], 3):
                parameter.grad.view(-1)[5] = poison
            unit.collect_gradient(index, parameter)
        unit.start_reducing()
    found = engine.finish_gradients()
    engine.clear_gradients()
    return found


def watch_collectives(engine, watch):
    """Call `watch(name of the level, label)` before each collective, on its stream."""
    collective = engine.ledger.collective

    def observed(level, label, kind):
        watch(engine.hierarchy.levels.names[level], label)
        return collective(level, label, kind)

    engine.ledger.collective = observed


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def train_sharded(
    hierarchy: Hierarchy,
    placement: Placement,
    tied: bool,
    steps: int,
    accumulation: int,
    wires: Wires | None = None,
) -> list[float]:
    model = TinyModel(tied)
    engine = shard(model, model.units(), placement, hierarchy, wires=wires)
    masters = [unit.master for unit in engine.units]
    optimizer = torch.optim.AdamW(masters, lr=0.02, weight_decay=0.1)
    return [engine_step(engine, model, optimizer, step, accumulation) for step in range(steps)]


def residual(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + block(x).tanh()


class Stack(nn.Module):
    """A first layer, blocks, each run as `call(block, x)`, and a head; the loss is a sum.

    Outputs of the default block are views, because its input has three dimensions and it has a
    bias.
    """

    def __init__(
        self,
        block: Callable[[], nn.Module] = lambda: nn.Linear(SIDE, SIDE),
        call: Call = residual,
        count: int = 4,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.head = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 1)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.call = call

    def units(self) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x).square().sum()

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.loss(*inputs)


class Shortened(Stack):
    """Does not call some of its blocks."""

    def loss(self, x: torch.Tensor, left_out: tuple[int, ...] = ()) -> torch.Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i not in left_out:
                x = self.call(block, x)
        return self.head(x).square().sum()


class Shared(nn.Module):
    """Two reentrant checkpoints use a weight, so its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(SIDE, SIDE)
        self.blocks = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(2))

    def units(self) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: self.shared(block(x)), x, use_reentrant=True)
        return x.sum()


def stack_input(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, SIDE, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded_stack(
    hierarchy: Hierarchy,
    placement: Placement,
    *stack: Any,
    make: Callable[..., Stack] = Stack,
    **options: Any,
) -> tuple[Stack, Engine]:
    """`make(*stack)` and its engine; `options` are those of `shard`."""
    model = make(*stack)
    return model, shard(model, model.units(), placement, hierarchy, **options)


def named_gradients(engine: Engine) -> list[tuple[str, int, int, torch.Tensor]]:
    """(parameter, first, last, gradient of these elements) of what is finished on this rank."""
    return [
        (entry.name, first, last, gradient[at : at + last - first].clone())
        for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True)
        for entry, first, last, at in unit.layout.within(*unit.range)
    ]


def assert_gradients_of_one_process(
    make: Callable[[], nn.Module],
    placement: Placement | str,
    loss: Callable[[nn.Module, int], torch.Tensor] = lambda model, rank: model(stack_input(rank)),
    sizes: tuple[int, ...] = (2,),
    steps: int = 1,
    overlaps: Sequence[str] = ("safe",),
    **options: Any,
) -> None:
    """The gradients of `loss(model, rank)` over all ranks, in steps that change no weights, with
    each of the overlaps. The ranks compare their collectives."""

    def train(hierarchy: Hierarchy, overlap: str) -> list[Any]:
        model = make()
        named = isinstance(placement, str)
        here = Placement.named(placement, hierarchy.levels) if named else placement
        given = {"check_order": True, "overlap": overlap, **options}
        engine = shard(model, model.units(), here, hierarchy, **given)
        found = []
        for _ in range(steps):
            backward(engine, loss(model, hierarchy.rank), is_last=True)
            found += named_gradients(engine)
            engine.finish_step(torch.zeros(()))
        return found

    def body(hierarchy: Hierarchy) -> list[list[Any]]:
        return [train(hierarchy, overlap) for overlap in overlaps]

    alone = make()
    for rank in range(prod(sizes)):
        loss(alone, rank).backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in alone.named_parameters()
    }
    for overlap, ranks in zip(overlaps, zip(*run_ranks(sizes, body), strict=True), strict=True):
        seen = set()
        for name, first, last, gradient in (part for found in ranks for part in found):
            seen.add(name)
            whole = expected[name].flatten()[first:last]
            torch.testing.assert_close(
                gradient, whole, rtol=1e-5, atol=1e-5, msg=lambda m, o=overlap: f"{o}: {m}"
            )
        assert seen == set(expected)


def descend(
    engine: Engine,
    loss: Callable[[int], torch.Tensor],
    steps: int,
    rate: float = 0.01,
) -> list[float]:
    """Global losses of gradient descent, where `loss(step)` is that of this rank."""
    losses = []
    for step in range(steps):
        part = loss(step)
        losses.append(engine.hierarchy.world.sum(part.detach().double().view(1)).item())
        backward(engine, part, is_last=True)
        for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
            unit.master.sub_(gradient, alpha=rate)
        engine.finish_step(torch.zeros(()))
    return losses


def descend_alone(
    model: nn.Module, loss: Callable[[int, int], torch.Tensor], steps: int, rate: float = 0.01
) -> list[float]:
    """The same on one process, where `loss(rank, step)` is that of one of four ranks."""
    losses = []
    for step in range(steps):
        model.zero_grad()
        total = sum(loss(rank, step) for rank in range(4))
        total.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=rate)
        losses.append(total.item())
    return losses
