"""`megafrontier plan`: layouts of a configuration on a number of nodes, ranked."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megafrontier.common.errors import UserError, need, print_error
from megafrontier.common.progress import Progress
from megafrontier.config import Config, load_config, load_machine, save_config
from megafrontier.parallel.env import identify
from megafrontier.plan.describe import aligned, describe_run
from megafrontier.plan.footprint import host_gib
from megafrontier.plan.refuse import check_layout, memory_advice
from megafrontier.plan.reserve import Reserve
from megafrontier.plan.resolve import RunPlan
from megafrontier.plan.saves import describe_saves
from megafrontier.planner.auto import choose_layout
from megafrontier.planner.checks import check_files, check_ranks, warn_of_files, warn_of_names
from megafrontier.planner.failures import Failures, LayoutFailures
from megafrontier.planner.layers import simulate_blocks
from megafrontier.planner.search import CandidateLayout, search
from megafrontier.planner.simulation.rank import Simulated
from megafrontier.planner.simulation.rates import UNKNOWN
from megafrontier.planner.table import (
    describe_memory,
    describe_step,
    gain_over_configured,
    mfu,
    ranks_per_node,
    short_form,
    table,
)
from megafrontier.training.logging.run_log import check_parents
from megafrontier.training.resume.resume import check_own


def plan_command(
    path: str,
    overrides: Sequence[str],
    nodes: int,
    tokens: float | None = None,
    as_json: bool = False,
    write: Path | None = None,
    mtbf: float | None = None,
) -> str:
    """The table, or JSON. `tokens`: of a whole run, for its node-hours. `write`: gets the config of
    the best layout. `mtbf`: hours between two failures of one node, for intervals of checkpoints
    and the expected goodput.

    Files that the run needs and that are not on this machine are warnings on stderr, because data
    may come later. Raises UserError for a config or machine that cannot be planned, and if no
    layout fits.
    """
    need(nodes >= 1, "--nodes", nodes, "need 1 or more")
    need(tokens is None or 0 < tokens < math.inf, "--tokens", tokens, "need more than 0")
    need(mtbf is None or 0 < mtbf < math.inf, "--mtbf", mtbf, "need hours, more than 0")
    config = load_config(path, overrides)
    machine = load_machine(config.machine)
    ranks = nodes * ranks_per_node(machine)
    if not config.has_auto_layout:
        check_layout(config, ranks)
    with Progress("plan") as show:
        layouts = search(config, ranks, report=lambda count: show(f"{count} layouts simulated"))
    if config.has_auto_layout:
        check_layout(layouts[0].config, ranks)
    if not layouts[0].fits and not as_json:
        raise UserError(f"plan: {too_large(layouts[0])}")
    for line in warn_of_files(config, layouts[0].plan, resumes=False):
        print_error(f"megafrontier: {line}")
    if write is not None and layouts[0].fits:
        save_config(layouts[0].config, write)
    failures = None if mtbf is None else Failures.of(config, nodes, mtbf)
    if as_json:
        found = {"machine": config.machine, "nodes": nodes}
        found |= {} if failures is None else {"failures": failures.as_dict()}
        found["gain_over_configured"] = gain_over_configured(layouts)
        plans = [as_dict(layout, failures) for layout in layouts]
        return json.dumps({**found, "plans": plans}, indent=1)
    lines = [table(config, layouts, nodes, tokens)]
    if failures is not None:
        lines += [str(failures), *_describe_goodput(layouts, failures)]
    return "\n".join(lines)


def _describe_goodput(layouts: Sequence[CandidateLayout], failures: Failures) -> Iterator[str]:
    """Of the best layout, and of the configured one."""
    for place, layout in enumerate(layouts):
        if place == 0 or layout.is_configured:
            name = "best layout" if place == 0 else "configured layout"
            yield from LayoutFailures.of(layout, failures).lines(name)


def dry_run_command(
    path: str, overrides: Sequence[str], ranks: int | None, tokens: float | None = None
) -> str:
    """What a run will say about its ranks, and the memory of rank 0, which is built: of a deep
    model without a pipeline, two shallow ones, as `simulate_blocks` does.

    `ranks`: default: those of the launcher, or 1. `tokens`: of the whole run, for its node-hours;
    default: those of `train.steps`. Raises UserError for a config that `train` would
    refuse, also for a missing corpus, and if the tensors do not fit into the device's memory.
    """
    config = load_config(path, overrides)
    ranks = identify(os.environ).world_size if ranks is None else ranks
    need(ranks >= 1, "--nproc", ranks, "need at least 1")
    config, lines = choose_layout(config, ranks)
    plan = check_ranks(config, ranks)
    check_files(config, plan, needs_corpus=False)
    check_own(config)
    check_parents(config)
    lines += [*describe_run(config, plan), *warn_of_names(config)]
    if not config.data.train:
        lines.append("warning: data.train: empty, need at least one corpus to train")
    step, seconds = _predicted(config, plan)
    layout = CandidateLayout((), config, plan, step)
    if not layout.fits:
        memory, reserve = plan.machine.device.memory_gib, Reserve.of(plan)
        raise UserError(
            f"machine.device.memory_gib: {memory:g}, need {step.worst_gib + reserve.gib:.3g} on "
            f"{plan.levels.ranks} ranks: {_parts(step)}; {reserve}; take {memory_advice(config)}"
        )
    lines += describe_step(config, plan, step, tokens) if seconds else []
    lines += describe_saves(config, plan, seconds)
    lines.append(f"rank 0: {step.gib:.3g} GiB of tensors at the peak: {_parts(step)}")
    if not seconds:
        lines.append(describe_memory(plan, step))
    return "\n".join(aligned(lines))


def _predicted(config: Config, plan: RunPlan) -> tuple[Simulated, float | None]:
    """A step, and its seconds if the machine file has the rates."""
    try:
        step = simulate_blocks(config, plan)
    except UserError:
        return simulate_blocks(config, plan, UNKNOWN), None
    return step, step.seconds


def predict(config: Config, plan: RunPlan, limit_seconds: float | None = None) -> list[str]:
    """What a job will do: lines with the step's time and memory, unless it cannot be planned, and
    when checkpoints are saved. `limit_seconds`: as for `describe_saves`."""
    try:
        step = simulate_blocks(config, plan)
    except UserError:
        return [*describe_saves(config, plan, None, limit_seconds)]
    found = describe_step(config, plan, step)
    return [*found, *describe_saves(config, plan, step.seconds, limit_seconds)]


def _parts(step: Simulated) -> str:
    """GiB by category, and all with the worst routing of tokens to experts."""
    parts = [f"{name.replace('_', ' ')} {gib:.3g}" for name, gib in step.memory.items() if gib]
    if step.worst_memory is not None:
        parts.append(f"with the worst routing {step.worst_gib:.3g} in all")
    return ", ".join(parts)


def too_large(layout: CandidateLayout) -> str:
    """Why a layout does not fit, in one line."""
    memory, reserve = layout.plan.machine.device.memory_gib, Reserve.of(layout.plan)
    return (
        f"needs {layout.step.worst_gib + reserve.gib:.3g} GiB of {memory:g} on "
        f"{layout.plan.levels.ranks} ranks ({reserve}), and no other layout fits; need more nodes"
    )


def as_dict(layout: CandidateLayout, failures: Failures | None = None) -> dict[str, Any]:
    """A plan in JSON."""
    step = layout.step
    return {
        "configured": layout.is_configured,
        "overrides": list(layout.overrides),
        "layout": short_form(layout),
        "fits": layout.fits,
        "gib": step.gib,
        "memory": step.memory,
        "host_gib": host_gib(layout.config, layout.plan),
        **({} if step.worst_memory is None else {"worst_routing_gib": step.worst_gib}),
        "step_seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "tflops_per_device": step.tflops_per_device,
        "mfu": mfu(layout),
        "bytes": {name: round(sent) for name, sent in step.sent.items()},
        "exposed_seconds": step.exposed,
        "bubble": step.bubble,
        "limit": step.limit,
        **({} if failures is None else {"goodput": LayoutFailures.of(layout, failures).as_dict()}),
    }
