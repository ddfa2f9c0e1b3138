"""What matrix products lose while a copy of few thread blocks runs beside them.

    python -m scripts.benchmarks.silicon.contention OUT [--blocks 4 8 16 32]

A collective is a kernel of a few thread blocks that moves bytes, for as long as its link takes. One
device has no link, so a copy of as many blocks stands for it. OUT/table.md has the seconds that
products lose for each second of the copy, the copy's rate alone, and beside the products: between
them lies `levels.*.slows_compute` of a machine file (Note [Contention]). Needs a GPU.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megafrontier.probe.device import fastest
from scripts.benchmarks.shared.measuring import at_least, make_parser
from scripts.benchmarks.shared.tables import markdown

GPU = torch.device("cuda")
SIDE, BYTES = 4096, 2**30
TILE = 4096
"""Elements that a block moves at a time."""
SECONDS, TIMES = 0.2, 5
HEAD = ["thread blocks", "products lose, s for each s", "copy alone, GB/s", "beside products, GB/s"]


def copier(blocks: int) -> Callable[[], None]:
    """A copy of BYTES by so many thread blocks."""
    import triton
    import triton.language as tl

    @triton.jit
    def move(source, target, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
        for at in range(tl.program_id(0) * tile, count, tl.num_programs(0) * tile):
            places = at + tl.arange(0, tile)
            inside = places < count
            tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)

    source = torch.ones(BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return partial(move[(blocks,)], source, target, source.numel(), TILE)


def times(count: int, run: Callable[[], object]) -> None:
    for _ in range(count):
        run()


def measure(blocks: int) -> list[str]:
    """A row of the table. The copies last longer than the products, which are never alone."""
    copy, stream = copier(blocks), torch.cuda.Stream()
    a, b, out = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(3))
    product = partial(torch.mm, a, b, out=out)
    copy_seconds = fastest(copy, GPU)
    products = max(1, round(SECONDS / fastest(product, GPU)))
    alone = fastest(partial(times, products, product), GPU)
    copies = 1 + round(2 * alone / copy_seconds)

    def both() -> float:
        """Seconds of the products beside the copies."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            times(copies, copy)
        begin.record()
        times(products, product)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    beside = min(both() for _ in range(TIMES))
    started = time.perf_counter()
    both()
    copied = copies / (time.perf_counter() - started)
    rates = [2 * BYTES / 1e9 * rate for rate in (1 / copy_seconds, copied)]
    return [str(blocks), f"{1 - alone / beside:.3f}", *(f"{rate:.0f}" for rate in rates)]


def main() -> None:
    """Measure, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--blocks", type=at_least(1), nargs="+", default=[4, 8, 16, 32])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("contention: no GPU")
    table = markdown(HEAD, [measure(blocks) for blocks in arguments.blocks])
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
