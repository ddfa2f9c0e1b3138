"""Gated delta attention beside softmax attention: CPU time and memory of forward and backward.

    python -m scripts.benchmarks.hybrid.speed [--lengths 2048 8192 16384 32768] [--rounds 3]

One layer of width 256 with 4 heads of 64, one row of one document, fp32, one thread. Each figure
is the least of some rounds, in which the two take turns, each twice in a process of its own. Memory
is the peak of what is allocated above that before the first forward.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from time import process_time
from typing import NamedTuple

import torch

from megafrontier.config import AttentionConfig, DeltaConfig, ModelConfig
from megafrontier.model.attention.kinds import make_attention
from megafrontier.model.positions import AttentionContext, rotary_tables
from scripts.benchmarks.shared.measuring import (
    at_least,
    describe_cpu,
    listed,
    make_parser,
    resident_bytes,
)
from scripts.benchmarks.shared.tables import markdown

HIDDEN, HEADS, SIZE = 256, 4, 64
DELTA = DeltaConfig(key_heads=HEADS, value_heads=HEADS, key_size=SIZE, value_size=SIZE)
KINDS = {
    "softmax": AttentionConfig(),
    "delta": AttentionConfig(pattern=["delta"], delta=DELTA),
}


class Cost(NamedTuple):
    """CPU seconds and bytes of a forward and backward."""

    seconds: float
    memory_bytes: int


def measure(kind: str, length: int) -> Cost:
    """In a process that measures nothing else."""
    torch.set_num_threads(1)
    config = ModelConfig(
        layers=1, hidden=HIDDEN, heads=HEADS, sequence_length=length, bias=False,
        position="rotary", attention=KINDS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    attention = make_attention(config, 0)
    _step(attention, config, 64)  # what is done once only
    # Of addresses, because a system may take back memory that is not read for a while.
    before = resident_bytes("VmSize")
    seconds = min(_step(attention, config, length) for _ in range(2))
    return Cost(seconds, resident_bytes("VmPeak") - before)


def _step(attention: torch.nn.Module, config: ModelConfig, length: int) -> float:
    """CPU seconds of a forward and backward."""
    hidden = torch.randn(1, length, HIDDEN, requires_grad=True)
    rotary = rotary_tables(torch.arange(length)[None], SIZE, config.rotary_base)
    begin = process_time()
    attention(hidden, AttentionContext(rotary, None, None, (1, length))).sum().backward()
    return process_time() - begin


def rows(found: dict[tuple[int, str], list[Cost]], lengths: Sequence[int]) -> Iterator[list[str]]:
    """Of each length: both times, their ratio, and both peaks."""
    for length in lengths:
        costs = [found[length, kind] for kind in KINDS]
        softmax, delta = (min(cost.seconds for cost in of) for of in costs)
        peaks = (min(cost.memory_bytes for cost in of) / 2**20 for of in costs)
        yield [
            f"{length:,} tokens",
            f"{softmax:.2f} s",
            f"{delta:.2f} s",
            f"{delta / softmax:.2f} ×",
            *(f"{peak:,.0f} MiB" for peak in peaks),
        ]


def main() -> None:
    """Measure and print a table."""
    parser = make_parser(__doc__, "speed")
    lengths = [2048, 8192, 16384, 32768]
    parser.add_argument("--lengths", type=at_least(65), nargs="+", default=lengths)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    options = parser.parse_args()
    runs = [*product(options.lengths, KINDS)]
    found: dict[tuple[int, str], list[Cost]] = {run: [] for run in runs}
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for _, (length, kind) in product(range(options.rounds), runs):
            found[length, kind].append(pool.submit(measure, kind, length).result())
    print(listed(describe_cpu()) + "\n")
    head = ["", "softmax", "delta", "delta / softmax", "peak: softmax", "delta"]
    print(markdown(head, rows(found, options.lengths)))


if __name__ == "__main__":
    main()
