"""Training on one device: this framework beside what a user would take instead.

    python -m scripts.benchmarks.one_device OUT [--presets 1.3B] [--precision bf16] [--rounds 5]
        [--minutes N] [--packages DIR]

The same GPT in Llama's style, batch, sequence length and precision for each contender, on the same
random ids; each in a process of its own, in turns. Without options: 1.3B at 2048 tokens in bf16 on
a GPU, 10M in fp32 and bf16 on a CPU; 1M is for trying the script. MFU is against the rate of a
large matrix product of the same type, measured in each round beside the others; that of the row in
fp8 is against the one in bf16. What fp8 saves, on a GPU that has it:

    python -m scripts.benchmarks.one_device OUT --presets 1.3B 7B-block \\
        --variants "ours, compiled" product

With --minutes a long comparison ends early, and the same command goes on. accelerate (which
transformers' Trainer needs), litgpt and torchtitan are looked for in DIR, made without another
torch by

    pip install --no-deps --target DIR -r scripts/benchmarks/one_device/packages.txt
"""

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path

import torch

from megafrontier.model.flops import flops_per_token, parameter_count
from scripts.benchmarks.one_device.setting import PRESETS, Setting, write_corpus
from scripts.benchmarks.shared.measuring import at_least
from scripts.benchmarks.shared.rounds import Results, Task, add_options, measure
from scripts.benchmarks.shared.tables import gib, markdown, middle_of, spread

FOLDER = "scripts.benchmarks.one_device"

RATE = "matrix product"
CONTENDERS = {
    "ours, compiled": (f"{FOLDER}.ours:ours", {"compiled": True}),
    "ours, compiled, fp8": (
        f"{FOLDER}.ours:ours",
        {"compiled": True, "linear_precision": "fp8"},
    ),
    "ours, compiled, update under the forward": (
        f"{FOLDER}.ours:ours",
        {"compiled": True, "overlap_update": True},
    ),
    "ours, compiled, CUDA graphs": (
        f"{FOLDER}.ours:ours",
        {"compiled": True, "cuda_graphs": True},
    ),
    "ours, eager": (f"{FOLDER}.ours:ours", {"compiled": False}),
    "plain PyTorch, compiled": (
        f"{FOLDER}.trainer_contender:plain",
        {"compiled": True},
    ),
    "plain PyTorch, eager": (
        f"{FOLDER}.trainer_contender:plain",
        {"compiled": False},
    ),
    "plain PyTorch, compiled, no masters": (
        f"{FOLDER}.trainer_contender:plain",
        {"compiled": True, "masters": False},
    ),
    "transformers Trainer, compiled": (
        f"{FOLDER}.trainer_contender:hugging_face",
        {"compiled": True},
    ),
    "transformers Trainer, eager": (
        f"{FOLDER}.trainer_contender:hugging_face",
        {"compiled": False},
    ),
    "litgpt, compiled": (f"{FOLDER}.litgpt_contender:litgpt", {}),
    "torchtitan, compiled": (f"{FOLDER}.torchtitan_contender:torchtitan", {}),
}


def tasks_of(setting: Setting) -> list[Task]:
    """All contenders at one setting, and the machine's rate."""
    group = (
        f"{setting.preset}, {setting.precision}, {setting.batch} × {setting.sequence_length} tokens"
    )
    tasks = [
        Task(
            group,
            RATE,
            f"{FOLDER}.ours:matrix_rate",
            {"precision": setting.precision},
        )
    ]
    for name, (function, options) in CONTENDERS.items():
        is_mixed = "no masters" in name or "fp8" in name
        if setting.mixed or not is_mixed:
            tasks.append(Task(group, name, function, {"setting": asdict(setting), **options}))
    return tasks


def table(results: Results) -> str:
    """A table for each setting."""
    return "\n\n".join(_group_table(results, group) for group in results.groups())


def _group_table(results: Results, group: str) -> str:
    rates = results.values(group, RATE, "flops_per_second")
    rate = statistics.median(rates) if rates else 0.0
    title = (
        f"## {group}\n\nA large matrix product: {spread([r / 1e12 for r in rates], '.3g')} TFLOP/s"
    )
    head = ["contender", "tokens/s", "over ours in the same round", "MFU", "peak GiB"]
    head += ["before the model", "warm-up s", "loss"]
    rows = [_row(results, group, name, rate) for name in results.variants(group) if name != RATE]
    return f"{title}.\n\n{markdown(head, rows)}"


def _row(results: Results, group: str, name: str, rate: float) -> list[str]:
    skipped = results.skipped(group, name)
    if skipped:
        return [name, skipped, *[""] * 6]
    setting = _setting_of(results, group)
    speeds = _speeds(results, group, name, setting.tokens)
    middle = statistics.median(speeds)
    flops = middle * flops_per_token(setting.model)
    return [
        name,
        spread(speeds),
        spread(results.ratios(group, "ours, compiled", name, "step_seconds"), ".3f"),
        f"{flops / rate:.1%}" if rate else "",
        gib(results.values(group, name, "peak_bytes")),
        gib(results.values(group, name, "idle_bytes")),
        middle_of(results.values(group, name, "warm_up_seconds"), ".0f"),
        middle_of(results.values(group, name, "loss"), ".3f"),
    ]


def _speeds(results: Results, group: str, name: str, tokens: int) -> list[float]:
    return [tokens / seconds for seconds in results.values(group, name, "step_seconds")]


def _setting_of(results: Results, group: str) -> Setting:
    found = (t.arguments for t in results.turns if t.group == group and "setting" in t.arguments)
    return Setting(**next(found)["setting"])


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """What to compare at; on a GPU and on a CPU other sizes keep the device busy."""
    on_gpu = torch.cuda.is_available()
    presets = arguments.presets or (["1.3B"] if on_gpu else ["10M"])
    precisions = arguments.precision or (["bf16"] if on_gpu else ["fp32", "bf16"])
    steps = arguments.steps or (20 if on_gpu else 8)
    return [
        Setting(
            name,
            precision,
            arguments.batch or PRESETS[name].batch,
            arguments.sequence_length or PRESETS[name].sequence_length,
            arguments.warm_up,
            steps,
            str((arguments.out / f"corpus-{PRESETS[name].vocab_size}").resolve()),
        )
        for name in presets
        for precision in precisions
    ]


def main() -> None:
    """Compare, and print the tables."""
    parser = argparse.ArgumentParser(
        prog="one_device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--presets", nargs="+", choices=PRESETS)
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"])
    parser.add_argument("--batch", type=at_least(1), help="sequences of a step")
    parser.add_argument("--sequence-length", type=at_least(1), help="tokens of a sequence")
    parser.add_argument("--warm-up", type=at_least(1), default=3, help="steps that are not timed")
    parser.add_argument("--steps", type=at_least(1), help="steps that are timed in a turn")
    arguments = parser.parse_args()
    wanted = settings(arguments)
    for setting in wanted:
        write_corpus(Path(setting.corpus), setting.model.vocab_size)
        print(f"{setting.preset}: {parameter_count(setting.model) / 1e6:.1f}M parameters")
    tasks = [task for setting in wanted for task in tasks_of(setting)]
    measure(tasks, arguments, table)


if __name__ == "__main__":
    main()
