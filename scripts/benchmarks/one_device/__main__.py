"""Training on one device: this framework beside what a user would take instead.

    python -m scripts.benchmarks.one_device OUT [--presets 1.3B] [--precision bf16] [--rounds 5]
        [--minutes N] [--packages DIR]

The same GPT in Llama's style, batch, sequence length and precision for each contender, on the same
random ids; each in a process of its own, in turns. Without options: 1.3B at 2048 tokens in bf16 on
a GPU, 10M in fp32 and bf16 on a CPU; 1M is for trying the script. MFU is against the rate of a
large matrix product of the same type, measured in each round beside the others; that of the row in
fp8 is against the one in bf16. What fp8 saves, on a GPU that has it:

    python -m scripts.benchmarks.one_device OUT --presets 1.3B 7B-block \\
        --variants "ours, compiled" fp8 product

With --minutes a long comparison ends early, and the same command goes on. litgpt and torchtitan are
looked for in DIR, made without another torch by

    pip install --no-deps --target DIR -r scripts/benchmarks/one_device/packages.txt
"""

import argparse
import statistics
from dataclasses import asdict
from typing import Any

import torch

from megafrontier.model.flops import flops_per_token, parameter_count
from scripts.benchmarks.one_device.setting import PRESETS, Setting, make_setting, write_corpora
from scripts.benchmarks.shared.measuring import at_least, make_parser
from scripts.benchmarks.shared.rounds import Results, Task, add_options, group_tables, measure
from scripts.benchmarks.shared.tables import gib, middle_of, spread

FOLDER = "scripts.benchmarks.one_device"
OURS, PLAIN = f"{FOLDER}.ours:ours", f"{FOLDER}.plain_contender:plain"
BASE, RATE = "ours, compiled", "matrix product"
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    BASE: (OURS, {"compiled": True}),
    "ours, compiled, fp8": (OURS, {"compiled": True, "linear_precision": "fp8"}),
    "ours, compiled, update under the forward": (OURS, {"compiled": True, "overlap_update": True}),
    "ours, compiled, CUDA graphs": (OURS, {"compiled": True, "cuda_graphs": True}),
    "ours, eager": (OURS, {"compiled": False}),
    "plain PyTorch, compiled": (PLAIN, {"compiled": True}),
    "plain PyTorch, eager": (PLAIN, {"compiled": False}),
    "plain PyTorch, compiled, no masters": (PLAIN, {"compiled": True, "masters": False}),
    "litgpt, compiled": (f"{FOLDER}.litgpt_contender:litgpt", {}),
    "torchtitan, compiled": (f"{FOLDER}.torchtitan_contender:torchtitan", {}),
}
HEAD = ["contender", "tokens/s", "over ours in the same round", "MFU", "peak GiB"]
HEAD += ["before the model", "warm-up s", "loss"]


def tasks_of(setting: Setting) -> list[Task]:
    """All contenders at one setting, and the machine's rate."""
    rate = {"precision": setting.precision}
    tasks = [Task(setting.group, RATE, f"{FOLDER}.ours:matrix_rate", rate)]
    for name, (function, options) in CONTENDERS.items():
        is_mixed = "no masters" in name or "fp8" in name
        if setting.mixed or not is_mixed:
            arguments = {"setting": asdict(setting), **options}
            tasks.append(Task(setting.group, name, function, arguments))
    return tasks


def table(results: Results) -> str:
    """A table for each setting."""

    def title(group: str) -> str:
        rates = [rate / 1e12 for rate in results.values(group, RATE, "flops_per_second")]
        return f"## {group}\n\nA large matrix product: {spread(rates, '.3g')} TFLOP/s."

    return group_tables(results, HEAD, lambda *row: _cells(results, *row), title, omit=RATE)


def _cells(results: Results, group: str, name: str) -> list[str]:
    turns = (t.arguments for t in results.turns if t.group == group and "setting" in t.arguments)
    setting = Setting(**next(turns)["setting"])
    rates = results.values(group, RATE, "flops_per_second")
    speeds = [setting.tokens / s for s in results.values(group, name, "step_seconds")]
    flops = statistics.median(speeds) * flops_per_token(setting.model)
    return [
        spread(speeds),
        spread(results.ratios(group, BASE, name, "step_seconds"), ".3f"),
        f"{flops / statistics.median(rates):.1%}" if rates else "",
        gib(results.values(group, name, "peak_bytes")),
        gib(results.values(group, name, "idle_bytes")),
        middle_of(results.values(group, name, "warm_up_seconds"), ".0f"),
        middle_of(results.values(group, name, "loss"), ".3f"),
    ]


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """What to compare at; on a GPU and on a CPU other sizes keep the device busy."""
    on_gpu = torch.cuda.is_available()
    presets = arguments.presets or (["1.3B"] if on_gpu else ["10M"])
    precisions = arguments.precision or (["bf16"] if on_gpu else ["fp32", "bf16"])
    steps = arguments.steps or (20 if on_gpu else 8)
    sizes = arguments.batch, arguments.sequence_length
    return [
        make_setting(arguments.out, name, precision, arguments.warm_up, steps, *sizes)
        for name in presets
        for precision in precisions
    ]


def main() -> None:
    """Compare, and print the tables."""
    parser = make_parser(__doc__, "one_device")
    add_options(parser)
    parser.add_argument("--presets", nargs="+", choices=PRESETS)
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"])
    parser.add_argument("--batch", type=at_least(1), help="sequences of a step")
    parser.add_argument("--sequence-length", type=at_least(1), help="tokens of a sequence")
    parser.add_argument("--warm-up", type=at_least(1), default=3, help="steps that are not timed")
    parser.add_argument("--steps", type=at_least(1), help="steps that are timed in a turn")
    arguments = parser.parse_args()
    wanted = settings(arguments)
    write_corpora(wanted)
    for setting in wanted:
        print(f"{setting.preset}: {parameter_count(setting.model) / 1e6:.1f}M parameters")
    measure([task for setting in wanted for task in tasks_of(setting)], arguments, table)


if __name__ == "__main__":
    main()
