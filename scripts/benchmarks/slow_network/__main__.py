"""Train on 1, 2 and 4 nodes of one machine that a slow network joins, strategy beside strategy.

    sudo .venv/bin/python -m scripts.benchmarks.slow_network OUT [--quick] [--nodes 1 2 4]
        [--slower 1 4 16] [--accumulation 1 4] [--strategies NAME …] [--overlap none full]
        [--packages DIR] [--block-seconds S] [key=value …]

A node is a network namespace with 4 ranks (levels pair 2, node 2, world) and one shaped NIC. All
ranks share the machine's cores, so the rate of the links is chosen for each number of nodes from
what computing takes there: one pass of all weights into a node takes 0.12 of a micro-step's
compute, as for 20B on Frontier; `--slower` divides that rate. Strategies take turns, in fresh
processes, because the machine's speed drifts. OUT gets results.json, table.md and picture.png after
every group of rows that are compared; groups that are there already and not measured again stay, so
a long comparison may be made in several sittings.

On two cores 16 ranks compute slowly, and what sends takes the cores from what computes. With
`--block-seconds 0.1 model.layers=8 model.sequence_length=64 train.micro_batch=1` a block waits as
if a device computed 0.1 seconds for its forward and twice that for its backward
(slow_network_device.py), and the cores are there for the engine alone.

DeepSpeed is looked for in DIR, made without another torch by

    pip install --no-deps --target DIR -r scripts/benchmarks/slow_network/packages.txt

Needs root and Debian's iproute2; removes its namespaces and processes when it ends, however.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path

import numpy as np
import torch

from megafrontier.common.arguments import split_overrides
from megafrontier.common.errors import UserError
from megafrontier.common.files import write_atomically
from megafrontier.config import PartitionConfig, load_config
from megafrontier.data.corpus.writer import CorpusWriter
from megafrontier.training.preview import check_training
from scripts.benchmarks.shared.measuring import PACKAGES, at_least, code_version, cpu_name
from scripts.benchmarks.slow_network import deepspeed_zero
from scripts.benchmarks.slow_network.cluster import (
    Cluster,
    JobFailed,
    interrupted_by_signals,
    wait_for_quiet,
)
from scripts.benchmarks.slow_network.job import Answer, Job
from scripts.benchmarks.slow_network.links import Unable, links
from scripts.benchmarks.slow_network.report import ALONE, Row, load, row_of, write_report

PER_NODE = 4
PASS_OF_COMPUTE = 0.12
"""Seconds of one pass of all weights into a node over seconds of a micro-step's compute: 41 GB
through 100 GB/s, and 2048 tokens (6 FLOPs a parameter) at 75 TF/s on each GCD."""
TIMEOUT_SECONDS = 600.0
OVERLAPS = ("none", "safe", "full")
QUIET_CORES, PATIENCE_SECONDS = 0.2, 30.0
"""A row that others disturbed by more cores than these is measured again."""

CONFIG = """
run: {{name: slow-network, directory: {folder}/run}}
model: {{layers: 4, hidden: 160, heads: 4, sequence_length: 512, vocab_size: 257}}
tokenizer: bytes
data: {{train: [{{path: {folder}/corpus}}], split: [1.0, 0.0]}}
train: {{steps: 1000, micro_batch: 6, global_batch: "${{train.micro_batch}}", precision: bf16}}
machine: {{levels: {{pair: {{size: 2}}, node: {{size: 2}}, world: {{}}}}, device: {{name: cpu}}}}
"""


@dataclass(frozen=True)
class Strategy:
    """A row of the table. The engine's own differ in overrides alone."""

    name: str
    overrides: tuple[str, ...] = ()
    kind: str = "ours"
    options: dict[str, str] = field(default_factory=dict)


STRATEGIES = (
    Strategy(ALONE, kind="alone"),
    Strategy("FSDP2 full", kind="fsdp2", options={"mode": "full"}),
    Strategy("FSDP2 hybrid", kind="fsdp2", options={"mode": "hybrid"}),
    Strategy("DeepSpeed ZeRO-3", kind="deepspeed", options={"mode": "zero3"}),
    Strategy("DeepSpeed hpZ", kind="deepspeed", options={"mode": "hpz"}),
    Strategy("zero3", ("partition.strategy=zero3",)),
    Strategy("hpz", ("partition.strategy=hpz",)),
    Strategy("hpz + zero++", ("partition.strategy=hpz", "partition.wires=zero++")),
    Strategy("mics", ("partition.strategy=mics",)),
    Strategy("topo exact", ("partition.strategy=topo",)),
    Strategy("topo low", ("partition.strategy=topo", "partition.wires=low")),
)


def with_overlap(strategy: Strategy, policy: str) -> Strategy:
    """One of the engine's strategies under an overlap policy."""
    overrides = (*strategy.overrides, f"partition.overlap={policy}")
    if policy == "none":
        known = {f.name for f in fields(PartitionConfig)}
        return Strategy(strategy.name, overrides if "overlap" in known else strategy.overrides)
    return Strategy(f"{strategy.name}, {policy} overlap", overrides)


def chosen(names: list[str] | None, policies: list[str]) -> list[Strategy]:
    """The strategies asked for under each policy; computing alone is always one of them."""
    found = []
    for strategy in STRATEGIES:
        if names and strategy.name not in (*names, ALONE):
            continue
        if strategy.kind == "ours":
            found += [with_overlap(strategy, policy) for policy in policies]
        else:
            found.append(strategy)
    return found


# What is trained


def write_inputs(folder: Path) -> Path:
    """A corpus of seeded random walks over bytes, and the config that trains on it; its path."""
    rng = np.random.default_rng(0)
    tokens = np.cumsum(rng.integers(-3, 4, 2**20)) % 256
    with CorpusWriter(folder / "corpus", np.dtype(np.uint16)) as corpus:
        corpus.data.write(tokens.astype(np.uint16).tobytes())
        corpus.index.add(np.array([len(tokens)], np.int32), np.array([1]))
        corpus.publish()
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


class Bench:
    """Jobs on a cluster with the settings of one run of this script."""

    def __init__(self, cluster: Cluster, config: Path, settings: argparse.Namespace) -> None:
        self._cluster, self._config, self._settings = cluster, config, settings
        self._slower, self._version = 1.0, code_version()

    def overrides(self, strategy: Strategy, nodes: int, accumulation: int) -> tuple[str, ...]:
        """All that makes the config of a row from the common one."""
        sequences = nodes * PER_NODE * accumulation
        batch = f"train.global_batch={sequences * self._micro_batch()}"
        return (*self._settings.config, batch, *strategy.overrides)

    def _micro_batch(self) -> int:
        return load_config(self._config, self._settings.config).train.micro_batch

    def refusal(self, strategy: Strategy, nodes: int, accumulation: int) -> str | None:
        """Why a row cannot be, in the program's own words."""
        try:
            if strategy.kind == "deepspeed":
                deepspeed_zero.load()
            config = load_config(self._config, self.overrides(strategy, nodes, accumulation))
            check_training(config, nodes * PER_NODE)
        except (UserError, ImportError) as error:
            return str(error)
        return None

    def run(self, strategy: Strategy, nodes: int, accumulation: int, steps: int) -> list[Answer]:
        """Every rank's answer. Raises JobFailed."""
        job = Job(
            strategy.kind,
            str(self._config),
            self.overrides(strategy, nodes, accumulation),
            ranks=0,
            steps=steps,
            warmup=self._settings.warmup,
            address="",
            port=0,
            folder="",
            block_seconds=self._settings.block_seconds,
            options=strategy.options | self._trace(strategy, nodes, accumulation),
        )
        return self._cluster.run(job, nodes, TIMEOUT_SECONDS)

    def _trace(self, strategy: Strategy, nodes: int, accumulation: int) -> dict[str, str]:
        if not self._settings.trace:
            return {}
        name = f"trace {strategy.name} nodes {nodes} slower {self._slower:g} x{accumulation}.json"
        return {
            "trace": str((self._settings.out / name.replace(" ", "-").replace(",", "")).resolve())
        }

    def undisturbed(self, strategy: Strategy, nodes: int, accumulation: int, steps: int) -> Row:
        """The row that others disturbed least, of as many tries as it takes or the settings allow.
        Raises JobFailed."""
        tries = []
        for _ in range(self._settings.tries):
            wait_for_quiet(QUIET_CORES, PATIENCE_SECONDS)
            answers = self.run(strategy, nodes, accumulation, steps)
            tries.append(row_of(strategy.name, answers, PER_NODE, accumulation))
            if tries[-1].others_cores < QUIET_CORES:
                break
        return min(tries, key=lambda row: row.others_cores)

    def full_rate(self, nodes: int) -> float:
        """Bytes per second of a NIC at which a pass of all weights takes its part of compute.
        Raises UserError where none of the overrides' rows can be, JobFailed."""
        if (why := self.refusal(STRATEGIES[0], nodes, 2)) is not None:
            raise UserError(why)
        row = self.undisturbed(STRATEGIES[0], nodes, 2, 3)
        seconds = statistics.median(row.seconds) / 2
        return row.parameters * 2 / (PASS_OF_COMPUTE * seconds)

    def measure(self, strategies: list[Strategy], results: "Results") -> None:
        """Group by group, strategies taking turns."""
        s = self._settings
        for nodes in s.nodes:
            rate = self.full_rate(nodes)
            # Nothing of one node's training crosses a NIC: no need to slow it down.
            factors = s.slower if nodes > 1 else [1]
            for slower, accumulation in product(factors, s.accumulation):
                self._slower = slower
                self._cluster.links.shape(rate / slower)
                print(
                    f"{nodes} nodes, {rate / slower / 1e6:.2f} MB/s a NIC ({slower} x slower), "
                    f"accumulation {accumulation}",
                    flush=True,
                )
                group: dict[str, Row] = {}
                for strategy in strategies * s.rounds:
                    new = self._row(strategy, nodes, accumulation)
                    new.slower, new.bytes_per_second = slower, rate / slower
                    new.version = self._version
                    print(f"  {new.line()}", flush=True)
                    if strategy.name in group:
                        group[strategy.name].join(new)
                    else:
                        group[strategy.name] = new
                results.replace(list(group.values()))

    def _row(self, strategy: Strategy, nodes: int, accumulation: int) -> Row:
        why = self.refusal(strategy, nodes, accumulation)
        if why is not None:
            return Row(strategy.name, nodes, accumulation, skipped=why)
        try:
            return self.undisturbed(strategy, nodes, accumulation, self._settings.steps)
        except JobFailed as error:
            print(error, file=sys.stderr, flush=True)
            why = str(error).splitlines()[-1]
            return Row(strategy.name, nodes, accumulation, skipped=f"failed: {why}")


class Results:
    """The rows in a folder's results.json, written again whenever a group is measured."""

    def __init__(self, out: Path, setting: list[str]) -> None:
        """`setting` are the overrides of all rows. Raises UserError where the folder has others."""
        self._out, self._setting = out, setting
        self._rows: list[Row] = []
        path = out / "results.json"
        if path.is_file():
            there = json.loads(path.read_text())
            if there["setting"] != setting:
                of = " ".join(there["setting"]) or "no overrides"
                raise UserError(f"{path}: of {of}; need another OUT")
            if there["machine"] != machine():
                of = ", ".join(f"{key} {value}" for key, value in there["machine"].items())
                raise UserError(f"{path}: of another machine, {of}; need another OUT")
            self._rows = list(load(out)[1].rows)

    def replace(self, group: list[Row]) -> None:
        """Put rows that are compared with each other in place of those of the same group."""
        kept = [row for row in self._rows if row.group != group[0].group]
        self._rows = sorted([*kept, *group], key=lambda row: row.group)
        rows = [asdict(row) for row in self._rows]
        found = {"machine": machine(), "setting": self._setting, "rows": rows}
        write_atomically(self._out / "results.json", json.dumps(found, indent=1))
        write_report(self._out)


def machine() -> dict[str, str | int]:
    """What the numbers were measured on."""
    cores, kernel = len(os.sched_getaffinity(0)), platform.release()
    return {"cpu": cpu_name(), "cores": cores, "kernel": kernel, "torch": torch.__version__}


def parse() -> argparse.Namespace:
    """The command line; `--quick` sets what is not given."""
    parser = argparse.ArgumentParser(
        prog="slow_network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("config", nargs="*", metavar="key=value")
    parser.add_argument("--quick", action="store_true", help="a few minutes, 1 and 4 nodes")
    parser.add_argument("--nodes", type=int, nargs="+", choices=(1, 2, 4))
    parser.add_argument(
        "--slower", type=at_least(0.01, float), nargs="+", help="divide the rate of the links"
    )
    parser.add_argument("--accumulation", type=at_least(1), nargs="+")
    parser.add_argument("--strategies", nargs="+", choices=[s.name for s in STRATEGIES])
    parser.add_argument("--overlap", nargs="+", choices=OVERLAPS, default=["none", "full"])
    parser.add_argument("--rounds", type=at_least(1), help="turns of each strategy")
    parser.add_argument("--steps", type=at_least(1), help="measured steps in each turn")
    parser.add_argument("--warmup", type=at_least(0), default=1, help="steps before them")
    parser.add_argument("--trace", action="store_true", help="a timeline of each row in OUT")
    parser.add_argument(
        "--block-seconds",
        type=at_least(0, float),
        default=0.0,
        help="what a block's forward takes on a device that computes beside the cores",
    )
    parser.add_argument("--packages", type=Path, help="a folder of `pip install --target`")
    parser.add_argument(
        "--tries", type=at_least(1), default=3, help="for a turn that others disturb"
    )
    overrides, others = split_overrides(sys.argv[1:])  # also after an option's values
    found = parser.parse_intermixed_args(others)
    found.config += overrides
    quick = {"nodes": [1, 4], "slower": [1, 16], "accumulation": [1], "rounds": 1, "steps": 5}
    whole = {"nodes": [1, 2, 4], "slower": [1, 4, 16], "accumulation": [1, 4]}
    defaults = quick if found.quick else whole | {"rounds": 3, "steps": 3}
    for name, value in defaults.items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    device = [f"--block-seconds={found.block_seconds:g}"] if found.block_seconds else []
    found.setting = [*device, *found.config]
    return found


def main() -> int:
    """Measure, write the report, print the table."""
    settings = parse()
    if settings.packages is not None:
        os.environ[PACKAGES] = str(settings.packages.resolve())
    strategies = chosen(settings.strategies, settings.overlap)
    settings.out.mkdir(parents=True, exist_ok=True)
    try:
        results = Results(settings.out, settings.setting)
        with (
            interrupted_by_signals(),
            tempfile.TemporaryDirectory(prefix="slow-network-") as folder,
            links(max(settings.nodes)) as made,
            Cluster(made, PER_NODE, Path(folder)) as cluster,
        ):
            Bench(cluster, write_inputs(Path(folder)), settings).measure(strategies, results)
    except (Unable, UserError) as error:
        print(f"slow_network: {error}", file=sys.stderr)
        return 2
    except JobFailed as error:  # of the turn that the links' rate follows from
        print(f"{error}\nslow_network: {ALONE} failed, as said above", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slow_network: interrupted, all is cleaned up", file=sys.stderr)
        return 130
    print((settings.out / "table.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
