"""What the planner says of a layout in full size: memory, bytes and time of a step."""

import json
from collections.abc import Iterator
from pathlib import Path

from megafrontier.certify.certificate import Finding
from megafrontier.common.errors import UserError
from megafrontier.config import Config
from megafrontier.plan.reserve import Reserve, usable_gib
from megafrontier.plan.resolve import RunPlan
from megafrontier.planner.layers import simulate_blocks
from megafrontier.planner.simulation.rank import Simulated
from megafrontier.planner.simulation.rates import UNKNOWN

TIME_ERROR = 0.12
"""The planner's worst error beside measured steps of layouts like these (docs/planning.md)."""
MEMORY, TIME = "memory of the worst rank, GiB", "seconds of a step"


def write_scale(config: Config, plan: RunPlan, path: Path) -> None:
    """Simulate a step in full size, and write the findings as JSON. It may take a minute."""
    try:
        step, has_time = simulate_blocks(config, plan), True
    except UserError:  # the machine file lacks rates
        step, has_time = simulate_blocks(config, plan, UNKNOWN), False
    path.write_text(json.dumps([f.__dict__ for f in _findings(step, has_time, plan)]))


def read_scale(path: Path) -> list[Finding]:
    """What `write_scale` has written."""
    return [Finding(**values) for values in json.loads(path.read_text())]


def _findings(step: Simulated, has_time: bool, plan: RunPlan) -> Iterator[Finding]:
    yield _memory(step.worst_gib, plan)
    sent = ", ".join(f"{name} {count / 1e9:.3g}" for name, count in step.sent.items())
    total = sum(step.sent.values()) / 1e9
    yield Finding("GB that a rank sends in a step", "measured", total, where=f"by plan: {sent}")
    if has_time:
        where = f"by plan, ±{100 * TIME_ERROR:.0f} %: {step.limit}"
        yield Finding(TIME, "measured", step.seconds, where=where)
    else:
        yield Finding(TIME, "open", where="the machine file has no rates; `megafrontier probe`")


def _memory(gib: float, plan: RunPlan) -> Finding:
    """Measured if the reserve is left, broken if it does not fit, else open."""
    memory, bound = plan.machine.device.memory_gib, usable_gib(plan)
    if memory is None or bound is None:
        return Finding(MEMORY, "measured", gib, where="by plan; the machine file has no memory_gib")
    if gib > memory:
        return Finding(MEMORY, "broken", gib, bound, f"the device has {memory:g}")
    if gib > bound:
        return Finding(MEMORY, "open", gib, bound, f"fits into {memory:g}, but {Reserve.of(plan)}")
    return Finding(MEMORY, "measured", gib, bound, f"by plan, of {memory:g}")
