"""A module of nobody's framework, its plain training, and ranks that use the library's surface."""

import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megafrontier
from megafrontier.api.mesh import leave_mesh
from megafrontier.launch.local import fork_ranks

WIDTH, BATCH, STEPS = 10, 24, 4


def machine(*sizes: int) -> dict[str, Any]:
    """The levels of a machine, as `init_mesh` takes them."""
    names = ("pair", "node", "world")[-len(sizes) :]
    return {"levels": {name: {"size": size} for name, size in zip(names, sizes, strict=True)}}


def run_script(sizes: tuple[int, ...], body: Callable[[Any], Any]) -> list[Any]:
    """Run `body` with the mesh of each rank, on ranks of a machine of these sizes. Returns the
    results in rank order."""
    count = torch.Size(sizes).numel()
    with tempfile.TemporaryDirectory() as folder:

        def rank_body() -> int:
            mesh = megafrontier.init_mesh(machine(*sizes))
            Path(folder, str(mesh.rank)).write_bytes(pickle.dumps(body(mesh)))
            leave_mesh()
            return 0

        assert fork_ranks(count, rank_body) == 0, "a rank failed; its traceback is above"
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(count)]


class Residual(nn.Module):
    """A block with a block inside it, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.mlp(self.norm(x))


class Regression(nn.Module):
    """Learns a sum of sines; the loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        for block in self.blocks:
            out = block(out)
        return nn.functional.mse_loss(self.head(out), x.sin().sum(1, keepdim=True))


def batch(step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator).chunk(size)[rank]


def micro_batches(x: torch.Tensor, count: int, model: nn.Module, is_sharded: bool) -> Iterator[Any]:
    """(micro-batch, context of its backward)."""
    for number, part in enumerate(x.chunk(count)):
        is_last = number == count - 1
        yield part, megafrontier.no_sync(model, not is_last) if is_sharded else nullcontext()
