"""Move tokens to experts over a slow network: level by level beside a flat all-to-all.

    sudo .venv/bin/python -m scripts.benchmarks.experts OUT [--slower 1 16] [--routings NAME …]
        [--steps 3] [--tokens 96] [--hidden 2048] [--compute 1.0]

4 nodes × 4 ranks (pair 2 × node 2) with 32 experts, 6 of them active, on the links of
scripts.benchmarks.slow_network. A step is the forward and backward of one layer. Its computing is a
wait, and moving is not overlapped with it. The rate of the links is such that the flat all-to-all
of uniformly routed tokens takes 0.75 of the computing, as on Frontier for a layer like
DeepSeek-V2-Lite's (hidden 2048, experts of 1408) at 40 TF/s on a GCD with 12.5 GB/s; `--slower`
divides that rate. Pairs and nodes have the same links, so tokens cross them at once
(`parallel.dispatch: auto`). OUT gets results.json and table.md; rows that are there and not
measured again stay. Needs root and iproute2.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megafrontier.comm.wires.wire import make_wire
from megafrontier.common.files import write_atomically
from scripts.benchmarks.experts.routing import (
    NODES,
    imbalance,
    natural,
    rows_leaving,
    uniform,
    worst,
)
from scripts.benchmarks.shared.cluster import Cluster, open_cluster
from scripts.benchmarks.shared.inputs import PER_NODE
from scripts.benchmarks.shared.job import Job
from scripts.benchmarks.shared.measuring import at_least, code_version, cpu_name, make_parser
from scripts.benchmarks.shared.tables import markdown

FLAT_OF_COMPUTE = 0.75
FLAT_ROWS = 4.5
"""Of 6 experts on 4 nodes, those that are on another node, on average."""
WAYS = 4
"""A row goes there and back, in forward and in backward."""
TIMEOUT_SECONDS = 900.0
CONFIG = """
run: {{name: experts, directory: {folder}/run}}
model: {{layers: 1, hidden: 32, heads: 2, sequence_length: 8, moe: {{experts: 32}}}}
tokenizer: bytes
parallel: {{expert: 16}}
train: {{precision: bf16}}
machine:
  levels:
    pair: {{size: 2, gigabytes_per_second: 1}}
    node: {{size: 2, gigabytes_per_second: 1}}
    world: {{}}
  device: {{name: cpu}}
"""
ROUTINGS = ("uniform", "natural", "2 nodes", "worst")
METHODS = ("flat", "bf16", "int8")


@dataclass(frozen=True)
class Row:
    """One method on one routing and one rate of the links."""

    routing: str
    method: str
    slower: float
    imbalance: float
    seconds: float
    """Median of the steps of the slowest rank."""
    node_bytes: float
    """Left a node's NIC in a step, on average over the nodes, with all headers."""
    formula_bytes: float
    """Rows that leave a node × their width, without counts, weights and headers."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "experts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--slower", type=at_least(0.01, float), nargs="+", default=[1.0, 16.0])
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    parser.add_argument("--steps", type=at_least(1), default=3)
    parser.add_argument("--tokens", type=at_least(1), default=96, help="of a rank")
    parser.add_argument("--hidden", type=at_least(1), default=2048)
    seconds = at_least(0, float)
    parser.add_argument("--compute", type=seconds, default=1.0, help="seconds of computing a step")
    return parser.parse_args()


def routings(tokens: int, out: Path) -> dict[str, Tensor]:
    """The experts of all ranks' tokens, by name. Those of a trained router are kept in `out`."""
    path = out / f"natural-{tokens}.pt"
    if not path.is_file():
        found, loss = natural(tokens)
        print(f"natural: a router trained to a loss of {loss:.2f}", flush=True)
        torch.save(found, path)
    nodes = {"uniform": uniform(tokens), "2 nodes": uniform(tokens, 2)}
    return nodes | {"natural": torch.load(path), "worst": worst(tokens)}


class Bench:
    """Rows on a cluster with the settings of one run of this script."""

    def __init__(self, cluster: Cluster, folder: Path, settings: argparse.Namespace) -> None:
        self._cluster, self._folder, self._settings = cluster, folder, settings
        self._config = folder / "config.yaml"
        self._config.write_text(CONFIG.format(folder=folder))

    @property
    def rate(self) -> float:
        """Bytes per second of a NIC at which a flat all-to-all takes its part of the computing."""
        s = self._settings
        flat = PER_NODE * s.tokens * FLAT_ROWS * WAYS * s.hidden * torch.bfloat16.itemsize
        return float(flat / (FLAT_OF_COMPUTE * s.compute))

    def row(self, name: str, chosen: Tensor, method: str, slower: float) -> Row:
        """Measure one row. Raises JobFailed."""
        s = self._settings
        self._cluster.links.shape(self.rate / slower)
        path = self._folder / "routing.pt"
        torch.save(chosen, path)
        options = {"routing": str(path), "method": method}
        options |= {"hidden": str(s.hidden), "compute": str(s.compute)}
        function = "scripts.benchmarks.experts.ranks:run"
        job = Job(function, str(self._config), steps=s.steps, options=options)
        answers = self._cluster.answers(job, NODES, TIMEOUT_SECONDS)
        steps = [max(seconds) for seconds in zip(*(a["seconds"] for a in answers), strict=True)]
        nodes = [answer["nic_bytes"] for answer in answers[::PER_NODE]]
        rows = rows_leaving(chosen, method != "flat")
        return Row(
            name,
            method,
            slower,
            imbalance(chosen, NODES * PER_NODE),
            statistics.median(steps),
            statistics.mean(nodes) / s.steps,
            rows * PER_NODE * s.tokens * WAYS * self._width(method),
        )

    def _width(self, method: str) -> int:
        if method == "int8":
            return make_wire(method).codec.message_bytes(self._settings.hidden)
        return int(self._settings.hidden) * torch.bfloat16.itemsize


def table(rows: list[Row]) -> str:
    """Rows of a routing and a rate beside the flat one of these."""
    flat = {(row.routing, row.slower): row for row in rows if row.method == "flat"}
    head = ["routing (fullest rank / average)", "link", "method"]
    head += ["MB a node sends", "fewer", "s a step", "speed"]
    lines = []
    for row in rows:
        base = flat[row.routing, row.slower]
        cells = [f"{row.routing} ({row.imbalance:.1f})", f"{row.slower:g} × slower", row.method]
        cells += [f"{row.node_bytes / 1e6:.1f}", f"{base.node_bytes / row.node_bytes:.2f} ×"]
        cells += [f"{row.seconds:.2f}", f"{base.seconds / row.seconds:.2f} ×"]
        lines.append(cells)
    return markdown(head, lines, text_columns=3) + "\n"


def kept_rows(out: Path) -> dict[tuple[str, str, float], Row]:
    """The rows that a folder has, by routing, method and link."""
    path = out / "results.json"
    values = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = [Row(**value) for value in values]
    return {(row.routing, row.method, row.slower): row for row in rows}


def write(out: Path, rows: list[Row]) -> None:
    """Write results.json and table.md."""
    about = {"cpu": cpu_name(), "torch": torch.__version__, "version": code_version()}
    values = {"about": about, "rows": [asdict(row) for row in rows]}
    write_atomically(out / "results.json", json.dumps(values, indent=1))
    write_atomically(out / "table.md", table(rows))


def main() -> None:
    """Measure, write the results after each row, print the table."""
    settings = parse()
    torch.set_num_threads(1)
    settings.out.mkdir(parents=True, exist_ok=True)
    rows = kept_rows(settings.out)
    with open_cluster("experts", NODES, PER_NODE) as (cluster, folder):
        bench = Bench(cluster, folder, settings)
        found = routings(NODES * PER_NODE * settings.tokens, settings.out)
        for slower in settings.slower:
            for name, method in product(settings.routings, METHODS):
                row = bench.row(name, found[name], method, slower)
                print(row, flush=True)
                rows[name, method, slower] = row
                write(settings.out, list(rows.values()))
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
