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
* norm: RMSNorm as torch has it, compiled, and apex's where it is installed;
* adamw: torch's fused, torch's own loop, and apex's where it is installed;
* gate, rotary, product: see `pointwise`.

On a GPU in bf16 and at sizes that fill it, on a CPU in fp32. "Added" is the peak above what the
process held before the part ran: libraries and inputs, for checkpointing libraries alone.
"""

import argparse
import importlib
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
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
from scripts.benchmarks.one_device.setting import PRESETS, Setting, write_corpus
from scripts.benchmarks.shared.child import Unable, device, repeat
from scripts.benchmarks.shared.measuring import at_least
from scripts.benchmarks.shared.rounds import Results, Task, add_options, chosen, measure
from scripts.benchmarks.shared.tables import markdown, spread

MODULE = "scripts.benchmarks.one_device.parts"

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
WARM_UP, STEPS = (5, 30) if ON_GPU else (1, 3)


def random(*shape: int) -> Tensor:
    """Values of the type and device that are measured, with a gradient."""
    return torch.randn(shape, device=device(), dtype=DTYPE, requires_grad=True)


def loss(variant: str, tokens: int, hidden: int, vocab_size: int) -> dict[str, float]:
    """Hidden states [tokens, hidden] to the sum of the losses, and back."""
    states, weight = random(tokens, hidden), random(vocab_size, hidden)
    targets = torch.randint(vocab_size, (tokens,), device=device())
    all_at_once = torch.compile(_all_logits) if variant == "compiled" else _all_logits

    def work() -> None:
        if variant == "chunked":
            total = linear_cross_entropy(
                states, weight, targets, vocab_size=vocab_size, chunk_tokens=1024
            )
        else:
            total = all_at_once(states, weight, targets)
        total.backward()
        states.grad = weight.grad = None

    return repeat(work, WARM_UP, STEPS)


def _all_logits(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(states, weight).float(), targets, reduction="sum")


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


def norm(variant: str, tokens: int, hidden: int) -> dict[str, float]:
    """RMSNorm of hidden states [tokens, hidden], and back."""
    states, weight = random(tokens, hidden), random(hidden)
    grown = torch.randn_like(states)
    compute = {
        "torch": lambda: F.rms_norm,
        "compiled": lambda: torch.compile(F.rms_norm),
        "apex": _apex_rms_norm,
    }[variant]()

    def work() -> None:
        compute(states, (hidden,), weight, 1e-5).backward(grown)
        states.grad = weight.grad = None

    return repeat(work, WARM_UP, STEPS)


def _apex_rms_norm() -> Callable[..., Tensor]:
    try:
        fused = importlib.import_module("apex.normalization.fused_layer_norm")
    except ImportError as error:
        raise Unable(f"apex: {error}") from error
    if not ON_GPU:
        raise Unable("apex needs an accelerator")

    def rms_norm(states: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
        return fused.fused_rms_norm_affine(states, weight, shape, eps)

    return rms_norm


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


def loss_tasks() -> list[Task]:
    """Llama's head at the width of 1.3B on a GPU, narrower on a CPU."""
    sizes = {"tokens": 16384 if ON_GPU else 4096, "hidden": 2048 if ON_GPU else 256}
    sizes["vocab_size"] = 32000
    group = f"loss: {sizes['tokens']} tokens, {sizes['hidden']} wide, 32000 ids"
    variants = {
        "1024 tokens at a time (ours)": "chunked",
        "all logits": "plain",
        "all logits, compiled": "compiled",
    }
    return [
        Task(group, name, f"{MODULE}:loss", {"variant": variant, **sizes})
        for name, variant in variants.items()
    ]


def document_tasks() -> list[Task]:
    """From many short documents to one that fills the row."""
    sizes = {"row": 8192, "heads": 16, "size": 128} if ON_GPU else {"row": 2048, "heads": 4}
    sizes.setdefault("size", 64)
    variants = {"starts (ours)": "starts", "dense mask": "dense mask", "whole row": "causal"}
    return [
        Task(
            f"documents of {length} in {sizes['row']} tokens",
            name,
            f"{MODULE}:attention",
            {"variant": variant, "length": length, **sizes},
        )
        for length in (128, 512, sizes["row"])
        for name, variant in variants.items()
    ]


def checkpointing_tasks(out: Path, rows: int) -> list[Task]:
    """Whole steps of one preset, with long enough rows for activations to matter."""
    setting = replace(_setting(out, WARM_UP, STEPS), batch=rows)
    modes = [mode for mode in get_args(Mode) if ON_GPU or mode != "offload"]  # on a CPU it is block
    variants: dict[str, dict[str, Any]] = {mode: {"checkpointing": mode} for mode in modes}
    variants |= {f"auto at {share:.0%}": {"share": share} for share in (0.35, 0.75)}
    return [
        Task(
            f"checkpointing{', compiled' * compiled}: {_named(setting)}",
            name,
            "scripts.benchmarks.one_device.ours:ours",
            {"setting": asdict(setting), "compiled": compiled, **options},
        )
        for compiled in (False, True)
        for name, options in variants.items()
    ]


def start_tasks(out: Path) -> list[Task]:
    """First steps of the same."""
    setting = _setting(out, 1, 1)
    variants: dict[str, dict[str, bool]] = {
        "not compiled": {"compiled": False},
        "compiled, cache empty": {"compiled": True},
        "compiled, cache full": {"compiled": True, "cached": True},
    }
    return [
        Task(
            f"start: {_named(setting)}",
            name,
            f"{MODULE}:start",
            {"setting": asdict(setting), **options},
        )
        for name, options in variants.items()
    ]


def initial_tasks() -> list[Task]:
    """With threads and without."""
    counts = {"all cores": 0, "one core": 1}
    return [
        Task("initial values of 1.3B", name, f"{MODULE}:initial", {"cores": cores})
        for name, cores in counts.items()
    ]


def _setting(out: Path, warm_up: int, steps: int) -> Setting:
    preset, precision = ("350M", "bf16") if ON_GPU else ("10M", "fp32")
    corpus = (out / f"corpus-{PRESETS[preset].vocab_size}").resolve()
    rows, length = (16, 2048) if ON_GPU else (16, 256)
    return Setting(preset, precision, rows, length, warm_up, steps, str(corpus))


def _named(setting: Setting) -> str:
    return f"{setting.preset}, {setting.batch} × {setting.sequence_length} tokens"


def norm_tasks() -> list[Task]:
    """A micro-batch of 1.3B's width on a GPU, of 10M's on a CPU."""
    sizes = {"tokens": 16384, "hidden": 2048} if ON_GPU else {"tokens": 4096, "hidden": 320}
    return [
        Task(
            f"norm: {sizes['tokens']} tokens of width {sizes['hidden']}",
            name,
            f"{MODULE}:norm",
            {"variant": name, **sizes},
        )
        for name in ("torch", "compiled", "apex")
    ]


def adamw_tasks() -> list[Task]:
    """A shard of many parameters."""
    elements = 350_000_000 if ON_GPU else 10_000_000
    names = {"torch": "torch, fused", "none": "torch, not fused", "apex": "apex"}
    return [
        Task(
            f"adamw: {elements // 1_000_000}M parameters",
            name,
            f"{MODULE}:adamw",
            {"fused": fused, "elements": elements},
        )
        for fused, name in names.items()
    ]


def table(results: Results) -> str:
    """A table for each group, times over the first row's."""
    return "\n\n".join(_group_table(results, group) for group in results.groups())


def _group_table(results: Results, group: str) -> str:
    head = ["", "ms", "time over the first's", "CPU ms", "added MiB"]
    rows = [_row(results, group, name) for name in results.variants(group)]
    return f"## {group}\n\n{markdown(head, rows)}"


def _row(results: Results, group: str, name: str) -> list[str]:
    skipped = results.skipped(group, name)
    if skipped:
        return [name, skipped, "", "", ""]
    seconds = results.values(group, name, "step_seconds")
    first = results.values(group, results.variants(group)[0], "step_seconds")
    peaks, baselines = (results.values(group, name, f"{which}_bytes") for which in ("peak", "idle"))
    added = [(peak - before) / 2**20 for peak, before in zip(peaks, baselines, strict=True)]
    return [
        name,
        spread([1e3 * value for value in seconds], ",.2f"),
        f"{statistics.median(seconds) / statistics.median(first):.2f}" if first else "",
        spread([1e3 * value for value in results.values(group, name, "cpu_seconds")], ",.0f"),
        spread(added),
    ]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--rows", type=at_least(1), default=16, help="sequences of a step, for checkpointing"
    )
    arguments = parser.parse_args()
    tasks = [
        *loss_tasks(),
        *document_tasks(),
        *checkpointing_tasks(arguments.out, arguments.rows),
        *start_tasks(arguments.out),
        *initial_tasks(),
        *norm_tasks(),
        *adamw_tasks(),
        *pointwise.tasks(),
    ]
    with exit_on_fatal_error("parts"):
        wanted = chosen(tasks, arguments)
    for task in wanted:
        if "setting" in task.arguments:
            setting = Setting(**task.arguments["setting"])
            write_corpus(Path(setting.corpus), setting.model.vocab_size)
    measure(tasks, arguments, table)


if __name__ == "__main__":
    main()
