"""Attention to long and short documents, shared by 4 nodes of a slow network.

    python -m scripts.benchmarks.slow_network.context [--rate MB/s] [--rounds N]

Each contender trains the same block on the same rows of Python's own library: forward and backward,
without the gradients of weights. "needed" is parallel.context. "all-gather" cuts the row zig-zag,
whatever the documents, and gathers all keys and values. Rounds of the contenders take turns, and
the shortest counts. Needs root and Debian's iproute2.

torch's own `context_parallel` is not among them, because it does not run on CPUs: torch 2.13 has no
sharding strategy for `aten._scaled_dot_product_flash_attention_for_cpu`.
"""

import os
import random
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafrontier.config import ModelConfig
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.rendezvous import join
from megafrontier.model.block import Block
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice
from megafrontier.model.kernels.chunks import chunk_attention
from megafrontier.model.kernels.exchanges import AttentionPart
from megafrontier.parallel.env import identify
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Mesh, MeshShape, Splits
from megafrontier.partition import Engine, Placement, shard
from megafrontier.splits.context import ContextSplit
from megafrontier.splits.tokens import TokenGroup
from scripts.benchmarks.shared.cluster import open_cluster
from scripts.benchmarks.shared.job import Job
from scripts.benchmarks.shared.measuring import at_least, make_parser

NODES, LENGTH, TIMEOUT_SECONDS = 4, 8192, 3600.0
MODEL: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 2, "vocab_size": 256}


class AllGather(ContextSplit):
    """Chunks of whole rows, and keys and values of all ranks."""

    def _chunks(self, rank: int) -> list[tuple[int, int]]:
        count = 2 * self.group.size
        chunks = [*pairwise(LENGTH * i // count for i in range(count + 1))]
        return [chunks[rank], chunks[-1 - rank]]

    def part(self, values: Tensor, documents: Tensor) -> Tensor:
        chunks = self._chunks(self.group.index)
        return torch.cat([values[:, start:stop] for start, stop in chunks], 1)

    def parts(self, documents: Tensor) -> list[AttentionPart]:
        found, offset = [], 0
        for first, last in self._chunks(self.group.index):
            for begin, end in pairwise(documents.tolist()):
                start, stop = max(first, begin), min(last, end)
                if start < stop:
                    tokens = slice(offset + start - first, offset + stop - first)
                    found.append(AttentionPart(tokens, slice(begin, start)))
            offset += last - first
        return found

    def bounds(self, documents: Tensor) -> Tensor:
        sizes = [part.tokens.stop - part.tokens.start for part in self.parts(documents)]
        return torch.tensor([*accumulate(sizes, initial=0)], dtype=torch.int32)

    def pieces(self, kv_heads: int) -> int:
        return 1

    def begin_gather(self, heads: Tensor, documents: Tensor) -> Callable[[], Tensor]:
        chain, out = self.group.start_gather(heads)

        def wait() -> Tensor:
            self.group.wait(chain)
            first, last = out.view(self.group.size, 2, -1, *heads.shape[1:]).unbind(1)
            return torch.cat([first, last.flip(0)]).flatten(0, 1)

        return wait

    def begin_reduce(
        self, heads: Tensor, documents: Tensor, dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        first, last = heads.unflatten(0, (2 * self.group.size, -1)).chunk(2)
        chain = self.group.start_reduce(torch.stack([first, last.flip(0)], 1).to(dtype))
        return lambda: self.group.wait(chain).float().view(-1, *heads.shape[1:])


def library_row() -> tuple[int, ...]:
    """Where documents start in a row of files of Python's own library, at 4 bytes a token."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
    sizes = [path.stat().st_size // 4 for path in files if path.stat().st_size > 8]
    random.Random(0).shuffle(sizes)
    return (*takewhile(lambda start: start < LENGTH, accumulate(sizes, initial=0)), LENGTH)


CONTENDERS: dict[str, type[ContextSplit]] = {"needed": ContextSplit, "all-gather": AllGather}


def build(mesh: Mesh, exchange: type[ContextSplit]) -> tuple[GPT, Engine]:
    """The model and its engine, whose attention exchanges keys and values with `exchange`."""
    config = ModelConfig(sequence_length=LENGTH, position="rotary", **MODEL)
    with torch.device("meta"):
        model = GPT(config)
    hierarchy = mesh.hierarchy(("context",))
    split = exchange(TokenGroup(hierarchy.rank, NODES))
    model.part = split.part
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.over_chunks = partial(chunk_attention, exchange=split.number, size=NODES)
    placement = Placement.named("ddp", mesh.hierarchy().levels)
    initial = partial(initial_slice, 0)
    engine = shard(model, model.units(), placement, mesh, initial=initial)
    split.group.connect(engine, hierarchy)
    return model, engine


def heads_of(mesh: Mesh) -> list[Tensor]:
    """Queries, keys and values of a rank's tokens, [n, heads, d] each."""
    generator = torch.Generator().manual_seed(mesh.rank)
    width = MODEL["hidden"] // MODEL["heads"]
    counts = MODEL["heads"], MODEL["kv_heads"], MODEL["kv_heads"]
    return [torch.randn(LENGTH // NODES, n, width, generator=generator) for n in counts]


@dataclass(frozen=True)
class Measured:
    """What one rank saw of each contender: seconds of its rounds, and what all ranks send."""

    seconds: dict[str, list[float]]
    bytes: dict[str, float]


def run(job: Job) -> Measured:
    """One rank of all contenders."""
    torch.set_num_threads(1)
    shape = MeshShape(Levels(("world",), (NODES,)), Splits(context=NODES))
    with join(identify(os.environ), shape, torch.device("cpu"), Timeouts.of(NODES)) as mesh:
        documents = torch.tensor(library_row(), dtype=torch.int32)
        tokens = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(0))
        heads = [part[None] for part in heads_of(mesh)]
        tasks: dict[str, Callable[[], object]] = {}
        engines: dict[str, Engine] = {}
        for name, exchange in CONTENDERS.items():
            model, engines[name] = build(mesh, exchange)
            attend = model.blocks[0].attention.over_chunks
            tasks[name] = partial(_train, model, engines[name], tokens, documents)
            tasks[f"{name}, forward"] = partial(attend, *heads, documents, 0.0)
        sent = {name: sent_bytes(mesh, engine, tasks[name]) for name, engine in engines.items()}
        seconds: dict[str, list[float]] = {name: [] for name in tasks}
        for number in range(job.warmup + job.steps):
            for name, task in tasks.items():
                taken = round_seconds(mesh, task)
                if number >= job.warmup:
                    seconds[name].append(taken)
        return Measured(seconds, sent)


def _train(model: GPT, engine: Engine, tokens: Tensor, documents: Tensor) -> None:
    with engine.no_sync(True):
        model(tokens, tokens, documents).backward()


def sent_bytes(mesh: Mesh, engine: Engine, task: Callable[[], object]) -> float:
    """What all ranks send in a task."""
    engine.ledger.take(wait=True)
    task()
    own = torch.tensor(engine.ledger.take(wait=True)[0], dtype=torch.float64)
    return float(mesh.world.sum(own).sum())


def round_seconds(mesh: Mesh, task: Callable[[], object]) -> float:
    """Until the slowest rank is done."""
    mesh.world.all_true(True)
    begin = time.perf_counter()
    task()
    mesh.world.all_true(True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print a table."""
    parser = make_parser(__doc__, "context")
    parser.add_argument("--rate", type=float, default=10.0, help="MB/s of each node's link")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    options = parser.parse_args()
    with open_cluster("context", NODES, 1) as (cluster, _):
        cluster.links.shape(options.rate * 1e6)
        job = Job("scripts.benchmarks.slow_network.context:run", "", steps=options.rounds)
        found = Measured(**cluster.answers(job, NODES, TIMEOUT_SECONDS)[0])
    print(f"{'':28}{'shortest':>10}{'median':>10}   MB sent by all ranks")
    for name, seconds in found.seconds.items():
        sent = f"{found.bytes[name] / 1e6:10.1f}" if name in found.bytes else ""
        print(f"{name:28}{min(seconds):9.2f}s{statistics.median(seconds):9.2f}s   {sent}")


if __name__ == "__main__":
    main()
