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
from dataclasses import asdict, dataclass, replace

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
    share: float = 0.4
    """Of the NICs' rate that collectives reach. With 1, the links within a node have their line
    rates, too."""
    overlap: str = "safe"
    accumulation: int = 1
    slows_compute: float = 0.16

    def rate(self, strategy: str, gcds: int = GCDS) -> float:
        """TF/s a GCD."""
        machine = load_machine("frontier")
        for level in machine.levels.values():
            level.slows_compute = self.slows_compute
            if self.share == 1:
                level.gigabytes_per_second = level.line_gigabytes_per_second
        world = machine.levels["world"]
        world.gigabytes_per_second = self.share * NODE_RATE / machine.device.ranks_per_host
        if strategy == "zero3":
            rate = self.share * NODE_RATE
            machine.levels = {"world": replace(world, gigabytes_per_second=rate)}
        overrides = {
            "zero3": ("partition.strategy=zero3",),
            "zero++": ("partition.strategy=hpz", "partition.wires=zero++"),
            "paper": ("partition.strategy=topo", "partition.wires=zero++"),
        }[strategy]
        config = load_config(
            CONFIG,
            (*overrides, f"machine={json.dumps(asdict(machine))}", "train.micro_batch=1",
             f"train.global_batch={self.accumulation * gcds}",
             "train.activation_checkpointing=block",
             f"partition.overlap={self.overlap}"),
        )  # fmt: skip
        return simulate_blocks(config, resolve_plan(config, gcds)).tflops_per_device


ROWS = (
    Assumed("line rates, nothing slows the computation", 1.0, slows_compute=0.0),
    Assumed("line rates", 1.0),
    Assumed("half of the NICs' rate", 0.5),
    Assumed("the machine file: 40 %"),
    Assumed("a quarter", 0.25),
    Assumed("an eighth", 0.125),
    Assumed("40 %, 16 micro-batches", accumulation=16),
    Assumed("a quarter, 16 micro-batches", 0.25, accumulation=16),
    Assumed("an eighth, 16 micro-batches", 0.125, accumulation=16),
    Assumed("nothing overlaps, half", 0.5, "none"),
    Assumed("nothing overlaps, a quarter", 0.25, "none"),
    Assumed("nothing overlaps, a quarter, 16 micro-batches", 0.25, "none", 16),
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
