"""The Frontier paper's figures (arXiv:2501.04266) beside the planner's, under several assumptions.

    python -m scripts.benchmarks.planning.paper

The paper's abstract says: 20B parameters, up to 384 GCDs, 1.71 × ZeRO++, which is 1.405 × ZeRO-3;
scaling efficiency 0.94. It does not say the micro-batch, the accumulation, what its rivals overlap
and what RCCL reached. Each row changes assumptions. ZeRO-3 gathers and reduces in one ring of all
ranks, which moves at the rate of a node's NICs and needs a message for each rank. ZeRO++ (hpZ, int8
and int4) and the paper's placement (weights pair, gradients node, optimizer world, with the same
wires) go by level.
"""

import json
from dataclasses import asdict, dataclass

import torch

from megafrontier.config import load_config, load_machine
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.layers import simulate_blocks
from scripts.benchmarks.shared.measuring import make_parser

CONFIG = "configs/gpt-20b.yaml"
GCDS, FEWEST = 384, 16
NODE_RATE = 100.0
"""GB/s of a node's NICs."""


@dataclass(frozen=True)
class Assumed:
    """What the paper leaves open."""

    name: str
    overlap: str = "safe"
    share: float = 1.0
    """Of the NICs' rate that collectives reach."""
    micro_batch: int = 1
    accumulation: int = 1
    latency: float = 10.0
    """Microseconds of a message between nodes."""

    def rate(self, strategy: str, gcds: int = GCDS) -> float:
        """TF/s a GCD."""
        batch = self.micro_batch * self.accumulation * gcds
        by_level = (
            f"machine.levels.world={{gigabytes_per_second: {NODE_RATE / 8 * self.share}, "
            f"latency_microseconds: {self.latency}}}"
        )
        device = asdict(load_machine("frontier").device)
        rate = NODE_RATE * self.share
        link = {"gigabytes_per_second": rate, "latency_microseconds": self.latency}
        ring = f"machine={json.dumps({'levels': {'world': link}, 'device': device})}"
        overrides = {
            "zero3": ("partition.strategy=zero3", ring),
            "zero++": ("partition.strategy=hpz", "partition.wires=zero++", by_level),
            "paper": ("partition.strategy=topo", "partition.wires=zero++", by_level),
        }[strategy]
        config = load_config(
            CONFIG,
            (*overrides, f"train.micro_batch={self.micro_batch}", f"train.global_batch={batch}",
             f"partition.overlap={self.overlap}"),
        )  # fmt: skip
        return simulate_blocks(config, resolve_plan(config, gcds)).tflops_per_device


ROWS = (
    Assumed("machine file, one collective in flight"),
    Assumed("nothing overlaps", "none"),
    Assumed("… half of the NICs' rate", "none", 0.5),
    Assumed("… quarter", "none", 0.25),
    Assumed("… quarter, one collective in flight", "safe", 0.25),
    Assumed("… quarter, 16 micro-batches", "none", 0.25, accumulation=16),
    Assumed("… quarter, micro-batch 4", "none", 0.25, micro_batch=4),
    Assumed("… quarter, 4 micro-batches", "none", 0.25, accumulation=4),
    Assumed("… quarter, messages of 40 µs", "none", 0.25, latency=40.0),
    Assumed("… eighth, 16 micro-batches", "none", 0.125, accumulation=16),
)


def main() -> None:
    """Print the table."""
    make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    print("| assumed | ZeRO-3 | ZeRO++ | paper's | ZeRO++ over ZeRO-3 | paper's over ZeRO++ | "
          f"efficiency {FEWEST} → {GCDS} |\n|---|---:|---:|---:|---:|---:|---:|")  # fmt: skip
    print("| published | | | | 1.405 | 1.71 | 0.94 |")
    for row in ROWS:
        zero3, plus, paper = (row.rate(strategy) for strategy in ("zero3", "zero++", "paper"))
        print(
            f"| {row.name} | {zero3:.1f} | {plus:.1f} | {paper:.1f} | {plus / zero3:.2f} | "
            f"{paper / plus:.2f} | {paper / row.rate('paper', FEWEST):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
