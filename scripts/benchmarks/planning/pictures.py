"""Draw what the planner predicts: speed over nodes for all strategies, and a step's timeline.

    python -m scripts.benchmarks.planning.pictures FOLDER

Writes FOLDER/plan-scaling.png and FOLDER/plan-timeline.png.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch

from megafrontier.common.errors import UserError
from megafrontier.config import Config, load_config
from megafrontier.plan.reserve import usable_gib
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.layers import simulate_blocks
from megafrontier.planner.simulation.clock import COMPUTE, Bar
from megafrontier.planner.simulation.meter import running_meter
from megafrontier.planner.simulation.rank import Simulated, run_rank
from megafrontier.planner.simulation.rates import Rates
from megafrontier.report.draw import pyplot, run_look
from scripts.benchmarks.shared.measuring import make_parser
from scripts.benchmarks.shared.pictures import timeline_panel

CONFIG = "configs/gpt-20b.yaml"
NODES = (1, 8, 64, 512, 2048, 9408)
PER_NODE = 8
STRATEGIES = {
    "zero3": ("partition.strategy=zero3",),
    "hpz, wires zero++": ("partition.strategy=hpz", "partition.wires=zero++"),
    "mics": ("partition.strategy=mics",),
    "zero1": ("partition.strategy=zero1",),
    "zero2": ("partition.strategy=zero2",),
    "topo": ("partition.strategy=topo",),
    "topo, wires low": ("partition.strategy=topo", "partition.wires=low"),
}
STRATEGIES["the same, frontier-large"] = (*STRATEGIES["topo, wires low"], "machine=frontier-large")
SHARES = (1.0, 0.25)
"""Of the NICs' rate that collectives reach."""
NIC_RATE = 12.5
TIMELINES = ("zero3", "topo", "topo, wires low")
ROWS = (COMPUTE, "pair", "node", "world")


def config_of(strategy: Sequence[str], ranks: int, *more: str) -> Config:
    """20B parameters with one micro-batch of one sequence a step for each GCD."""
    batch = ("train.micro_batch=1", f"train.global_batch={ranks}")
    memory = "train.activation_checkpointing=block"
    return load_config(CONFIG, (*batch, memory, *strategy, *more))


def speed(case: tuple[float, str, int]) -> tuple[float, bool] | None:
    """TF/s a GCD, and whether the tensors fit; None for what cannot be."""
    torch.set_num_threads(1)
    share, name, nodes = case
    strategy = STRATEGIES[name]
    names = ("group", "world") if "machine=frontier-large" in strategy else ("world",)
    rates = [f"machine.levels.{n}.gigabytes_per_second={NIC_RATE * share}" for n in names]
    config = config_of(strategy, nodes * PER_NODE, *rates)
    try:
        plan = resolve_plan(config, nodes * PER_NODE)
        step: Simulated = simulate_blocks(config, plan)
    except UserError:
        return None
    usable = usable_gib(plan)
    return step.tflops_per_device, usable is None or step.gib <= usable


def draw_speed(path: Path) -> None:
    """TF/s over nodes, a panel for each share of the NICs' rate. Hollow: the tensors do not fit."""
    cases = list(product(SHARES, STRATEGIES, NODES))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(cases, pool.map(speed, cases), strict=True))
    figure, axes = pyplot().subplots(
        1, len(SHARES), figsize=(10, 4.4), sharey=True, layout="constrained"
    )
    for axis, share in zip(axes, SHARES, strict=True):
        for index, name in enumerate(STRATEGIES):
            look = run_look(index)
            points = [(n, *value) for n in NODES if (value := found[share, name, n]) is not None]
            axis.plot(*zip(*((n, s) for n, s, _ in points), strict=True), **look, label=name)
            for n, s, fits in points:
                filling = look["color"] if fits else "white"
                axis.plot(n, s, "o", color=look["color"], mfc=filling, ms=5)
        axis.set_xscale("log", base=2)
        axis.set_xticks(NODES, [f"{n:,}" for n in NODES])
        axis.minorticks_off()
        axis.set_xlabel("nodes of Frontier")
        axis.set_title(f"NICs at {NIC_RATE * 8 * share:g} GB/s a node")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("TF/s a GCD")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(path)


def bars_of(
    strategy: Sequence[str], nodes: int
) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """What a rank does in a step, by row from the step's begin to its end, and its seconds."""
    ranks = nodes * PER_NODE
    config = config_of(
        strategy,
        ranks,
        "model.layers=12",
        "partition.overlap=full",
        "train.micro_batch=2",
        f"train.global_batch={2 * ranks}",
    )
    plan = resolve_plan(config, ranks)
    bars: list[Bar] = []

    def record(_: object) -> None:
        running_meter().clock.bars = bars

    first, *_, last = run_rank(config, plan, Rates.of(plan.machine), 0, 1, record).marks
    begin, end = first["seconds"], last["seconds"]
    shown: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS}
    # What a comm stream computes, such as codecs, is in the row of its level.
    rows = dict(zip(ROWS, ROWS, strict=True)) | {
        f"level-{i}": row for i, row in enumerate(ROWS[1:])
    }
    for row, start, length in bars:
        first, last = max(start, begin), min(start + length, end)
        if last > first:
            shown[rows[row]].append((first - begin, last - first))
    return shown, end - begin


def draw_timeline(path: Path, nodes: int = 48) -> None:
    """A panel for each strategy: a row for the computation, and one for each level."""
    found = {name: bars_of(STRATEGIES[name], nodes) for name in TIMELINES}
    longest = max(seconds for _, seconds in found.values())
    figure, axes = pyplot().subplots(
        len(found), figsize=(10, 1.6 * len(found) + 0.5), sharex=True, layout="constrained"
    )
    for axis, (name, (bars, seconds)) in zip(axes, found.items(), strict=True):
        timeline_panel(axis, f"{name}: {seconds:.2f} s", bars, COMPUTE)
        axis.axvline(seconds, color="black", linewidth=0.8)
    axes[-1].set_xlim(0, longest)
    axes[-1].set_xlabel("seconds")
    figure.savefig(path)


def main() -> None:
    """Draw both."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    for name, draw in (("plan-scaling.png", draw_speed), ("plan-timeline.png", draw_timeline)):
        begin, cpu = time.perf_counter(), sum(os.times()[:4])
        draw(folder / name)
        seconds, cpu = time.perf_counter() - begin, sum(os.times()[:4]) - cpu
        print(f"{name}: {seconds:.1f} s, {cpu:.1f} s of CPU time", flush=True)


if __name__ == "__main__":
    main()
