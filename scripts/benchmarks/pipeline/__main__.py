"""Pipelines of ranks that take the time of a device, beside their formulas.

    sudo .venv/bin/python -m scripts.benchmarks.pipeline OUT [--ranks 4 8] [--micro-batches 8 32]
        [--tick S] [--steps N] [--hidden N] [--length N]

Each rank is a network namespace of its own. An action computes its small part and then waits until
its time is over: a forward of all blocks of a rank takes `--tick` seconds, its backward twice that.
Messages, streams and the trainer are real. A row is the median step of one schedule, beside the
step and the bubble that its table says. OUT gets pipeline.json.

Needs root and Debian's iproute2; removes its namespaces and processes when it ends, however.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from megafrontier.common.files import write_atomically
from megafrontier.pipeline.schedule import make_table
from megafrontier.pipeline.simulate import simulate
from scripts.benchmarks.shared.cluster import Cluster, open_cluster
from scripts.benchmarks.shared.inputs import write_inputs
from scripts.benchmarks.shared.job import Job, median_step
from scripts.benchmarks.shared.measuring import at_least, code_version, cpu_name, make_parser

TIMEOUT_SECONDS = 900.0
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))


@dataclass
class Row:
    """One schedule's measurement."""

    name: str
    ranks: int
    micro_batches: int
    seconds: float
    """Median step."""
    bubble: float
    formula_seconds: float
    formula_bubble: float
    memory_bytes: int
    """The most of any rank, above what its process was forked with."""

    def line(self) -> str:
        """For the terminal."""
        return (
            f"{self.name:28} {self.ranks} ranks, {self.micro_batches} micro-batches: "
            f"{self.seconds:.2f} s, bubble {self.bubble:.1%}, "
            f"{self.memory_bytes / 2**20:.0f} MiB; formula {self.formula_seconds:.2f} s, "
            f"bubble {self.formula_bubble:.1%}, step {self.seconds / self.formula_seconds:.3f} x"
        )


def measure(cluster: Cluster, config: str, s: argparse.Namespace) -> Iterator[Row]:
    """Each schedule beside its table. Raises JobFailed."""
    for ranks, count in product(s.ranks, s.micro_batches):
        for schedule, per_rank in SCHEDULES:
            overrides = (*overrides_of(schedule, per_rank, ranks, s), f"train.global_batch={count}")
            job = Job(
                "scripts.benchmarks.pipeline.ranks:ours",
                config,
                overrides,
                s.steps,
                options={"tick": str(s.tick)},
            )
            answers = cluster.run(job, ranks, TIMEOUT_SECONDS)
            table = simulate(make_table(schedule, ranks, per_rank, count))
            seconds = median_step(answers)
            yield Row(
                f"{schedule}, {per_rank} stages",
                ranks,
                count,
                seconds,
                1 - 3 * count * s.tick / seconds,
                table.seconds * s.tick / per_rank,
                table.bubble,
                max(a.memory_bytes for a in answers),
            )


def overrides_of(
    schedule: str, per_rank: int, ranks: int, s: argparse.Namespace
) -> tuple[str, ...]:
    """Two blocks on each rank, as `per_rank` stages."""
    layers = ",".join([str(2 // per_rank)] * ranks * per_rank)
    return (
        f"parallel.pipeline={ranks}",
        f"parallel.schedule={schedule}",
        f"parallel.stages_per_rank={per_rank}",
        f"parallel.layers=[{layers}]",
        f"model.layers={2 * ranks}",
        f"model.hidden={s.hidden}",
        f"model.sequence_length={s.length}",
        "train.micro_batch=1",
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "pipeline")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=[4, 8])
    parser.add_argument("--micro-batches", type=at_least(1), nargs="+", default=[8, 32])
    parser.add_argument("--tick", type=at_least(0.001, float), default=0.2)
    parser.add_argument("--steps", type=at_least(1), default=1, help="measured steps")
    parser.add_argument("--hidden", type=at_least(4), default=128)
    parser.add_argument("--length", type=at_least(1), default=128)
    return parser.parse_args()


def main() -> None:
    """Measure, print each row, and write OUT/pipeline.json."""
    s = parse()
    s.out.mkdir(parents=True, exist_ok=True)
    about = {"cpu": cpu_name(), "version": code_version(), "tick": s.tick}
    rows: list[Row] = []
    with open_cluster("pipeline", max(s.ranks), 1) as (cluster, folder):
        for row in measure(cluster, write_inputs(folder), s):
            print(row.line(), flush=True)
            rows.append(row)
            found = about | {"rows": [asdict(row) for row in rows]}
            write_atomically(s.out / "pipeline.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
