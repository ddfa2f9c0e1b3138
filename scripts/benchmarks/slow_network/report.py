"""What the measured rows say: figures, a table, the bars to reach. Reads results.json again:

python -m scripts.benchmarks.slow_network.report OUT
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from scripts.benchmarks.shared.job import Answer, others_cores, step_seconds
from scripts.benchmarks.shared.links import HEADER_BYTES
from scripts.benchmarks.shared.measuring import listed
from scripts.benchmarks.shared.tables import markdown, number, spread

ALONE = "computing alone"


@dataclass
class Row:
    """One strategy's measurements. Bytes are of one node and one step, means over the nodes."""

    strategy: str
    nodes: int
    accumulation: int
    slower: float = 1.0
    bytes_per_second: float = 0.0
    """Rate of a NIC."""
    seconds: list[float] = field(default_factory=list)
    """Of every measured step."""
    tokens: int = 0
    """In one step."""
    parameters: int = 0
    nic_bytes: float = 0.0
    """With all headers."""
    nic_packets: float = 0.0
    formula_bytes: float = 0.0
    protocol_bytes: float = 0.0
    """What gloo's messages add to the formula."""
    ledger_bytes: float | None = None
    ledger_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of a step inside the collectives of each level, mean over the ranks."""
    memory_bytes: int = 0
    """Largest of any rank."""
    cpu_seconds: float = 0.0
    """Of all ranks in one step. Above that of computing alone it is what the strategy itself costs:
    here, unlike on GPUs, copies and codecs take the same cores as the model."""
    others_cores: float = 0.0
    """Cores that processes other than the ranks kept busy meanwhile: they disturb the row."""
    loss: float = 0.0
    version: str = "unknown"
    """The commit that was measured."""
    skipped: str = ""

    def join(self, other: "Row") -> None:
        """Take in another turn of the same row."""
        if self.skipped or other.skipped:
            self.skipped = self.skipped or other.skipped
            return
        part = len(other.seconds) / len(self.seconds + other.seconds)
        for name in ("nic_bytes", "nic_packets", "cpu_seconds"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, mine + part * (its - mine))
        for level, its in other.ledger_seconds.items():
            self.ledger_seconds[level] += part * (its - self.ledger_seconds[level])
        self.seconds += other.seconds
        self.others_cores = max(self.others_cores, other.others_cores)
        self.memory_bytes = max(self.memory_bytes, other.memory_bytes)

    @property
    def group(self) -> tuple[int, float, int]:
        """What rows that are compared with each other have in common."""
        return self.nodes, self.slower, self.accumulation

    @property
    def median_seconds(self) -> float:
        """Of a step."""
        return statistics.median(self.seconds)

    @property
    def excess(self) -> float | None:
        """NIC bytes without packets' headers and gloo's preambles over the formula, less 1."""
        if not self.formula_bytes:
            return None
        payload = self.nic_bytes - HEADER_BYTES * self.nic_packets - self.protocol_bytes
        return payload / self.formula_bytes - 1

    def line(self) -> str:
        """For the terminal, while the others run."""
        if self.skipped:
            return f"{self.strategy}: skipped, {self.skipped}"
        return (
            f"{self.strategy}: {self.median_seconds:.3f} s a step, "
            f"{self.nic_bytes / 1e6:.2f} MB out of a node, loss {self.loss:.4f}, "
            f"{self.others_cores:.1f} cores busy with others"
        )


def row_of(strategy: str, answers: Sequence[Answer], per_node: int, accumulation: int) -> Row:
    """The row of one job, from its ranks' answers in rank order."""
    steps, steps_sent = len(answers[0].ends), answers[0].steps_sent
    nodes = len(answers) // per_node
    counted = [a.ledger_bytes for a in answers if a.ledger_bytes is not None]
    levels = answers[0].ledger_seconds
    return Row(
        strategy,
        nodes,
        accumulation,
        seconds=step_seconds(answers),
        tokens=answers[0].tokens,
        parameters=answers[0].parameters,
        nic_bytes=sum(a.nic_bytes for a in answers[::per_node]) / nodes / steps_sent,
        nic_packets=sum(a.nic_packets for a in answers[::per_node]) / nodes / steps_sent,
        formula_bytes=sum(a.formula_bytes for a in answers) / nodes,
        protocol_bytes=sum(a.protocol_bytes for a in answers) / nodes,
        ledger_bytes=sum(counted) / nodes if counted else None,
        ledger_seconds={
            name: statistics.mean(a.ledger_seconds[name] for a in answers) for name in levels
        },
        memory_bytes=max(a.memory_bytes for a in answers),
        cpu_seconds=sum(a.cpu_seconds for a in answers) / steps,
        others_cores=others_cores(answers),
        loss=statistics.mean(a.loss for a in answers),
    )


class Figures:
    """All rows, and what one of them means beside the others."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def find(self, strategy: str, nodes: int, slower: float, accumulation: int) -> Row | None:
        """A measured row; on one node there is no link to be slower."""
        group = (nodes, slower if nodes > 1 else 1.0, accumulation)
        rows = (row for row in self.rows if (row.strategy, row.group) == (strategy, group))
        return next((row for row in rows if not row.skipped), None)

    def beside(self, row: Row, strategy: str, nodes: int | None = None) -> Row | None:
        """Another strategy's row, or that at another number of nodes, else alike."""
        return self.find(strategy, nodes or row.nodes, row.slower, row.accumulation)

    def compute(self, row: Row) -> float | None:
        """Seconds that computing alone took beside a row."""
        alone = self.beside(row, ALONE)
        return alone.median_seconds if alone else None

    def exposed(self, row: Row) -> float | None:
        """Seconds of communication, and of the engine, that computing did not hide."""
        compute = self.compute(row)
        return None if compute is None else row.median_seconds - compute

    def efficiency(self, row: Row) -> float | None:
        """Computing alone over the step, relative to one node."""
        one = self.beside(row, row.strategy, 1)
        if one is None or one.nodes == row.nodes:
            return None
        compute, compute_of_one = self.compute(row), self.compute(one)
        if compute is None or compute_of_one is None:
            return None
        return (compute / row.median_seconds) / (compute_of_one / one.median_seconds)

    def link_seconds(self, row: Row) -> float:
        """What the NIC alone needs for a step's bytes."""
        return row.nic_bytes / row.bytes_per_second

    def over_bound(self, row: Row) -> float | None:
        """A step over the larger of its compute and its communication; 1 is perfect overlap."""
        compute = self.compute(row)
        return row.median_seconds / max(compute, self.link_seconds(row)) if compute else None


# The table

COLUMNS = (
    "strategy",
    "tokens/s",
    "step s: median (least – most)",
    "NIC MB/step",
    "formula",
    "bytes a parameter",
    "payload over formula",
    "NIC s",
    "exposed s",
    "efficiency",
    "step over bound",
    "CPU s, all ranks",
    "peak MiB",
    "others' cores",
)


def table(figures: Figures) -> str:
    """Markdown, a part for each number of nodes, rate and accumulation."""
    parts = []
    for (nodes, slower, accumulation), rows in groupby(figures.rows, lambda r: r.group):
        group = list(rows)
        rate = f", {group[0].bytes_per_second / 1e6:.2f} MB/s a NIC, {slower:g} × slower"
        parts.append(
            f"### {nodes} nodes{rate if nodes > 1 else ''}, accumulation {accumulation}, "
            f"commit {', '.join(sorted({row.version for row in group}))}\n\n"
            f"{markdown(COLUMNS, (_cells(figures, row) for row in group))}\n"
        )
    return "\n".join(parts)


def _cells(figures: Figures, row: Row) -> list[str]:
    if row.skipped:
        return [row.strategy, f"skipped: {row.skipped}"]
    return [
        row.strategy,
        f"{row.tokens / row.median_seconds:.0f}",
        spread(row.seconds, ".3f"),
        f"{row.nic_bytes / 1e6:.2f}",
        f"{row.formula_bytes / 1e6:.2f}",
        f"{row.formula_bytes / row.parameters:.2f}",
        "" if row.excess is None else f"{row.excess * 100:+.1f} %",
        f"{figures.link_seconds(row):.3f}",
        number(figures.exposed(row)),
        number(figures.efficiency(row)),
        number(figures.over_bound(row)),
        f"{row.cpu_seconds:.2f}",
        f"{row.memory_bytes / 2**20:.1f}",
        f"{row.others_cores:.1f}",
    ]


def load(out: Path) -> tuple[dict[str, str | int], Figures]:
    """(machine, figures) of a results.json."""
    values = json.loads((out / "results.json").read_text())
    return values["machine"], Figures([Row(**row) for row in values["rows"]])


def write_report(out: Path) -> str:
    """Write table.md and picture.png beside results.json; the text of the table."""
    from scripts.benchmarks.slow_network.bars import bars
    from scripts.benchmarks.slow_network.picture import draw

    machine, figures = load(out)
    text = f"{listed(machine)}\n\n{table(figures)}\n{bars(figures)}\n"
    (out / "table.md").write_text(text)
    draw(figures, out / "picture.png")
    return text


if __name__ == "__main__":
    print(write_report(Path(sys.argv[1])))
