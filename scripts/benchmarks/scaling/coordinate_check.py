"""The coordinate check of muP and CompleteP: how much activations change in the first steps, in
models of four widths and of four depths, with and without `model.scaling`.

    python -m scripts.benchmarks.scaling.coordinate_check [--out docs/images/coordinate-check.png]

With scaling the changes must not depend on the size. The models train with AdamW on one batch, in
which each token follows from the one before. A change is the root mean square of the difference
from the activations before the first step. The picture shows it after one step and after the last.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import LogLocator
from torch import Tensor, nn

from megafrontier.config import ModelConfig, OptimizerConfig, ScalingConfig
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.optim.groups import OptimizerGroups
from megafrontier.parallel.param_spec import spec_of
from megafrontier.report.draw import pyplot
from scripts.benchmarks.shared.measuring import in_a_folder, make_parser

WIDTHS, DEPTHS = (64, 128, 256, 512), (2, 4, 8, 16)
STEPS, RATE = 10, 4e-3
BASE = ModelConfig(
    layers=2,
    hidden=64,
    heads=2,
    sequence_length=64,
    vocab_size=61,
    norm="rmsnorm",
    activation="swiglu",
    position="rotary",
    bias=False,
)
SCALING = ScalingConfig(base_hidden=BASE.hidden, base_layers=BASE.layers)
MEASURED = ("last block", "logits")

Changes = dict[str, list[float]]
"""By the name of an activation, its change after each step."""


def resized(hidden: int, layers: int, scaling: ScalingConfig | None) -> ModelConfig:
    """The base model in another size, with heads of the same size."""
    heads = BASE.heads * hidden // BASE.hidden
    return replace(BASE, hidden=hidden, heads=heads, layers=layers, scaling=scaling)


def measure_changes(config: ModelConfig, steps: int = STEPS, rate: float = RATE) -> Changes:
    """Train a model on one batch, and compare its activations before the first step and after
    each."""
    model = GPT(config)
    initialise(model, seed=1)
    optimizer = make_adamw(model, OptimizerConfig(lr=rate))
    tokens, targets = make_batch(config)
    before = activations(model, tokens)
    found: Changes = {name: [] for name in before}
    for _ in range(steps):
        (model(tokens, targets) / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, after in activations(model, tokens).items():
            found[name].append((after - before[name]).square().mean().sqrt().item())
    return found


def make_batch(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Tokens and targets [4, sequence_length]."""
    rows = [torch.arange(4) * config.vocab_size // 4]
    for _ in range(config.sequence_length):
        rows.append((2 * rows[-1] + 1) % config.vocab_size)
    tokens = torch.stack(rows, 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's AdamW with the values that a run has for each parameter."""
    specs = {name: spec_of(name, parameter) for name, parameter in model.named_parameters()}
    groups = OptimizerGroups(config, specs.values())
    params: list[dict[str, Any]] = [
        {
            "params": [p for n, p in model.named_parameters() if groups.numbers[n] == number],
            "lr": config.lr * group.lr_scale,
            "betas": group.betas,
            "eps": group.eps,
            "weight_decay": group.weight_decay,
        }
        for number, group in enumerate(groups.groups)
    ]
    return torch.optim.AdamW([group for group in params if group["params"]])


def activations(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    """The residual stream after the last block, and the logits."""
    kept: list[Tensor] = []
    hook = model.blocks[-1].register_forward_hook(lambda *passed: kept.append(passed[-1]))
    with torch.no_grad():
        logits = model(tokens)
    hook.remove()
    return dict(zip(MEASURED, (kept[0], logits), strict=True))


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The exponent of a power law through the points: 0 if values do not depend on the size."""
    x = torch.tensor([log2(size) for size in sizes])
    y = torch.tensor([log2(value) for value in values])
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def draw(rows: dict[str, tuple[Sequence[int], dict[str, list[Changes]]]], path: Path) -> None:
    """A row of panels for widths and one for depths, a column without and one with scaling."""
    plt = pyplot()
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.5), sharey="row", layout="constrained")
    for panel_row, (what, (sizes, columns)) in zip(panels, rows.items(), strict=True):
        for panel, (title, changes) in zip(panel_row, columns.items(), strict=True):
            _draw_panel(panel, sizes, changes)
            panel.set(title=title, xlabel=what)
        panel_row[0].set_ylabel("change (RMS)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(panel: Any, sizes: Sequence[int], changes: Sequence[Changes]) -> None:
    for colour, name in zip(("#0072B2", "#D55E00"), MEASURED, strict=True):
        for line, step in (("--", 1), ("-", STEPS)):
            values = [change[name][step - 1] for change in changes]
            label = f"{name}, step {step}"
            panel.loglog(sizes, values, line, color=colour, marker="o", ms=4, label=label)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()


def main() -> None:
    """Measure all models, print the slopes, and draw the picture."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=in_a_folder, default="docs/images/coordinate-check.png")
    arguments = parser.parse_args()
    shapes = {
        "width (hidden)": (WIDTHS, [(width, BASE.layers) for width in WIDTHS]),
        "depth (layers)": (DEPTHS, [(BASE.hidden, depth) for depth in DEPTHS]),
    }
    rows = {}
    print(
        f"| size | scaling | activation | step | change with each size | exponent |\n{'|---' * 6}|"
    )
    for what, (sizes, pairs) in shapes.items():
        columns = {}
        for title, scaling in (("no scaling", None), ("completep", SCALING)):
            columns[title] = [measure_changes(resized(*pair, scaling)) for pair in pairs]
            _print_rows(what, title, sizes, columns[title])
        rows[what] = (sizes, columns)
    draw(rows, arguments.out)


def _print_rows(what: str, title: str, sizes: Sequence[int], changes: Sequence[Changes]) -> None:
    for name in MEASURED:
        for step in (1, STEPS):
            values = [change[name][step - 1] for change in changes]
            shown = ", ".join(f"{value:.3g}" for value in values)
            exponent = f"{slope(sizes, values):+.2f}"
            print(f"| {what} | {title} | {name} | {step} | {shown} | {exponent} |", flush=True)


if __name__ == "__main__":
    main()
