"""Tensor parallelism over a slow link, with and without overlap, beside torch's own.

    sudo python -m scripts.benchmarks.slow_network.tensor OUT [--data 1 2] [--share 0.5]
        [--rounds 3] [--steps 4] [--trace] [key=value …]

Each rank is a node of its own with one shaped NIC (`links.py`). Two ranks share the matrices, and
with `--data 2` two such pairs have other samples. Matrix products take as long as on a device of
FLOPS (`device.occupy_products`), and the cores are there for the engine. The rate of the links is
chosen so that the activations of a step take `--share` of the time of its products and of all else
that it does over fast links. On a machine that others use, run it with `chrt -r 5`: waiting ranks
need few cores, but at once. Contenders take turns, in fresh processes. Writes OUT/tensor.md,
tensor.json and with `--trace` a trace of each of ours.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megafrontier.common.errors import UserError
from scripts.benchmarks.shared.measuring import at_least
from scripts.benchmarks.slow_network.__main__ import machine, write_inputs
from scripts.benchmarks.slow_network.cluster import Cluster, JobFailed, interrupted_by_signals
from scripts.benchmarks.slow_network.job import Answer, Job
from scripts.benchmarks.slow_network.links import Unable, links

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


@dataclass(frozen=True)
class Contender:
    """A row of the table; `overrides` are of the engine."""

    name: str
    kind: str = "ours"
    overrides: tuple[str, ...] = ()


INT8 = "partition.wires.activations.link=int8"
NOT_OVERLAPPED = Contender("not overlapped", overrides=("partition.overlap=none",))
OVERLAPPED = Contender("overlapped", overrides=("partition.overlap=safe",))
LOW = Contender("overlapped, int8", overrides=("partition.overlap=safe", INT8))
TORCH = Contender("torch", "torch tensor")
CONTENDERS = (NOT_OVERLAPPED, OVERLAPPED, LOW, TORCH)


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
        begins = [max(at) for at in zip(*(a.begins for a in answers), strict=True)]
        ends = [max(at) for at in zip(*(a.ends for a in answers), strict=True)]
        self.seconds += [end - begin for begin, end in zip(begins, ends, strict=True)]
        self.nic_bytes = statistics.mean(a.nic_bytes / a.steps_sent for a in answers)
        self.kinds, self.loss = answers[0].kinds, answers[0].loss

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def hidden(self) -> float | None:
        """The part of the seconds of activations that computation hid, by the ledger."""
        found = self.kinds.get("activations")
        return found["hidden"] / found["seconds"] if found else None


class Bench:
    """Jobs on a cluster of ranks that are nodes."""

    def __init__(self, cluster: Cluster, config: Path, settings: argparse.Namespace) -> None:
        self._cluster, self._config, self._settings = cluster, config, settings

    def run(self, contender: Contender, ranks: int, steps: int) -> list[Answer]:
        """Every rank's answer. Raises JobFailed."""
        batch = f"train.global_batch={ranks}"  # two sequences for each pair of ranks
        options = {"flops": str(FLOPS)}
        if self._settings.trace:
            name = f"trace-{contender.name.replace(', ', '-').replace(' ', '-')}.json"
            options["trace"] = str((self._settings.out / name).resolve())
        overrides = (*SETTING, batch, *self._settings.config, *contender.overrides)
        job = Job(
            contender.kind,
            str(self._config),
            overrides,
            ranks=0,
            steps=steps,
            warmup=1,
            address="",
            port=0,
            folder="",
            options=options,
        )
        return self._cluster.run(job, ranks, TIMEOUT_SECONDS)

    def measure(self, data: int) -> dict[str, Found]:
        """All contenders, over links at which activations take the chosen share."""
        fast, ranks = Found(), 2 * data
        self._cluster.links.shape(FAST)
        fast.take(self.run(NOT_OVERLAPPED, ranks, 2))
        sent = fast.kinds["activations"]["bytes"]
        rate = sent / (self._settings.share * fast.median)
        self._cluster.links.shape(rate)
        print(f"{ranks} ranks: {fast.median:.3f} s over fast links, now {rate / 1e6:.2f} MB/s")
        found: dict[str, Found] = {"over fast links, not overlapped": fast}
        for contender in CONTENDERS * self._settings.rounds:
            of = found.setdefault(contender.name, Found())
            of.take(self.run(contender, ranks, self._settings.steps))
            hidden = "" if of.hidden is None else f", {of.hidden:.0%} hidden"
            print(f"  {contender.name}: {of.median:.3f} s{hidden}, loss {of.loss:.4f}", flush=True)
        return found


def table(data: int, found: dict[str, Found]) -> str:
    """Markdown: the contenders, and the ratios with their bars."""
    lines = [
        f"### tensor 2, data {data}\n",
        "| contender | step s: median (least – most) | NIC MB/step | activations hidden |",
        "|---|---:|---:|---:|",
    ]
    for name, of in found.items():
        hidden = "" if of.hidden is None else f"{of.hidden:.0%}"
        spread = f"{of.median:.3f} ({min(of.seconds):.3f} – {max(of.seconds):.3f})"
        lines.append(f"| {name} | {spread} | {of.nic_bytes / 1e6:.2f} | {hidden} |")
    ours = found[OVERLAPPED.name]
    ratios = (
        ("overlapped over not overlapped", found[NOT_OVERLAPPED.name].median / ours.median, 1.15),
        ("share of activations' seconds that is hidden", ours.hidden or 0.0, 0.6),
        ("overlapped over torch", found[TORCH.name].median / ours.median, 1.0),
        ("overlapped, int8, over torch", found[TORCH.name].median / found[LOW.name].median, 1.3),
    )
    lines += ["", "| ratio | measured | bar | |", "|---|---:|---:|---|"]
    for what, value, least in ratios:
        word = "reached" if value >= least else "missed"
        lines.append(f"| {what} | {value:.3f} | ≥ {least:g} | {word} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tensor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("config", nargs="*", metavar="key=value")
    parser.add_argument("--data", type=int, nargs="+", choices=(1, 2), default=[1])
    parser.add_argument("--share", type=at_least(0.01, float), default=0.5)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(1), default=4)
    parser.add_argument("--trace", action="store_true")
    return parser.parse_intermixed_args()


def main() -> int:
    """Measure, write, print."""
    settings = parse()
    settings.out.mkdir(parents=True, exist_ok=True)
    texts, values = [], {}
    try:
        with (
            interrupted_by_signals(),
            tempfile.TemporaryDirectory(prefix="slow-network-") as folder,
            links(2 * max(settings.data)) as made,
            Cluster(made, 1, Path(folder)) as cluster,
        ):
            bench = Bench(cluster, write_inputs(Path(folder)), settings)
            for data in settings.data:
                found = bench.measure(data)
                texts.append(table(data, found))
                values[data] = {name: asdict(of) for name, of in found.items()}
    except (Unable, UserError, JobFailed) as error:
        print(f"tensor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tensor: interrupted, all is cleaned up", file=sys.stderr)
        return 130
    head = ", ".join(f"{name} {value}" for name, value in machine().items())
    text = "\n\n".join([head, *texts]) + "\n"
    (settings.out / "tensor.md").write_text(text)
    (settings.out / "tensor.json").write_text(json.dumps(values, indent=1))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
