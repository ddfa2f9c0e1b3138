"""What is asked of the ranks, and what one of them answers: both travel as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Job:
    """One strategy on some nodes. `kind` says which body of `slow_network_ranks` runs it."""

    kind: str
    config: str
    overrides: tuple[str, ...]
    ranks: int
    steps: int
    warmup: int
    address: str
    port: int
    folder: str
    """Where rank r writes its answer, `r.json`."""
    block_seconds: float = 0.0
    """What a block's forward takes beside its computing; see `slow_network_device.py`."""
    options: dict[str, str] = field(default_factory=dict)
    module: str = "scripts.benchmarks.slow_network.ranks"
    """Its `prepare` runs once on each node, and its `run` on each rank; `run` returns a dataclass
    that travels as JSON."""


@dataclass(frozen=True)
class Answer:
    """What one rank saw. Seconds are of one clock for all ranks.

    `begins` and `ends` are of the steps after the warm-up; `nic_bytes` left its node's NIC in all
    steps, the warm-up's too, all ranks of the node together, in `nic_packets`.
    """

    begins: list[float]
    ends: list[float]
    cpu_seconds: float
    """Of this rank, from the first begin to the last end."""
    machine_cpu_seconds: float
    """Of all processes of the machine, in the same time."""
    tokens: int
    """In one step, over all ranks."""
    parameters: int
    steps_sent: int
    """Warm-up and measured steps."""
    nic_bytes: int
    nic_packets: int
    formula_bytes: int
    """What this rank sends to other nodes in one step, by the formula."""
    protocol_bytes: int
    """What gloo itself adds to that."""
    ledger_bytes: int | None
    """The same as the engine counted it; None where nobody counts."""
    ledger_seconds: dict[str, float]
    """Seconds of a step inside the collectives of each level."""
    memory_bytes: int
    """Peak resident memory above what the process was forked with."""
    loss: float
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Bytes, seconds and hidden seconds of a step by kind, over all levels."""


def median_step(answers: Sequence[Answer]) -> float:
    """Seconds from the first rank's begin of a step to the last one's end, of the usual step."""
    begins = map(min, zip(*(answer.begins for answer in answers), strict=True))
    ends = map(max, zip(*(answer.ends for answer in answers), strict=True))
    return median(end - begin for begin, end in zip(begins, ends, strict=True))
