"""What `plan` and the prediction of a run print of layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod
from textwrap import wrap

from megafrontier.config import Config, MachineConfig, PartitionConfig
from megafrontier.plan.describe import describe_depths
from megafrontier.plan.reserve import Reserve
from megafrontier.plan.resolve import RunPlan
from megafrontier.planner.search import CandidateLayout
from megafrontier.planner.simulation.rank import Simulated

WIDTH = 120
"""Columns of a table."""
_DOT = " · "


def table(
    config: Config, layouts: Sequence[CandidateLayout], nodes: int, tokens: float | None
) -> str:
    """One line for each layout, best first, what the best one gains, and the overrides."""
    head = ["", "fits", "GiB", "step s", "tokens/s", "TF/s", "MFU %"]
    head += ["node-hours"] * (tokens is not None)
    rows = [[*head, "limit", "layout"]]
    for number, layout in enumerate(layouts, 1):
        rows.append([str(number), *_figures(layout, nodes, tokens), short_form(layout)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [line for row in rows for line in _wrapped(row, widths)]
    ranks = layouts[0].plan.levels.ranks
    return "\n".join(
        [
            f"{config.run.name} on {nodes} nodes, {ranks} ranks; a step each:",
            *lines,
            *_describe_gain(layouts),
            *_overrides(layouts),
        ]
    )


def _figures(layout: CandidateLayout, nodes: int, tokens: float | None) -> list[str]:
    step, share = layout.step, mfu(layout)
    row = ["yes" if layout.fits else "no", f"{step.worst_gib:.1f}", f"{step.seconds:.3f}"]
    row += [f"{step.tokens_per_second:,.0f}", f"{step.tflops_per_device:.1f}"]
    row.append("-" if share is None else f"{100 * share:.1f}")
    if tokens is not None:
        row.append(f"{node_hours(step, nodes, tokens):,.0f}")
    return [*row, step.limit]


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The row, with its last cell in several lines if it is too long."""
    start = "  ".join(map(str.rjust, row, widths)) + "  "
    parts = row[-1].replace(" ", "\0").replace(_DOT.replace(" ", "\0"), _DOT)
    cells = wrap(parts, max(20, WIDTH - len(start)), break_on_hyphens=False) or [""]
    for index, cell in enumerate(cells):
        yield (start if not index else " " * len(start)) + cell.replace("\0", " ")


def _describe_gain(layouts: Sequence[CandidateLayout]) -> Iterator[str]:
    gain = gain_over_configured(layouts)
    if gain is None:
        return
    own = next(number for number, each in enumerate(layouts, 1) if each.is_configured)
    if own == 1:
        yield "The configured layout is the best one."
    elif not layouts[own - 1].fits:
        yield f"The configured layout ({own}) does not fit; take 1."
    else:
        yield f"The best layout takes {gain:.1%} less time than the configured one ({own})."


def gain_over_configured(layouts: Sequence[CandidateLayout]) -> float | None:
    """The share of a step's time that the best layout saves; None without a configured one."""
    seconds = [each.step.seconds for each in layouts if each.is_configured]
    return 1 - layouts[0].step.seconds / seconds[0] if seconds else None


def _overrides(layouts: Sequence[CandidateLayout]) -> Iterator[str]:
    """The overrides of each layout, at most `WIDTH` wide."""
    if all(layout.is_configured for layout in layouts):
        return
    yield "overrides (--write FILE writes the config of 1):"
    for number, layout in enumerate(layouts, 1):
        if not layout.is_configured:
            yield from wrap(
                " ".join(layout.overrides),
                WIDTH,
                initial_indent=f"{number:>2}  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )


def short_form(layout: CandidateLayout) -> str:
    """A layout in a few words: splits, placement, wires, and how a step computes."""
    config, plan = layout.config, layout.plan
    parts = ["as configured:"] if layout.is_configured else []
    for name, size in asdict(plan.shape.splits).items():
        if size > 1:
            parts.append(f"{name} {size}")
    if plan.division.ranks > 1:
        parts[-1] += f" {plan.division.schedule}"
        stages = plan.division.stages_per_rank
        parts[-1] += f" x {stages}" if stages > 1 else ""
    parts += describe_depths(plan.default.placement, plan.data_levels)
    if plan.experts.placement != plan.default.placement:
        levels = plan.data_levels
        parts += [f"experts {', '.join(describe_depths(plan.experts.placement, levels))}"]
    parts.append(_wires(config.partition))
    parts.append(f"micro-batch {config.train.micro_batch}")
    modes = dict.fromkeys(config.checkpointing)
    parts.append("+".join("no recompute" if mode == "none" else mode for mode in modes))
    if config.partition.overlap != PartitionConfig().overlap:
        parts.append(f"overlap {config.partition.overlap}")
    if not config.partition.weights_copy:
        parts.append("no copy")
    return _DOT.join(parts).replace(f"configured:{_DOT}", "configured: ")


def _wires(partition: PartitionConfig) -> str:
    wires = partition.wires
    own = any((wires.gather, wires.reduce, wires.activations, wires.tokens))
    return (wires.preset or "exact") + "+" * own


def describe_step(
    config: Config, plan: RunPlan, step: Simulated, tokens: float | None = None
) -> list[str]:
    """Lines about a step that a run will take: its time and rates, and its memory.

    tokens: of the whole run, for its node-hours; default: those of `train.steps`.
    """
    whole = tokens or config.train.steps * step.tokens
    nodes = plan.levels.ranks / ranks_per_node(plan.machine)
    lines = [
        f"plan: {step.seconds:.3g} s a step, {step.tflops_per_device:.3g} TF/s a device, "
        f"{step.tokens_per_second:,.0f} tokens/s, {node_hours(step, nodes, whole):,.0f} node-hours "
        f"for {whole:.3g} tokens; most time goes to {step.limit}"
    ]
    return [*lines, describe_memory(plan, step)]


def describe_memory(plan: RunPlan, step: Simulated) -> str:
    """One line: what a layout needs of the device, and what is reserved."""
    memory = plan.machine.device.memory_gib
    if memory is None:
        return f"memory: {step.worst_gib:.3g} GiB of tensors"
    return f"memory: {step.worst_gib:.3g} GiB of tensors of {memory:g}, {Reserve.of(plan)}"


def node_hours(step: Simulated, nodes: float, tokens: float) -> float:
    """Of a run over so many tokens."""
    return tokens / step.tokens_per_second / 3600 * nodes


def ranks_per_node(machine: MachineConfig) -> int:
    """By the machine file, or all levels but the last."""
    sizes = [level.size for level in machine.levels.values()][:-1]
    return machine.device.ranks_per_host or prod(size or 1 for size in sizes)


def mfu(layout: CandidateLayout) -> float | None:
    """Share of the device's peak; None if the machine file does not state it."""
    peak = layout.plan.machine.device.peak_tflops
    return None if peak is None else layout.step.tflops_per_device / peak
