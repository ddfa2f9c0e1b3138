"""Tensor parallelism over a slow link, with and without overlap, and with int8 activations.

    sudo python -m scripts.benchmarks.slow_network.tensor OUT [--data 1 2] [--share 0.5]
        [--rounds 3] [--steps 4] [--trace] [key=value …]

Each rank is a node of its own with one shaped NIC. Two ranks share the matrices, and with `--data
2` two such pairs have other samples. Matrix products take as long as on a device of FLOPS
(`device.occupy_products`), and the cores are there for the engine. The rate of the links is chosen
so that the activations of a step take `--share` of the time of its products and of all else that it
does over fast links. On a machine that others use, run it with `chrt -r 5`: waiting ranks need few
cores, but at once. Contenders take turns, in fresh processes. Writes OUT/tensor.md, tensor.json and
with `--trace` a trace of each.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.benchmarks.shared.cluster import Cluster, open_cluster
from scripts.benchmarks.shared.inputs import write_inputs
from scripts.benchmarks.shared.job import Answer, Job, step_seconds
from scripts.benchmarks.shared.measuring import at_least, describe_cpu, listed, make_parser
from scripts.benchmarks.shared.tables import markdown, spread

FLOPS = 5e8
FAST = 1e9
"""Bytes per second of links that cost nothing."""
TIMEOUT_SECONDS = 900.0
SETTING = (
    "model.hidden=128",
    "model.position=rotary",
    "model.vocab_multiple=2",
    "train.micro_batch=2",
    "parallel.tensor=2",
    "partition.strategy=zero1",
    "data.document_mask=false",
    "machine={levels: {link: {size: 2}, world: {}}, device: {name: cpu}}",
)
NOT_OVERLAPPED, OVERLAPPED, LOW = "not overlapped", "overlapped", "overlapped, int8"
CONTENDERS = {
    NOT_OVERLAPPED: ("partition.overlap=none",),
    OVERLAPPED: ("partition.overlap=safe",),
    LOW: ("partition.overlap=safe", "partition.wires.activations.link=int8"),
}


@dataclass
class Found:
    """What one contender's turns took."""

    seconds: list[float] = field(default_factory=list)
    nic_bytes: float = 0.0
    """That left one NIC in a step."""
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)
    loss: float = 0.0

    def take(self, answers: Sequence[Answer]) -> None:
        """Count one more turn."""
        self.seconds += step_seconds(answers)
        self.nic_bytes = statistics.mean(a.nic_bytes / a.steps_sent for a in answers)
        self.kinds, self.loss = answers[0].kinds, answers[0].loss

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def hidden(self) -> float:
        """The part of the seconds of activations that computation hid, by the ledger."""
        found = self.kinds["activations"]
        return found["hidden"] / found["seconds"]


def run(
    cluster: Cluster, config: str, s: argparse.Namespace, name: str, ranks: int, steps: int
) -> list[Answer]:
    """Every rank's answer. Raises JobFailed."""
    batch = f"train.global_batch={ranks}"  # two sequences for each pair of ranks
    options = {"flops": str(FLOPS)}
    if s.trace:
        file = f"trace-{name.replace(', ', '-').replace(' ', '-')}.json"
        options["trace"] = str((s.out / file).resolve())
    overrides = (*SETTING, batch, *s.config, *CONTENDERS[name])
    job = Job("scripts.benchmarks.shared.ranks:ours", config, overrides, steps, options=options)
    return cluster.run(job, ranks, TIMEOUT_SECONDS)


def measure(cluster: Cluster, config: str, s: argparse.Namespace, data: int) -> dict[str, Found]:
    """All contenders, over links at which activations take the chosen share."""
    fast, ranks = Found(), 2 * data
    cluster.links.shape(FAST)
    fast.take(run(cluster, config, s, NOT_OVERLAPPED, ranks, 2))
    rate = fast.kinds["activations"]["bytes"] / (s.share * fast.median)
    cluster.links.shape(rate)
    print(f"{ranks} ranks: {fast.median:.3f} s over fast links, now {rate / 1e6:.2f} MB/s")
    found: dict[str, Found] = {"over fast links, not overlapped": fast}
    for name in [*CONTENDERS] * s.rounds:
        of = found.setdefault(name, Found())
        of.take(run(cluster, config, s, name, ranks, s.steps))
        print(
            f"  {name}: {of.median:.3f} s, {of.hidden:.0%} hidden, loss {of.loss:.4f}", flush=True
        )
    return found


def table(data: int, found: dict[str, Found]) -> str:
    """Markdown: the contenders, and the ratios with their bars."""
    head = ["contender", "step s: median (least – most)", "NIC MB/step", "activations hidden"]
    rows = [
        [name, spread(of.seconds, ".3f"), f"{of.nic_bytes / 1e6:.2f}", f"{of.hidden:.0%}"]
        for name, of in found.items()
    ]
    ours, slow = found[OVERLAPPED], found[NOT_OVERLAPPED].median
    ratios = (
        ("overlapped over not overlapped", slow / ours.median, 1.15),
        ("share of activations' seconds that is hidden", ours.hidden, 0.6),
    )
    bars = [
        [what, f"{value:.3f}", f"≥ {least:g}", "reached" if value >= least else "missed"]
        for what, value, least in ratios
    ]
    parts = (markdown(head, rows), markdown(["ratio", "measured", "bar", ""], bars))
    return "\n\n".join([f"### tensor 2, data {data}", *parts])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "tensor")
    parser.add_argument("out", type=Path)
    parser.add_argument("config", nargs="*", metavar="key=value")
    parser.add_argument("--data", type=int, nargs="+", choices=(1, 2), default=[1])
    parser.add_argument("--share", type=at_least(0.01, float), default=0.5)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(1), default=4)
    parser.add_argument("--trace", action="store_true")
    return parser.parse_intermixed_args()


def main() -> None:
    """Measure, write, print."""
    s = parse()
    s.out.mkdir(parents=True, exist_ok=True)
    with open_cluster("tensor", 2 * max(s.data), 1) as (cluster, folder):
        config = write_inputs(folder)
        found = {data: measure(cluster, config, s, data) for data in s.data}
    text = "\n\n".join([listed(describe_cpu()), *(table(*item) for item in found.items())]) + "\n"
    (s.out / "tensor.md").write_text(text)
    values = {data: {name: asdict(of) for name, of in rows.items()} for data, rows in found.items()}
    (s.out / "tensor.json").write_text(json.dumps(values, indent=1))
    print(text)


if __name__ == "__main__":
    main()
