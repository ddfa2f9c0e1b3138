"""Single parts of a training step beside what they replace: time and memory.

    python -m scripts.benchmarks.one_device.parts OUT [--groups loss documents …] [--rounds 5]

Each variant runs in a process of its own, in turns, forward and backward together:

* loss: the output projection with the cross-entropy, a chunk of tokens at a time, and with all
  logits at once;
* documents: attention that is told where documents begin, with a dense mask, and causal over the
  whole row, at several lengths of documents;
* checkpointing: a whole training step with each `train.activation_checkpointing`, plain and
  compiled; `auto` with a budget at 35 % and at 75 % of the way from `block` to `none`. The
  planner's libraries are then held before the part runs, so compare peaks by `plan`;
* start: building the model and the first step, with blocks that are not compiled, and compiled with
  the compiler's cache empty, and full;
* initial: drawing the initial values of the 1.3B model, with all cores and with one;
* adamw: torch's fused, torch's own loop, and apex's where it is installed;
* gate, rotary, product: see `pointwise`.

On a GPU in bf16 and at sizes that fill it, on a CPU in fp32. "Added" is the peak above what the
process held before the part ran: libraries and inputs, for checkpointing libraries alone.
"""

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from megafrontier.common.errors import UserError, exit_on_fatal_error
from megafrontier.model.flops import parameter_specs
from megafrontier.model.init import initial_slice
from megafrontier.model.kernels.varlen import document_attention
from megafrontier.model.loss import linear_cross_entropy
from megafrontier.model.positions import document_mask
from megafrontier.model.recompute.checkpointing import Mode
from megafrontier.optim.adamw import ShardedAdamW
from scripts.benchmarks.one_device import pointwise
from scripts.benchmarks.one_device.ours import ours
from scripts.benchmarks.one_device.pointwise import ON_GPU, random
from scripts.benchmarks.one_device.setting import Setting, make_setting, write_corpora
from scripts.benchmarks.shared.child import Unable, device, repeat
from scripts.benchmarks.shared.measuring import at_least, make_parser
from scripts.benchmarks.shared.rounds import (
    Results,
    Task,
    add_options,
    chosen,
    group_tables,
    measure,
)
from scripts.benchmarks.shared.tables import spread

MODULE = "scripts.benchmarks.one_device.parts"
WARM_UP, STEPS = (5, 30) if ON_GPU else (1, 3)


def loss(variant: str, tokens: int, hidden: int, vocab_size: int) -> dict[str, float]:
    """Hidden states [tokens, hidden] to the sum of the losses, and back."""
    states, weight = random(tokens, hidden), random(vocab_size, hidden)
    targets = torch.randint(vocab_size, (tokens,), device=device())

    def work() -> None:
        if variant == "chunked":
            total = linear_cross_entropy(
                states, weight, targets, vocab_size=vocab_size, chunk_tokens=1024
            )
        else:
            logits = F.linear(states, weight).float()
            total = F.cross_entropy(logits, targets, reduction="sum")
        total.backward()
        states.grad = weight.grad = None

    return repeat(work, WARM_UP, STEPS)


def attention(variant: str, length: int, row: int, heads: int, size: int) -> dict[str, float]:
    """One row of `row` tokens in documents of `length`, [row, heads, size], and back."""
    # Once small: what the first call imports is no memory of the part.
    _attend(variant, 8, 16, *(random(16, heads, size) for _ in range(3)))()
    return repeat(
        _attend(variant, length, row, *(random(row, heads, size) for _ in range(3))), WARM_UP, STEPS
    )


def _attend(
    variant: str, length: int, row: int, query: Tensor, key: Tensor, value: Tensor
) -> Callable[[], None]:
    starts = torch.arange(0, row + 1, length, dtype=torch.int32, device=device())
    mask = document_mask(starts, 1, row) if variant == "dense mask" else None

    def work() -> None:
        if variant == "starts":
            mixed = document_attention(query, key, value, starts, row)
        else:
            heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            mixed = F.scaled_dot_product_attention(
                *heads_first, attn_mask=mask, is_causal=mask is None
            )
        mixed.sum().backward()
        query.grad = key.grad = value.grad = None

    return work


def adamw(fused: str, elements: int) -> dict[str, float]:
    """One update of a flat fp32 shard of so many parameters, two thirds of them decayed."""
    master, gradient = (torch.randn(elements, device=device()) for _ in range(2))
    cut = 2 * elements // 3
    groups = [
        {"params": [(0, where)], "weight_decay": decay, "lr_scale": 1.0}
        for where, decay in ((slice(0, cut), 0.1), (slice(cut, None), 0.0))
    ]
    try:
        optimizer = ShardedAdamW([master], groups, fused)
    except UserError as error:
        raise Unable(str(error)) from error
    one, no = torch.ones((), device=device()), torch.zeros((), device=device())
    return repeat(lambda: optimizer.step([gradient], 1e-4, one, no), WARM_UP, STEPS)


def start(setting: dict[str, Any], compiled: bool, cached: bool = False) -> dict[str, float]:
    """To the end of the first step; with `cached` another process has made it before."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        if cached:
            before = get_context("spawn").Process(target=ours, args=(setting, compiled))
            before.start()
            before.join()
            if before.exitcode:
                raise RuntimeError(f"the process that fills the cache failed: {before.exitcode}")
        figures = ours(setting, compiled)
    return figures | {"step_seconds": figures["warm_up_seconds"]}


def initial(cores: int) -> dict[str, float]:
    """The initial values of the 1.3B model, one parameter after another, with 0: all cores."""
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
        torch.set_num_threads(cores)
    setting = Setting("1.3B", "bf16", 1, 2048, 0, 0, "no corpus")
    specs = parameter_specs(setting.model)

    def draw() -> None:
        for spec in specs.values():
            initial_slice(1, spec, 0, prod(spec.shape))

    return repeat(draw, 1, 1)


def simple_tasks() -> list[Task]:
    """Parts without a training step, at sizes that fill the device."""
    tokens, hidden = (16384, 2048) if ON_GPU else (4096, 256)
    sizes = {"tokens": tokens, "hidden": hidden, "vocab_size": 32000}
    row, heads, size = (8192, 16, 128) if ON_GPU else (2048, 4, 64)
    elements = 350_000_000 if ON_GPU else 10_000_000
    groups: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
        f"loss: {tokens} tokens, {hidden} wide, 32000 ids": (
            "loss",
            {
                "1024 tokens at a time (ours)": {"variant": "chunked", **sizes},
                "all logits": {"variant": "plain", **sizes},
            },
        ),
        "initial values of 1.3B": (
            "initial",
            {"all cores": {"cores": 0}, "one core": {"cores": 1}},
        ),
        f"adamw: {elements // 1_000_000}M parameters": (
            "adamw",
            {
                "torch, fused": {"fused": "torch", "elements": elements},
                "torch, not fused": {"fused": "none", "elements": elements},
                "apex": {"fused": "apex", "elements": elements},
            },
        ),
    }
    variants = {"starts (ours)": "starts", "dense mask": "dense mask", "whole row": "causal"}
    for length in (128, 512, row):  # from many short documents to one that fills the row
        shape = {"length": length, "row": row, "heads": heads, "size": size}
        rows = {name: {"variant": variant, **shape} for name, variant in variants.items()}
        groups[f"documents of {length} in {row} tokens"] = "attention", rows
    return [
        Task(group, name, f"{MODULE}:{function}", options)
        for group, (function, rows) in groups.items()
        for name, options in rows.items()
    ]


def step_tasks(out: Path, rows: int) -> list[Task]:
    """Whole steps of one preset, with long enough rows for activations to matter, and first
    steps."""
    preset, precision, length = ("350M", "bf16", 2048) if ON_GPU else ("10M", "fp32", 256)
    make = partial(make_setting, out, preset, precision, sequence_length=length)
    setting, first = make(WARM_UP, STEPS, batch=rows), make(1, 1, batch=16)
    modes = [mode for mode in get_args(Mode) if ON_GPU or mode != "offload"]  # on a CPU it is block
    variants: dict[str, dict[str, Any]] = {mode: {"checkpointing": mode} for mode in modes}
    variants |= {f"auto at {share:.0%}": {"share": share} for share in (0.35, 0.75)}
    tasks = []
    for compiled in (False, True):
        group = f"checkpointing{', compiled' * compiled}: {_named(setting)}"
        for name, options in variants.items():
            arguments = {"setting": asdict(setting), "compiled": compiled, **options}
            tasks.append(Task(group, name, "scripts.benchmarks.one_device.ours:ours", arguments))
    starts = {
        "not compiled": {"compiled": False},
        "compiled, cache empty": {"compiled": True},
        "compiled, cache full": {"compiled": True, "cached": True},
    }
    for name, options in starts.items():
        arguments = {"setting": asdict(first), **options}
        tasks.append(Task(f"start: {_named(first)}", name, f"{MODULE}:start", arguments))
    return tasks


def _named(setting: Setting) -> str:
    return f"{setting.preset}, {setting.batch} × {setting.sequence_length} tokens"


def table(results: Results) -> str:
    """A table for each group, times over the first row's."""
    head = ["", "ms", "time over the first's", "CPU ms", "added MiB"]

    def cells(group: str, name: str) -> list[str]:
        seconds, peaks, baselines, cpu = (
            results.values(group, name, figure)
            for figure in ("step_seconds", "peak_bytes", "idle_bytes", "cpu_seconds")
        )
        first = results.values(group, results.variants(group)[0], "step_seconds")
        added = [(peak - held) / 2**20 for peak, held in zip(peaks, baselines, strict=True)]
        return [
            spread([1e3 * value for value in seconds], ",.2f"),
            f"{statistics.median(seconds) / statistics.median(first):.2f}" if first else "",
            spread([1e3 * value for value in cpu], ",.0f"),
            spread(added),
        ]

    return group_tables(results, head, cells)


def main() -> None:
    """Measure, and print the tables."""
    parser = make_parser(__doc__)
    add_options(parser)
    parser.add_argument(
        "--rows", type=at_least(1), default=16, help="sequences of a step, for checkpointing"
    )
    arguments = parser.parse_args()
    steps = step_tasks(arguments.out, arguments.rows)
    tasks = [*simple_tasks(), *steps, *pointwise.tasks()]
    with exit_on_fatal_error("parts"):
        wanted = chosen(tasks, arguments)
    settings = [task.arguments["setting"] for task in wanted if "setting" in task.arguments]
    write_corpora(Setting(**each) for each in settings)
    measure(tasks, arguments, table)


if __name__ == "__main__":
    main()
