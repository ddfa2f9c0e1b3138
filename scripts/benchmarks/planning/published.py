"""Published training rates on MI250X and H100 beside the planner's.

    python -m scripts.benchmarks.planning.published [NAME …]

Every row states the layout that its source gives, and what had to be assumed. The machine files are
the only calibration. TF/s are counted as the source counts them: Megatron-DeepSpeed counts the
recomputation of checkpointed blocks, torchtitan whole attention. Rows on H100 are in tokens/s.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megafrontier.config import ModelConfig, load_config
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.layers import simulate_blocks
from megafrontier.planner.simulation.simulate import simulate

CONFIG = """
run: {name: published}
tokenizer: bytes
data: {train: [{path: none}]}
train: {precision: bf16, activation_checkpointing: block}
machine: frontier
"""


def megatron_flops(model: ModelConfig) -> float:
    """TF of a token as Megatron-DeepSpeed counts: with recomputed blocks and whole attention
    (Narayanan et al. 2021, arXiv:2104.04473, section 3.5)."""
    layers, hidden = model.layers, model.hidden
    blocks = 96 * layers * hidden**2
    head = model.vocab_size / (16 * layers * hidden)
    return blocks * (1 + model.sequence_length / (6 * hidden) + head) / 1e12


def torchtitan_flops(model: ModelConfig) -> float:
    """TF of a token of an 8B Llama 3 as torchtitan counts: 6 for each parameter outside of the
    embedding, and whole attention."""
    attention = 12 * model.layers * model.hidden * model.sequence_length
    return (6 * (8.03e9 - model.vocab_size * model.hidden) + attention) / 1e12


def xmoe_flops(model: ModelConfig) -> float:
    """TF of a token as X-MoE's Megatron-DeepSpeed counts: whole attention, and the experts that
    process the token, each of two matrices."""
    assert model.moe is not None
    block = 4 * model.hidden**2 + 2 * model.hidden * model.sequence_length
    block += 2 * model.hidden * model.moe.active * (model.moe.ffn_hidden or 0)
    return 6 * (model.layers * block + model.vocab_size * model.hidden) / 1e12


def tokens(model: ModelConfig) -> float:
    """One, where the source counts tokens."""
    return 1.0


@dataclass(frozen=True)
class Row:
    """A published rate."""

    name: str
    devices: int
    published: float
    """A second and device: TF, as the source counts, or tokens."""
    overrides: tuple[str, ...]
    assumed: str
    per_token: Callable[[ModelConfig], float] = megatron_flops
    """What the source counts for a token."""

    def predicted(self, folder: Path) -> tuple[float, str]:
        """What is published as predicted, and what takes the most time."""
        path = folder / "published.yaml"
        path.write_text(CONFIG)
        config = load_config(path, self.overrides)
        plan = resolve_plan(config, self.devices)
        is_pipeline = plan.division.ranks > 1
        if is_pipeline:
            step = simulate(config, plan, micro_batches=4)
        else:
            step = simulate_blocks(config, plan)
        rate = step.tokens_per_second / self.devices * self.per_token(config.model)
        return rate, f"{step.seconds:.1f} s a step, bubble {step.bubble:.0%}, limit {step.limit}"


def gpt(layers: int, hidden: int, heads: int) -> tuple[str, ...]:
    """A GPT of GPT-3's shape with sequences of 2,048."""
    shape = {"layers": layers, "hidden": hidden, "heads": heads}
    shape |= {"sequence_length": 2048, "vocab_size": 51200}
    return tuple(f"model.{key}={value}" for key, value in shape.items())


def pipeline(tensor: int, stages: int, micro_batch: int, batch: int) -> tuple[str, ...]:
    """Megatron-DeepSpeed's layout: a 1F1B pipeline, no exchange that overlaps, ZeRO-1."""
    return (
        f"parallel.tensor={tensor}",
        f"parallel.pipeline={stages}",
        f"train.micro_batch={micro_batch}",
        f"train.global_batch={batch}",
        "partition.strategy=zero1",
        "partition.overlap=none",
    )


LLAMA_8B = (
    "model.layers=32",
    "model.hidden=4096",
    "model.heads=32",
    "model.kv_heads=8",
    "model.ffn_hidden=14336",
    "model.sequence_length=8192",
    "model.vocab_size=128256",
    "model.tie_embeddings=false",
    "model.norm=layernorm",
    "model.activation=swiglu",
    "model.position=rotary",
    "model.bias=false",
)
LUMI_RATES = {16: 67.0, 32: 64.3, 64: 59.6, 128: 52.9, 256: 40.3}
GPT_175B = gpt(96, 12288, 96)
LUMI_LAYOUT = (
    *gpt(70, 14336, 112),
    *pipeline(8, 8, 2, 1024),
    "partition.strategy=ddp",
    "partition.wires.reduce={pair: fp32, node: fp32, world: fp32}",
)
TORCHTITAN_H100 = (
    "machine=nvlink8-cluster",
    "partition.strategy=zero3",
    "train.micro_batch=2",
    "train.activation_checkpointing=selective",
    # HBM2e of 2.4 TB/s instead of 3.35, and 500 W instead of 700.
    "machine.device.memory_gigabytes_per_second=2000",
    "machine.device.matrix_tflops=400",
)
TORCHTITAN_RATES = {"": {8: 5762, 128: 5605}, ", compiled": {8: 6667, 128: 6514}}
MPT = (
    "machine=nvlink8-cluster",
    "partition.strategy=zero3",
    "model.vocab_size=50368",
    "model.position=rotary",
    "model.bias=false",
    "train.activation_checkpointing=none",
)
ROWS = (
    Row(
        "8B, FSDP2",
        64,
        77,
        (*LLAMA_8B, "train.micro_batch=1", "train.global_batch=64", "partition.strategy=zero3",
         "train.activation_checkpointing=selective"),
        "1 sequence of 8,192 a GCD, selective checkpointing, not compiled",
        torchtitan_flops,
    ),
    Row(
        "8B, TP8 × FSDP32 × DDP20",
        5120,
        35,
        (*LLAMA_8B, "parallel.tensor=8", "partition.overlap=none",
         "train.micro_batch=21", "train.global_batch=13440",
         "machine.levels.world.size=32", "machine.levels.world.gigabytes_per_second=1.25",
         "machine.levels.all={gigabytes_per_second: 0.71, slows_compute: 0.16}",
         "partition.weights=world", "partition.gradients=world", "partition.optimizer=world"),
        "21 sequences of 8,192 for each 8 GCDs, blocks checkpointed, one NIC a node",
        torchtitan_flops,
    ),
    Row("22B, TP1 × PP8", 16, 73.5, (*gpt(48, 6144, 48), *pipeline(1, 8, 1, 640)),
        "batch 640 on 2 nodes"),
    Row("175B, TP4 × PP16", 128, 69.2, (*GPT_175B, *pipeline(4, 16, 1, 1280)),
        "batch 1,280 on 16 nodes"),
    Row("1T, TP8 × PP64", 1024, 61.2, (*gpt(128, 25600, 128), *pipeline(8, 64, 1, 3200)),
        "batch 3,200 on 128 nodes"),
    *(
        Row(f"LUMI 175B, {nodes} nodes", 8 * nodes, rate, LUMI_LAYOUT,
            "TP8 × PP8, batch 1,024, micro-batch 2, ZeRO-0, gradients sent in fp32")
        for nodes, rate in LUMI_RATES.items()
    ),
    *(
        Row(f"the same, {nodes} nodes", 8 * nodes, LUMI_RATES[nodes],
            (*LUMI_LAYOUT, "machine.levels.world.gigabytes_per_second=3.125"),
            "and RCCL reaches a quarter of the NICs")
        for nodes in (16, 128, 256)
    ),
    Row(
        "X-MoE 10B",
        8,
        52.5,
        ("model.layers=28", "model.hidden=2048", "model.heads=16", "model.sequence_length=2048",
         "model.vocab_size=50304", "model.position=rotary",
         "model.moe={experts: 64, active: 6, ffn_hidden: 1408, balance: loss}", "parallel.expert=8",
         "train.micro_batch=4", "train.global_batch=256", "train.activation_checkpointing=none",
         "partition.strategy=zero1", "partition.overlap=none"),
        "64 experts, 6 active, over a node; micro-batch 4, batch 256, ZeRO-1; 50 to 55 published",
        xmoe_flops,
    ),
    *(
        Row(f"8B on H100, {devices} GPUs{name}", devices, published,
            (*LLAMA_8B, *TORCHTITAN_H100, f"train.global_batch={2 * devices}"),
            "FSDP2, 2 sequences of 8,192 a GPU, selective checkpointing", tokens)
        for name, rates in TORCHTITAN_RATES.items()
        for devices, published in rates.items()
    ),
    *(
        Row(f"MPT-{size} on H100, {devices} GPUs", devices, published,
            (*shape, *MPT, f"train.micro_batch={batch}", f"train.global_batch={batch * devices}"),
            f"FSDP, {batch} sequences of 2,048 a GPU, nothing checkpointed", tokens)
        for size, shape, devices, batch, published in (
            ("7B", gpt(32, 4096, 32), 8, 6, 10643), ("13B", gpt(40, 5120, 40), 64, 2, 4800))
    ),
)  # fmt: skip


def main(names: Sequence[str]) -> None:
    """Print the table."""
    print("| run | devices | assumed | published | predicted | error | |")
    print("|---|---:|---|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if names and not any(name in row.name for name in names):
                continue
            rate, why = row.predicted(Path(folder))
            digits = 0 if row.per_token is tokens else 1
            error = f"{100 * (rate / row.published - 1):+.0f} %"
            print(f"| {row.name} | {row.devices:,} | {row.assumed} | {row.published:,g} | "
                  f"{rate:,.{digits}f} | {error} | {why} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    main(parser.parse_args().names)
