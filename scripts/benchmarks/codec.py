"""Speed of the block codecs against the machine's own copy bandwidth.

    python -m scripts.benchmarks.codec [--rows 8] [--log2-sizes 20 24 27]

On a GPU with Triton this times the kernels, after checking a message against the plain-torch
reference on the CPU; the bar is 70 % of what a copy of 2 GiB reaches, at the largest size. On a
CPU it times the reference, for which no bar is set, and says so. Bytes are what a pass must read
and write at least: values, messages and errors that are fed back, once each. Codecs that rotate are
beside, without a bar, as are errors.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megafrontier.comm.wires.block import INT4, INT8, BlockCodec
from megafrontier.comm.wires.registry import missing_kernels
from megafrontier.comm.wires.wire import Wire
from megafrontier.common.buffers import Workspace
from scripts.benchmarks.shared.measuring import at_least, make_parser

CODECS = {"int8": INT8, "int4": INT4}
ROTATING = {f"{name} rotated": codec.with_rotation() for name, codec in CODECS.items()}
BAR = 0.70
"""Of the copy bandwidth, at the largest size."""

GPU_ROWS = ("encode bf16", "encode fp32", "decode_sum", "decode", "fed back")
"""The first three have the bar."""


@dataclass
class Row:
    """One pass over `elements` values, all rows together."""

    codec: str
    what: str
    elements: int
    seconds: float
    gigabytes_per_second: float
    of_copy: float


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Median time of `work`, the caches cold or warm as they are when it is called in a row."""
    for _ in range(3):
        work()
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    return statistics.median(timed(work) for _ in range(repeats))


def _gpu_seconds(work: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The wait covers the launch, so that the events time the device alone.
    torch.cuda._sleep(1_000_000)
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a plain copy of 2 GiB (64 MiB on a CPU)."""
    size = 1 << 31 if device.type == "cuda" else 1 << 26
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def passes(codec: BlockCodec, values: torch.Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """Each pass over `values` fp32 [rows, n], and the bytes it must move."""
    count = values.shape[1]
    half, errors = values.bfloat16(), torch.zeros_like(values, dtype=torch.bfloat16)
    messages = encoded(codec, values)
    total = torch.empty(count, device=values.device)
    decoded = torch.empty_like(values)
    sent, elements = messages.numel(), values.numel()
    return {
        "encode bf16": (lambda: codec.encode(half, messages), 2 * elements + sent),
        "encode fp32": (lambda: codec.encode(values, messages), 4 * elements + sent),
        "fed back": (lambda: codec.encode(values, messages, errors), 8 * elements + sent),
        "decode_sum": (lambda: codec.decode_sum(messages, total), sent + 4 * count),
        "decode": (lambda: codec.decode(messages, decoded), sent + 4 * elements),
    }


def encoded(codec: BlockCodec, values: torch.Tensor) -> torch.Tensor:
    """Messages of `values` [rows, n], in memory of their own."""
    return Wire(codec).encode(values, Workspace(values.device))


def measure(device: torch.device, rows: int, log2_sizes: list[int], copy: float) -> list[Row]:
    """All passes of all codecs at every size."""
    table = []
    for name, codec in (CODECS | ROTATING).items():
        for log2_size in log2_sizes:
            values = torch.randn(rows, (1 << log2_size) // rows, device=device)
            for what, (work, moved) in passes(codec, values).items():
                seconds = median_seconds(work, device)
                rate = moved / seconds
                row = Row(name, what, values.numel(), seconds, rate / 1e9, rate / copy)
                table.append(row)
    return table


def check_against_reference(device: torch.device) -> None:
    """Raises SystemExit where the device's messages are not the CPU's."""
    values = torch.randn(3, 100_003)
    for codec in CODECS.values():
        if not torch.equal(encoded(codec, values.to(device)).cpu(), encoded(codec, values)):
            raise SystemExit(f"{codec} on {device} does not write the reference's messages")


def show(table: list[Row], on_gpu: bool) -> None:
    """The table, with the GPU's part named empty where there is none."""
    print(f"{'codec':14}{'pass':13}{'elements':>12}{'Melem/s':>10}{'GB/s':>9}{'of copy':>9}")
    for row in table:
        millions = row.elements / row.seconds / 1e6
        print(
            f"{row.codec:14}{row.what:13}{row.elements:12,}{millions:10,.0f}"
            f"{row.gigabytes_per_second:9.2f}{row.of_copy:9.1%}"
        )
    if not on_gpu:
        print(f"GPU, bar {BAR:.0%} of copy: no GPU here, so empty: {', '.join(GPU_ROWS)}")


def missed(table: list[Row]) -> list[Row]:
    """Encode and decode_sum at the largest size that do not reach the bar."""
    largest = max(row.elements for row in table)
    return [
        row
        for row in table
        if row.codec in CODECS
        and row.elements == largest
        and row.what in GPU_ROWS[:3]
        and row.of_copy < BAR
    ]


def main() -> int:
    """1 where a GPU misses the bar."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=at_least(1), default=8, help="messages that a sum adds")
    parser.add_argument(
        "--log2-sizes", type=at_least(10), nargs="+", help="elements, all rows together"
    )
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = arguments.log2_sizes or ([20, 24, 27, 29] if on_gpu else [16, 20, 23])
    machine = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    check_against_reference(device)
    copy = copy_bandwidth(device)
    uses_kernels = (
        on_gpu and missing_kernels("cuda", [*CODECS.values(), *ROTATING.values()]) is None
    )
    implementation = "Triton kernels" if uses_kernels else "plain-torch reference"
    print(f"{machine}: {implementation}; copy {copy / 1e9:.1f} GB/s read and written")
    table = measure(device, arguments.rows, sizes, copy)
    show(table, on_gpu)
    failures = missed(table) if on_gpu else []
    for row in failures:
        print(f"below the bar: {row.codec} {row.what} at {row.of_copy:.1%}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
