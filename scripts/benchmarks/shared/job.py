"""What is asked of the ranks of a cluster, and what a rank that trains answers: both are JSON."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Job:
    """One function on every rank of some nodes."""

    function: str
    """`module:name`, called with the job; returns a dataclass that travels as JSON. The module is
    imported once on each node, and if it has a function `prepare`, this is called, before ranks are
    forked."""
    config: str
    overrides: tuple[str, ...] = ()
    steps: int = 1
    warmup: int = 1
    block_seconds: float = 0.0
    """What a block's forward takes beside its computing; see `device.py`."""
    options: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    """This and the others below are set by the cluster."""
    address: str = ""
    port: int = 0
    folder: str = ""
    """Where rank r writes its answer, `r.json`."""


@dataclass(frozen=True)
class Answer:
    """What one rank that trains saw. Seconds are of one clock for all ranks.

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


def step_seconds(
    answers: Sequence[Answer], begin: Callable[[Iterable[float]], float] = max
) -> list[float]:
    """Seconds of each step, from its `begin` of the ranks' begins (max: the last rank has begun) to
    the last rank's end."""
    begins = map(begin, zip(*(answer.begins for answer in answers), strict=True))
    ends = map(max, zip(*(answer.ends for answer in answers), strict=True))
    return [stop - start for start, stop in zip(begins, ends, strict=True)]


def median_step(answers: Sequence[Answer]) -> float:
    """Seconds from the first rank's begin of a step to the last one's end, of the usual step."""
    return median(step_seconds(answers, min))


def others_cores(answers: Sequence[Answer]) -> float:
    """Cores that processes other than the ranks kept busy while the steps were measured."""
    elapsed = max(a.ends[-1] for a in answers) - max(a.begins[0] for a in answers)
    others = answers[0].machine_cpu_seconds - sum(answer.cpu_seconds for answer in answers)
    return max(0.0, others / elapsed)
