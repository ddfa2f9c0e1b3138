"""A hybrid of gated delta and softmax attention (3 : 1) beside softmax attention alone, as large in
parameters: the loss on text, and how often the value of a key far back is recalled.

    python -m scripts.benchmarks.hybrid.quality [--tasks text recall] [--steps 700]
        [--seeds 1 2] [--noise 32] [--jobs 2]

Text: Python's own library as bytes, every 20th file for validation. Recall: a row has pairs of a
key and a value, noise, and then random ones of the keys, each before its value, which is the
target. A key may be asked for again, so that no value is known because the others are. Both models
see the same batches. Each training is one process with one thread.
"""

import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megafrontier.config import AttentionConfig, DeltaConfig, ModelConfig, OptimizerConfig
from megafrontier.model.flops import parameter_count
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.loss import IGNORE_INDEX
from scripts.benchmarks.scaling.coordinate_check import make_adamw
from scripts.benchmarks.shared.measuring import at_least, describe_cpu, listed, make_parser
from scripts.benchmarks.shared.tables import markdown

LENGTH, TESTED = 96, 256
ROWS = {"text": 16, "recall": 64}
PAIRS, KEYS, ASKED = 4, 8, 8
"""Pairs of a row, keys in all (there are as many values), and how often a key is asked for."""
RATE, WARMUP = 3e-3, 100
SOFTMAX = ModelConfig(
    layers=4,
    hidden=64,
    heads=4,
    sequence_length=LENGTH,
    vocab_size=256,
    norm="rmsnorm",
    activation="swiglu",
    position="rotary",
    bias=False,
    init_std=0.06,
)
DELTA = DeltaConfig(key_heads=2, value_heads=4, key_size=16, value_size=16)
HYBRID = replace(SOFTMAX, attention=AttentionConfig(pattern=["delta"] * 3 + ["full"], delta=DELTA))
MODELS = {"softmax": SOFTMAX, "hybrid": HYBRID}
Batch = tuple[Tensor, Tensor]
"""Tokens and targets [rows, LENGTH]."""


class Result(NamedTuple):
    """Of a training: the loss in nats for each target of the validation, and the share of those
    that are most likely."""

    loss: float
    right: float


def text_rows(part: str, generator: torch.Generator, rows: int) -> Batch:
    """Random pieces of the library's files one after the other."""
    text = library()[part]
    starts = torch.randint(len(text) - LENGTH, (rows, 1), generator=generator)
    whole = text[starts + torch.arange(LENGTH + 1)].long()
    return whole[:, :-1], whole[:, 1:]


@cache
def library() -> dict[str, Tensor]:
    """The bytes of Python's own library: for training, and every 20th file for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
    parts = {"train": [f for i, f in enumerate(files) if i % 20], "valid": files[::20]}
    return {
        name: torch.from_numpy(np.frombuffer(b"".join(f.read_bytes() for f in of), np.uint8).copy())
        for name, of in parts.items()
    }


def recall_rows(count: int, part: str, generator: torch.Generator, rows: int) -> Batch:
    """Pairs, `count` tokens of noise, and then random ones of the pairs."""
    keys = torch.rand(rows, KEYS, generator=generator).argsort(1)[:, :PAIRS]
    values = KEYS + torch.randint(KEYS, (rows, PAIRS), generator=generator)
    pairs = torch.stack([keys, values], -1)
    chosen = torch.randint(PAIRS, (rows, ASKED), generator=generator)
    asked = pairs.gather(1, chosen[..., None].expand(-1, -1, 2))
    noise = torch.randint(2 * KEYS, 256, (rows, count), generator=generator)
    tokens = torch.cat([pairs.flatten(1), noise, asked.flatten(1)], 1)
    targets = torch.full_like(tokens, IGNORE_INDEX)
    targets[:, -2 * ASKED :: 2] = asked[..., 1]
    return tokens, targets


TASKS = ("text", "recall")


def train(steps: int, noise: int, run: tuple[str, str, int]) -> Result:
    """Train the model of (task, attention, seed), and evaluate it on rows of the validation."""
    torch.set_num_threads(1)
    task, attention, seed = run
    rows = text_rows if task == "text" else partial(recall_rows, noise)
    config = MODELS[attention]
    model = GPT(config)
    initialise(model, seed)
    optimizer = make_adamw(model, OptimizerConfig(lr=RATE))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=WARMUP / steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens, targets = rows("train", generator, ROWS[task])
        (model(tokens, targets) / (targets != IGNORE_INDEX).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return evaluate(model.eval(), *rows("valid", torch.Generator().manual_seed(0), TESTED))


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor, targets: Tensor) -> Result:
    """The loss and the right answers of some rows."""
    counted = targets != IGNORE_INDEX
    logits, expected = model(tokens)[counted], targets[counted]
    loss = torch.nn.functional.cross_entropy(logits, expected).item()
    return Result(loss, (logits.argmax(-1) == expected).float().mean().item())


def lines(found: dict[tuple[str, str, int], Result]) -> Iterator[list[str]]:
    """Of each task and seed: both losses, how much the hybrid's is above, and both shares."""
    for task, seed in dict.fromkeys((task, seed) for task, _, seed in found):
        softmax, hybrid = (found[task, name, seed] for name in MODELS)
        yield [
            f"{task}, seed {seed}",
            f"{softmax.loss:.4f}",
            f"{hybrid.loss:.4f}",
            f"{hybrid.loss / softmax.loss - 1:+.2%}",
            f"{softmax.right:.1%}",
            f"{hybrid.right:.1%}",
        ]


def main() -> None:
    """Train all models, and print a table."""
    parser = make_parser(__doc__, "quality")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=at_least(WARMUP + 1), default=700)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    most = LENGTH - 2 * PAIRS - 2 * ASKED
    parser.add_argument(
        "--noise", type=int, choices=range(most + 1), metavar=f"0..{most}", default=32
    )
    parser.add_argument("--jobs", type=at_least(1), default=2)
    options = parser.parse_args()
    runs = [*product(options.tasks, MODELS, options.seeds)]
    work = partial(train, options.steps, options.noise)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        found = {}
        for run, result in zip(runs, pool.map(work, runs), strict=True):
            found[run] = result
            print(*run, *(f"{name} {value:.4f}" for name, value in result._asdict().items()))
    counts = ", ".join(f"{name} {parameter_count(of):,}" for name, of in MODELS.items())
    print(f"\nparameters: {counts}; {listed(describe_cpu())}\n")
    head = ["", "softmax", "hybrid", "difference", "right: softmax", "hybrid"]
    print(markdown(head, lines(found)))


if __name__ == "__main__":
    main()
