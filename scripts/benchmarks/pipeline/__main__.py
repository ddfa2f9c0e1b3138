"""Pipelines of ranks that take the time of a device, beside their formulas and beside torch's.

    sudo .venv/bin/python -m scripts.benchmarks.pipeline OUT [--ranks 4 8] [--micro-batches 8 32]
        [--tick S] [--steps N] [--hidden N] [--length N]
        [--beside] [--pipeline 4] [--slower 1 4]

Each rank is a network namespace of its own. An action computes its small part and then waits until
its time is over (`stand_in.py`): a forward of all blocks of a rank takes `--tick` seconds, its
backward twice that. Messages, streams and the trainer are real. A row is the median step of one
schedule, beside the step and the bubble that its table says.

`--beside` compares with torch.distributed.pipelining and FSDP2 instead, on 4 nodes of 4 ranks: a
pipeline of 4 over the nodes with data parallelism inside, or a pipeline of 2 whose stages have two
nodes each. A node's NIC is shaped so that the messages of its 4 ranks take 0.12 of a tick;
`--slower` divides that rate. Ours shards weights inside a node at most (`topo`). Torch's keeps them
unsharded through the step, or (`resharded`) gathers them again in each micro-batch.

Needs root and Debian's iproute2; removes its namespaces and processes when it ends, however.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from megafrontier.common.files import write_atomically
from megafrontier.pipeline.schedule import make_table
from megafrontier.pipeline.simulate import simulate
from scripts.benchmarks.shared.measuring import at_least, code_version, cpu_name
from scripts.benchmarks.slow_network.__main__ import write_inputs
from scripts.benchmarks.slow_network.cluster import Cluster, JobFailed, interrupted_by_signals
from scripts.benchmarks.slow_network.job import Answer, Job, median_step
from scripts.benchmarks.slow_network.links import Unable, links

TIMEOUT_SECONDS = 900.0
PER_NODE = 4
MESSAGE_OF_TICK = 0.12
"""Seconds of a node's messages of one micro-batch over seconds of a forward."""
OURS = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
THEIRS = (
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "reshard": "resharded"},
    {"schedule": "interleaved"},
    {"schedule": "interleaved_zero_bubble"},
    {"schedule": "zbv"},
)


@dataclass
class Row:
    """One schedule's measurement."""

    name: str
    ranks: int
    micro_batches: int
    seconds: float
    """Median step."""
    bubble: float
    formula_seconds: float | None
    formula_bubble: float | None
    memory_bytes: int
    """The most of any rank, above what its process was forked with."""
    slower: float | None = None

    def line(self) -> str:
        """For the terminal."""
        formula = ""
        if self.formula_seconds is not None and self.formula_bubble is not None:
            formula = (
                f" formula {self.formula_seconds:.2f} s, bubble {self.formula_bubble:.1%}, "
                f"step {self.seconds / self.formula_seconds:.3f} x"
            )
        slower = "" if self.slower is None else f" slower {self.slower:g}"
        return (
            f"{self.name:28} {self.ranks} ranks, {self.micro_batches} micro-batches{slower}: "
            f"{self.seconds:.2f} s, bubble {self.bubble:.1%}, "
            f"{self.memory_bytes / 2**20:.0f} MiB;{formula}"
        )


class Bench:
    """Jobs on a cluster with the settings of one run of this script."""

    def __init__(self, cluster: Cluster, config: Path, settings: argparse.Namespace) -> None:
        self._cluster, self._config, self._settings = cluster, config, settings

    def formulas(self) -> Iterator[Row]:
        """Each schedule beside its table."""
        s = self._settings
        for ranks, count in product(s.ranks, s.micro_batches):
            for schedule, per_rank in OURS:
                overrides = (
                    *self._parallel(schedule, per_rank, ranks),
                    f"train.global_batch={count}",
                )
                table = simulate(make_table(schedule, ranks, per_rank, count))
                answers = self._run("pipeline", overrides, ranks, {})
                yield self._row(
                    f"{schedule}, {per_rank} stages",
                    ranks,
                    count,
                    answers,
                    (table.seconds * s.tick / per_rank, table.bubble),
                )

    def beside(self) -> Iterator[Row]:
        """Ours and torch's on 4 nodes of 4 ranks."""
        s, nodes = self._settings, 4
        rate = PER_NODE * s.hidden * s.length * 2 / (MESSAGE_OF_TICK * s.tick)
        for slower, count in product(s.slower, s.micro_batches):
            self._cluster.links.shape(rate / slower)
            common = (
                f"train.global_batch={count * nodes * PER_NODE // s.pipeline}",
                "partition.strategy=topo",
                "partition.overlap=full",
                "train.precision=bf16",
            )
            for schedule, per_rank in OURS:
                overrides = (*self._parallel(schedule, per_rank, s.pipeline), *common)
                answers = self._run("pipeline", overrides, nodes, {})
                name = f"ours: {schedule}, {per_rank} stages"
                yield self._row(name, s.pipeline, count, answers, None, slower)
            for options in THEIRS:
                overrides = (*self._parallel("1f1b", 1, s.pipeline), *common)
                answers = self._run("torch pipelining", overrides, nodes, options)
                name = f"torch: {' '.join(options.values())}"
                yield self._row(name, s.pipeline, count, answers, None, slower)

    def _run(
        self, kind: str, overrides: Sequence[str], nodes: int, options: dict[str, str]
    ) -> list[Answer]:
        s = self._settings
        job = Job(
            kind,
            str(self._config),
            tuple(overrides),
            ranks=0,
            steps=s.steps,
            warmup=1,
            address="",
            port=0,
            folder="",
            options={"tick": str(s.tick), **options},
        )
        return self._cluster.run(job, nodes, TIMEOUT_SECONDS)

    def _parallel(self, schedule: str, per_rank: int, ranks: int) -> tuple[str, ...]:
        """Two blocks on each rank, as `per_rank` stages."""
        s = self._settings
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

    def _row(
        self,
        name: str,
        ranks: int,
        micro_batches: int,
        answers: list[Answer],
        formula: tuple[float, float] | None,
        slower: float | None = None,
    ) -> Row:
        seconds = median_step(answers)
        busy = 3 * micro_batches * self._settings.tick
        return Row(
            name,
            ranks,
            micro_batches,
            seconds,
            1 - busy / seconds,
            *(formula or (None, None)),
            memory_bytes=max(a.memory_bytes for a in answers),
            slower=slower,
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=[4, 8])
    parser.add_argument("--micro-batches", type=at_least(1), nargs="+", default=[8, 32])
    parser.add_argument("--tick", type=at_least(0.001, float), default=0.2)
    parser.add_argument("--steps", type=at_least(1), default=1, help="measured steps")
    parser.add_argument("--hidden", type=at_least(4), default=128)
    parser.add_argument("--length", type=at_least(1), default=128)
    parser.add_argument("--beside", action="store_true", help="compare with torch's")
    parser.add_argument("--pipeline", type=int, choices=(2, 4), default=4, help="of --beside")
    parser.add_argument("--slower", type=at_least(0.01, float), nargs="+", default=[1])
    return parser.parse_args()


def main() -> None:
    """Measure, print each row, and write OUT/pipeline.json or OUT/beside.json."""
    settings = parse()
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / ("beside.json" if settings.beside else "pipeline.json")
    nodes, per_node = (4, PER_NODE) if settings.beside else (max(settings.ranks), 1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, interrupted_by_signals():
        config = write_inputs(Path(folder))
        with links(nodes) as made, Cluster(made, per_node, Path(folder)) as cluster:
            bench = Bench(cluster, config, settings)
            for row in bench.beside() if settings.beside else bench.formulas():
                print(row.line(), flush=True)
                rows.append(row)
                found = {
                    "cpu": cpu_name(),
                    "version": code_version(),
                    "tick": settings.tick,
                    "rows": [asdict(row) for row in rows],
                }
                write_atomically(path, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (Unable, JobFailed) as error:
        sys.exit(f"pipeline: {error}")
