"""What 8 context ranks exchange of a long document over a slow network: keys and values for softmax
attention, or states for gated delta attention.

    sudo .venv/bin/python -m scripts.benchmarks.slow_network.states [--rate MB/s] [--rounds N]
        [--length TOKENS]

2 nodes of 4 ranks: levels pair 2, node 2, world 2. Keys and values are bf16, and each rank gets
those that its tokens need and sends their gradients back, once each. States and the last tokens
for the convolution are fp32, scanned forwards and backwards. The two take turns, without any
computing, and the shortest round counts. Needs root and Debian's iproute2.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial

import torch

from megafrontier.config import DeltaConfig
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.rendezvous import join
from megafrontier.model.kernels.delta import Maps
from megafrontier.parallel.env import identify
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Mesh, MeshShape, Splits
from megafrontier.partition import Engine, Placement
from megafrontier.partition.rules import StateRules
from megafrontier.splits.context import ContextSplit
from megafrontier.splits.tokens import TokenGroup
from scripts.benchmarks.shared.cluster import open_cluster
from scripts.benchmarks.shared.job import Job
from scripts.benchmarks.shared.measuring import at_least, describe_cpu, listed, make_parser
from scripts.benchmarks.slow_network.context import Measured, round_seconds, sent_bytes

NODES, PER_NODE, TIMEOUT_SECONDS = 2, 4, 3600.0
RANKS = NODES * PER_NODE
LEVELS = Levels(("pair", "node", "world"), (2, 2, NODES))
KV_HEADS, HEAD_SIZE = 2, 64
DELTA = DeltaConfig(key_heads=2, value_heads=4, key_size=64, value_size=64)


def connect(mesh: Mesh) -> tuple[ContextSplit, Engine]:
    """The exchange of these ranks, and the engine that counts what they send."""
    hierarchy = mesh.hierarchy(("context",))
    split = ContextSplit(TokenGroup(*hierarchy.shard_index(len(hierarchy.levels.sizes))))
    levels = mesh.hierarchy().levels
    engine = Engine(StateRules.plain(Placement.named("ddp", levels), levels), mesh)
    split.group.connect(engine, hierarchy)
    return split, engine


def move_keys(split: ContextSplit, documents: torch.Tensor, tokens: int) -> None:
    """Keys and values of a block there, and their gradients back."""
    heads = torch.randn(tokens, 2 * KV_HEADS, HEAD_SIZE).bfloat16()
    past = split.begin_gather(heads, documents)()
    split.begin_reduce(past.float(), documents, torch.bfloat16)()


def scan(split: ContextSplit, documents: torch.Tensor) -> None:
    """The states of a block and the tokens before its convolution, forwards and backwards."""
    past, count = DELTA.convolution - 1, len(split.cut_parts(documents))
    channels = 2 * DELTA.key_heads * DELTA.key_size + DELTA.value_heads * DELTA.value_size
    shapes = (1, past, channels), (DELTA.value_heads, DELTA.key_size, DELTA.value_size)
    for backwards in (False, True):
        for heads, rows, columns in shapes:
            sizes = [(count, heads, rows, size) for size in (rows, columns)]
            split.scan(Maps(*map(torch.zeros, sizes)), documents, backwards)


def run(job: Job) -> Measured:
    """One rank."""
    torch.set_num_threads(1)
    length = int(job.options["length"])
    shape = MeshShape(LEVELS, Splits(context=RANKS))
    with join(identify(os.environ), shape, torch.device("cpu"), Timeouts.of(RANKS)) as mesh:
        documents = torch.tensor([0, length], dtype=torch.int32)
        split, engine = connect(mesh)
        tasks: dict[str, Callable[[], object]] = {
            "keys and values": partial(move_keys, split, documents, length // RANKS),
            "states": partial(scan, split, documents),
        }
        sent = {name: sent_bytes(mesh, engine, task) for name, task in tasks.items()}
        seconds: dict[str, list[float]] = {name: [] for name in tasks}
        for _ in range(job.steps):
            for name, task in tasks.items():
                seconds[name].append(round_seconds(mesh, task))
        return Measured(seconds, sent)


def main() -> None:
    """Measure and print a table."""
    parser = make_parser(__doc__, "states")
    parser.add_argument("--rate", type=float, default=1.1, help="MB/s of each node's link")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--length", type=at_least(2 * RANKS), default=32768)
    options = parser.parse_args()
    with open_cluster("states", NODES, PER_NODE) as (cluster, _):
        cluster.links.shape(options.rate * 1e6)
        given = {"length": str(options.length)}
        function = "scripts.benchmarks.slow_network.states:run"
        job = Job(function, "", steps=options.rounds, options=given)
        found = Measured(**cluster.answers(job, NODES, TIMEOUT_SECONDS)[0])
    print(listed(describe_cpu()))
    print(f"{'':18}{'shortest':>10}{'median':>10}   MB sent by all ranks")
    for name, seconds in found.seconds.items():
        times = f"{min(seconds):9.2f}s{statistics.median(seconds):9.2f}s"
        print(f"{name:18}{times}   {found.bytes[name] / 1e6:10.1f}")


if __name__ == "__main__":
    main()
