"""Steps on the slow network beside those that the planner predicts from a probe of it.

    sudo python -m scripts.benchmarks.planning.accuracy OUT --measure [--slower 1 16]
        [--accumulation 1 4] [--rows NAME …] [--steps 2]
    python -m scripts.benchmarks.planning.accuracy OUT [--results slow_network/results.json]

4 nodes of 4 ranks share the machine's cores; a block waits as if a device computed 0.3 s for its
forward and twice that for its backward (shared/device.py). `--measure` probes the node's
links and one rank's device once, and the network at each rate, and adds rows to OUT/measured.json.
Without it, the same machine is simulated, and a table of all rows is printed; with `--results`, of
the rows that slow_network measured on all nodes. Measuring needs root, and quiet cores.
"""

import argparse
import json
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megafrontier.config import load_config
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.simulation.meter import running_meter
from megafrontier.planner.simulation.simulate import simulate
from megafrontier.training.trainer import Trainer
from scripts.benchmarks.shared.cluster import open_cluster
from scripts.benchmarks.shared.device import occupy
from scripts.benchmarks.shared.inputs import PER_NODE, write_inputs
from scripts.benchmarks.shared.job import Job, median_step, others_cores
from scripts.benchmarks.shared.measuring import make_parser
from scripts.benchmarks.shared.tables import markdown
from scripts.benchmarks.slow_network.__main__ import OURS, STRATEGIES

NODES = 4
FAST, LONG = 1e9, 2**22
"""Bytes a second and bytes of a message with which the links within a node are probed."""
TIMEOUT_SECONDS = 240.0
PROBE_SECONDS = 1.5
"""Of a message over the network."""
FULL_RATE = 5.9e6
"""Bytes a second of a NIC at which a pass of all weights takes 12 % of a micro-step's compute, as
on Frontier (slow_network)."""
BLOCK_SECONDS = 0.3
SETTING = ("model.layers=8", "model.sequence_length=64", "train.micro_batch=1")
FULL = "partition.overlap=full"
ROWS: dict[str, tuple[str, ...]] = {
    each.name: (*each.overrides, FULL) for each in STRATEGIES if each.function == OURS
} | {
    "topo exact, overlap none": ("partition.strategy=topo", "partition.overlap=none"),
    "topo exact, overlap safe": ("partition.strategy=topo", "partition.overlap=safe"),
    "topo, tensor pair": ("partition.strategy=topo", "parallel.tensor=pair", FULL),
    "topo, context pair": ("partition.strategy=topo", "parallel.context=pair", FULL),
    "zero1, pipeline 2": ("partition.strategy=zero1", "parallel.pipeline=2", FULL),
    "zero1, pipeline 4": ("partition.strategy=zero1", "parallel.pipeline=4", FULL),
}


def overrides_of(name: str, accumulation: int) -> tuple[str, ...]:
    """Of a row: as many sequences for each rank as micro-batches, whatever is split."""
    batch = NODES * PER_NODE * accumulation
    return (*SETTING, f"train.global_batch={batch}", *ROWS[name])


def read_measured(out: Path) -> dict[str, Any]:
    """OUT/measured.json: a machine file for each rate, and steps."""
    path = out / "measured.json"
    return json.loads(path.read_text()) if path.exists() else {"machines": {}, "rows": []}


def measure(measured: dict[str, Any], s: argparse.Namespace) -> None:
    """Add the probe and the rows of each rate, and write them."""

    def write() -> None:
        s.out.mkdir(parents=True, exist_ok=True)
        (s.out / "measured.json").write_text(json.dumps(measured, indent=1))

    with open_cluster("accuracy", NODES, PER_NODE) as (cluster, folder):
        config = write_inputs(folder)

        def probe(rate: float, size: float) -> dict[str, Any]:
            cluster.links.shape(rate)
            options = {"bytes": str(int(size))}
            job = Job("scripts.benchmarks.planning.probing:run", config, SETTING, options=options)
            return machine_of(cluster.answers(job, NODES, TIMEOUT_SECONDS))

        if "local" not in measured:
            measured["local"] = probe(FAST, LONG)
            write()
        for slower in s.slower:
            rate = FULL_RATE / slower
            world = probe(rate, rate / PER_NODE * PROBE_SECONDS)["levels"]["world"]
            local = measured["local"]
            machine = {**local, "levels": local["levels"] | {"world": world}}
            measured["machines"][f"{slower:g}"] = machine
            for accumulation, name in product(s.accumulation, s.rows):
                overrides = overrides_of(name, accumulation)
                job = Job(OURS, config, overrides, s.steps, block_seconds=BLOCK_SECONDS)
                answers = cluster.run(job, NODES, TIMEOUT_SECONDS)
                seconds = median_step(answers)
                row = {"name": name, "slower": slower, "accumulation": accumulation}
                known = measured["rows"]
                known[:] = [r for r in known if {k: r[k] for k in row} != row]
                known.append(row | {"seconds": seconds, "others_cores": others_cores(answers)})
                print(row, f"{seconds:.3f} s", flush=True)
                write()


def machine_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of a machine file: of each level the median of the kinds of exchanges, each the
    median of all ranks, and the first rank's device."""
    levels = {}
    for name, size in {"pair": 2, "node": 2, "world": NODES}.items():
        kinds = [
            [
                statistics.median(answer["levels"][name][kind][of] for answer in answers)
                for of in (0, 1)
            ]
            for kind in answers[0]["levels"][name]
        ]
        levels[name] = {
            "size": size,
            "gigabytes_per_second": statistics.median(rate for rate, _ in kinds) / 1e9,
            "latency_microseconds": statistics.median(latency for _, latency in kinds) * 1e6,
        }
    return {"levels": levels, "device": {"name": "cpu"} | answers[0]["device"]}


def recorded(path: Path, local: dict[str, Any]) -> dict[str, Any]:
    """The rows of slow_network's results.json in the form of OUT/measured.json: `local` is what was
    probed there, and the network has the rate to which it was shaped."""
    results = json.loads(path.read_text())
    block, *setting = results["setting"]
    names = {each.name: each.overrides for each in STRATEGIES if each.function == OURS}
    found: dict[str, Any] = {"machines": {}, "rows": []}
    for row in results["rows"]:
        name, _, policy = row["strategy"].removesuffix(" overlap").partition(", ")
        if name not in names or row["nodes"] != NODES or row["skipped"]:
            continue
        batch = f"train.global_batch={NODES * PER_NODE * row['accumulation']}"
        overlap = f"partition.overlap={policy or 'none'}"
        world = local["levels"]["world"] | {
            "gigabytes_per_second": row["bytes_per_second"] / PER_NODE / 1e9
        }
        machine = {**local, "levels": local["levels"] | {"world": world}}
        found["machines"][f"{row['slower']:g}"] = machine
        found["rows"].append(
            {key: row[key] for key in ("slower", "accumulation")}
            | {"name": row["strategy"], "seconds": statistics.median(row["seconds"])}
            | {"overrides": [*setting, batch, *names[name], overlap]}
            | {"block_seconds": float(block.partition("=")[2])}
        )
    return found


def predict(row: dict[str, Any], machine: dict[str, Any], folder: Path) -> float:
    """Seconds of a row's step by the planner."""
    overrides = row.get("overrides") or overrides_of(row["name"], row["accumulation"])
    config = load_config(write_inputs(folder), (*overrides, f"machine={json.dumps(machine)}"))
    plan = resolve_plan(config, NODES * PER_NODE)
    block_seconds = row.get("block_seconds", BLOCK_SECONDS)

    def prepare(trainer: Trainer) -> None:
        occupy(trainer.model, block_seconds, wait=lambda each: running_meter().compute(each))

    return simulate(config, plan, prepare=prepare, micro_batches=4).seconds


def table(measured: dict[str, Any]) -> str:
    """All rows, and the mean and the worst error."""
    head = ["row", "links", "micro-batches", "measured, s", "predicted, s", "error"]
    rows, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for row in measured["rows"]:
            seconds = predict(row, measured["machines"][f"{row['slower']:g}"], Path(folder))
            errors.append(seconds / row["seconds"] - 1)
            cells = [row["name"], f"{row['slower']:g} ×", str(row["accumulation"])]
            cells += [f"{row['seconds']:.2f}", f"{seconds:.2f}", f"{100 * errors[-1]:+.1f} %"]
            print(f"| {' | '.join(cells)} |", flush=True)
            rows.append(cells)
    mean = statistics.fmean(map(abs, errors))
    worst = max(map(abs, errors))
    return f"{markdown(head, rows)}\n\nmean error {mean:.1%}, worst {worst:.1%}"


def main() -> None:
    """Measure, or predict and print."""
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--slower", type=float, nargs="+", default=[1.0, 16.0])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    measured = read_measured(settings.out)
    if settings.measure:
        measure(measured, settings)
    else:
        is_own = settings.results is None
        local = measured["local"]
        found = table(measured if is_own else recorded(settings.results, local))
        (settings.out / ("table.md" if is_own else "recorded.md")).write_text(found + "\n")
        print(found.splitlines()[-1])


if __name__ == "__main__":
    main()
