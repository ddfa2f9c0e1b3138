"""Whether the best learning rate of a small model is the best of a large one, with and without
`model.scaling`.

    python -m scripts.benchmarks.scaling.rate_transfer [--steps N] [--json F] [CONFIG] [key=value …]

Trains models of about 1M and 12M parameters at several rates on one process: 3 times the width and
3 times the depth. A loss is the mean of the last 10 steps' training losses. The default CONFIG is
configs/quickstart.yaml, whose corpus scripts/quickstart.sh prepares.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

import torch

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import Config, load_config
from megafrontier.launch.context import join_machine
from megafrontier.model.flops import parameter_count
from megafrontier.training.loop import train_step
from megafrontier.training.trainer import build_trainer
from scripts.benchmarks.shared.measuring import at_least, in_a_folder

SMALL, LARGE = (128, 2), (384, 6)
"""Width and depth. The small model is the base model."""
RATES = {SMALL: (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), LARGE: (1e-3, 2e-3, 4e-3, 8e-3)}
SHAPE = "layers: {layers}, hidden: {hidden}, heads: {heads}, kv_heads: null, sequence_length: 64"
ALWAYS = (
    "machine=laptop",
    "train.global_batch=8",
    "train.micro_batch=8",
    "train.precision=fp32",
    "schedule={name: linear, min_lr: 0}",
    "partition={strategy: ddp, wires: exact}",
)
MEAN_OF = 10

Losses = dict[str, float]
"""By the rate."""


def resized(path: Path, size: tuple[int, int], scaled: bool, rate: float, *more: str) -> Config:
    """The configuration of one run."""
    hidden, layers = size
    shape = SHAPE.format(layers=layers, hidden=hidden, heads=hidden // 32)
    base = f"{{base_hidden: {SMALL[0]}, base_layers: {SMALL[1]}}}" if scaled else "null"
    model = f"model={{{shape}, scaling: {base}}}"
    return load_config(path, (*ALWAYS, model, f"optimizer.lr={rate}", *more))


def final_loss(config: Config) -> float:
    """Train, without checkpoints and evaluation."""
    with join_machine(config) as (plan, mesh):
        trainer = build_trainer(config, plan, mesh)
        losses = [train_step(trainer).loss for _ in range(config.train.steps)]
        trainer.close()
    return fmean(losses[-MEAN_OF:])


def row(name: str, losses: Losses, rates: list[str]) -> str:
    """Markdown, with the best loss in bold."""
    best = min(losses.values())
    cells = [name]
    for rate in rates:
        loss = losses.get(rate)
        text = "" if loss is None else f"{loss:.3f}"
        cells.append(f"**{text}**" if loss == best else text)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Train all models and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", metavar="CONFIG or key=value")
    parser.add_argument("--steps", type=at_least(MEAN_OF), default=40)
    parser.add_argument("--json", type=in_a_folder)
    arguments = parser.parse_intermixed_args()
    paths = [word for word in arguments.words if "=" not in word] or ["configs/quickstart.yaml"]
    steps = int(arguments.steps)
    more = [f"train.steps={steps}", f"schedule.warmup_steps={steps // 10}"]
    more += [word for word in arguments.words if "=" in word]
    rates = [f"{rate:g}" for rate in sorted({*RATES[SMALL], *RATES[LARGE]})]
    print(f"| {' | '.join(['', *rates])} |")
    print("|---" + "|---:" * len(rates) + "|")
    found: dict[str, Losses] = {}
    # The small model is the base model, so scaling changes nothing there.
    for size, scaled in ((SMALL, False), (LARGE, False), (LARGE, True)):
        losses: Losses = {}
        for rate in RATES[size]:
            with exit_on_fatal_error("rate_transfer"):
                config = resized(Path(paths[0]), size, scaled, rate, *more)
                losses[f"{rate:g}"] = final_loss(config)
        name = f"{parameter_count(config.model) / 1e6:.1f}M, "
        name += "completep" if scaled else "base model" if size == SMALL else "no scaling"
        found[name] = losses
        print(row(name, losses, rates), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
