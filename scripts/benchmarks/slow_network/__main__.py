"""Train on 1, 2 and 4 nodes of one machine that a slow network joins, strategy beside strategy.

    sudo .venv/bin/python -m scripts.benchmarks.slow_network OUT [--nodes 1 2 4] [--slower 1 4 16]
        [--accumulation 1 4] [--strategies NAME …] [--overlap none full]
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
(shared/device.py), and the cores are there for the engine alone.

DeepSpeed is looked for in DIR, made without another torch by

    pip install --no-deps --target DIR -r scripts/benchmarks/slow_network/packages.txt

Needs root and Debian's iproute2; removes its namespaces and processes when it ends, however.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from megafrontier.common.arguments import split_overrides
from megafrontier.common.errors import UserError, exit_on_fatal_error
from megafrontier.common.files import write_atomically
from megafrontier.config import load_config
from megafrontier.plan.refuse import check_layout
from megafrontier.planner.checks import check_files
from scripts.benchmarks.shared.cluster import Cluster, JobFailed, open_cluster, wait_for_quiet
from scripts.benchmarks.shared.inputs import PER_NODE, write_inputs
from scripts.benchmarks.shared.job import Answer, Job
from scripts.benchmarks.shared.measuring import (
    PACKAGES,
    at_least,
    code_version,
    describe_cpu,
    listed,
    make_parser,
)
from scripts.benchmarks.slow_network import deepspeed_zero
from scripts.benchmarks.slow_network.report import ALONE, Row, load, row_of, write_report

PASS_OF_COMPUTE = 0.12
"""Seconds of one pass of all weights into a node over seconds of a micro-step's compute: 41 GB
through 100 GB/s, and 2048 tokens (6 FLOPs a parameter) at 75 TF/s on each GCD."""
TIMEOUT_SECONDS = 600.0
OVERLAPS = ("none", "safe", "full")
QUIET_CORES, PATIENCE_SECONDS = 0.2, 30.0
"""A row that others disturbed by more cores than these is measured again."""
OURS = "scripts.benchmarks.shared.ranks:ours"
FSDP2 = "scripts.benchmarks.slow_network.fsdp2:fsdp2"
DEEPSPEED = "scripts.benchmarks.slow_network.deepspeed_zero:deepspeed"


@dataclass(frozen=True)
class Strategy:
    """A row of the table. The engine's own differ in overrides alone."""

    name: str
    overrides: tuple[str, ...] = ()
    function: str = OURS
    options: dict[str, str] = field(default_factory=dict)


STRATEGIES = (
    Strategy(ALONE, function="scripts.benchmarks.shared.ranks:alone"),
    Strategy("FSDP2 full", function=FSDP2, options={"mode": "full"}),
    Strategy("FSDP2 hybrid", function=FSDP2, options={"mode": "hybrid"}),
    Strategy("DeepSpeed ZeRO-3", function=DEEPSPEED, options={"mode": "zero3"}),
    Strategy("DeepSpeed hpZ", function=DEEPSPEED, options={"mode": "hpz"}),
    Strategy("zero3", ("partition.strategy=zero3",)),
    Strategy("hpz", ("partition.strategy=hpz",)),
    Strategy("hpz + zero++", ("partition.strategy=hpz", "partition.wires=zero++")),
    Strategy("mics", ("partition.strategy=mics",)),
    Strategy("topo exact", ("partition.strategy=topo",)),
    Strategy("topo low", ("partition.strategy=topo", "partition.wires=low")),
)


def chosen(names: list[str] | None, policies: Sequence[str]) -> list[Strategy]:
    """The strategies asked for, ours under each overlap policy; computing alone is always one."""
    found = []
    for strategy in STRATEGIES:
        if names and strategy.name not in (*names, ALONE):
            continue
        if strategy.function != OURS:
            found.append(strategy)
            continue
        for policy in policies:
            name = strategy.name if policy == "none" else f"{strategy.name}, {policy} overlap"
            found.append(Strategy(name, (*strategy.overrides, f"partition.overlap={policy}")))
    return found


class Bench:
    """Jobs on a cluster with the settings of one run of this script."""

    def __init__(self, cluster: Cluster, config: str, settings: argparse.Namespace) -> None:
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
            if strategy.function == DEEPSPEED:
                deepspeed_zero.prepare()
            config = load_config(self._config, self.overrides(strategy, nodes, accumulation))
            check_files(config, check_layout(config, nodes * PER_NODE))
        except (UserError, ImportError) as error:
            return str(error)
        return None

    def run(self, strategy: Strategy, nodes: int, accumulation: int, steps: int) -> list[Answer]:
        """Every rank's answer. Raises JobFailed."""
        s = self._settings
        job = Job(
            strategy.function,
            self._config,
            self.overrides(strategy, nodes, accumulation),
            steps,
            s.warmup,
            s.block_seconds,
            strategy.options | self._trace(strategy, nodes, accumulation),
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
        self._out, self._about = out, {"machine": describe_cpu(), "setting": setting}
        self._rows: list[Row] = []
        path = out / "results.json"
        if path.is_file():
            there = json.loads(path.read_text())
            if there["setting"] != setting:
                of = " ".join(there["setting"]) or "no overrides"
                raise UserError(f"{path}: of {of}; need another OUT")
            if there["machine"] != self._about["machine"]:
                of = listed(there["machine"])
                raise UserError(f"{path}: of another machine, {of}; need another OUT")
            self._rows = list(load(out)[1].rows)

    def replace(self, group: list[Row]) -> None:
        """Put rows that are compared with each other in place of those of the same group."""
        kept = [row for row in self._rows if row.group != group[0].group]
        self._rows = sorted([*kept, *group], key=lambda row: row.group)
        found = self._about | {"rows": [asdict(row) for row in self._rows]}
        write_atomically(self._out / "results.json", json.dumps(found, indent=1))
        write_report(self._out)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "slow_network")
    parser.add_argument("out", type=Path)
    parser.add_argument("config", nargs="*", metavar="key=value")
    parser.add_argument("--nodes", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    add = partial(parser.add_argument, nargs="+")
    add("--slower", type=at_least(0.01, float), default=[1, 4, 16], help="divide the links' rate")
    add("--accumulation", type=at_least(1), default=[1, 4])
    add("--strategies", choices=[s.name for s in STRATEGIES])
    add("--overlap", choices=OVERLAPS, default=["none", "full"])
    add = partial(parser.add_argument, type=at_least(1))
    add("--rounds", default=3, help="turns of each strategy")
    add("--steps", default=3, help="measured steps in each turn")
    add("--tries", default=3, help="for a turn that others disturb")
    parser.add_argument("--warmup", type=at_least(0), default=1, help="steps before them")
    parser.add_argument("--trace", action="store_true", help="a timeline of each row in OUT")
    seconds = at_least(0, float)
    parser.add_argument("--block-seconds", type=seconds, default=0.0, help="of a block's forward")
    parser.add_argument("--packages", type=Path, help="a folder of `pip install --target`")
    overrides, others = split_overrides(sys.argv[1:])  # also after an option's values
    found = parser.parse_intermixed_args(others)
    found.config += overrides
    device = [f"--block-seconds={found.block_seconds:g}"] if found.block_seconds else []
    found.setting = [*device, *found.config]
    return found


def main() -> None:
    """Measure, write the report, print the table."""
    s = parse()
    if s.packages is not None:
        os.environ[PACKAGES] = str(s.packages.resolve())
    strategies = chosen(s.strategies, s.overlap)
    s.out.mkdir(parents=True, exist_ok=True)
    with exit_on_fatal_error("slow_network"):
        results = Results(s.out, s.setting)
    with open_cluster("slow_network", max(s.nodes), PER_NODE) as (cluster, folder):
        try:
            Bench(cluster, write_inputs(folder), s).measure(strategies, results)
        except JobFailed as error:  # of the turn that the links' rate follows from
            print(f"{error}\nslow_network: {ALONE} failed, as said above", file=sys.stderr)
            raise SystemExit(1) from error
    print((s.out / "table.md").read_text())


if __name__ == "__main__":
    main()
