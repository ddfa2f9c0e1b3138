"""How often a run saves a checkpoint, and what a job loses if it fails before."""

from collections.abc import Iterator

from megafrontier.checkpoint.local.node_folder import MEMORY_SHARE
from megafrontier.config import Config
from megafrontier.plan.footprint import keeps_in_memory, snapshot_gib
from megafrontier.plan.resolve import RunPlan


def minutes_between_saves(config: Config, plan: RunPlan) -> float:
    """`checkpoint.minutes`, or 0 if saves at times that differ between runs would change losses
    that `train.deterministic` fixes: a save folds the errors of error feedback."""
    has_errors = plan.default.error_feedback or plan.experts.error_feedback
    return 0 if config.train.deterministic and has_errors else config.checkpoint.minutes


def describe_saves(
    config: Config,
    plan: RunPlan,
    step_seconds: float | None = None,
    limit_seconds: float | None = None,
) -> Iterator[str]:
    """A line about when checkpoints are saved, and warnings.

    step_seconds: of a step, as predicted; None: not known.
    limit_seconds: from the start of a job until it is asked to stop; None: not known.
    """
    every, minutes = config.checkpoint.every, minutes_between_saves(config, plan)
    if minutes != config.checkpoint.minutes:
        yield (
            f"warning: checkpoint.minutes: {config.checkpoint.minutes:g}, not used: saves fold the "
            "errors of error feedback, and with train.deterministic must not depend on the clock"
        )
    by_time = [f"{minutes:g} minutes (checkpoint.minutes)"] * bool(minutes)
    by_steps = [f"{_steps(every, step_seconds)} (checkpoint.every)"] * bool(every)
    both = " or ".join([*by_time, *by_steps])
    if both:
        first = ", whichever comes first" * (len(by_time) + len(by_steps) - 1)
        yield f"checkpoints: every {both}{first}"
    else:
        yield f"checkpoints: only at the end, after {_steps(config.train.steps, step_seconds)}"
    if config.checkpoint.local.every:
        yield from _describe_snapshots(config, plan, step_seconds)
    if limit_seconds is not None:
        yield from _warn_of_limit(every, minutes, step_seconds, limit_seconds)


def _describe_snapshots(config: Config, plan: RunPlan, step_seconds: float | None) -> Iterator[str]:
    local, size = config.checkpoint.local, snapshot_gib(config, plan)
    where = "of the node's memory" if keeps_in_memory(config) else f"in {local.folder}"
    copies = ", with a copy on another node" if local.copies else ""
    yield (
        f"snapshots: every {_steps(local.every, step_seconds)} (checkpoint.local.every){copies}: "
        f"{size:.3g} GiB {where} for each rank"
    )
    memory = plan.machine.device.host_memory_gib
    if memory is not None and keeps_in_memory(config) and size > MEMORY_SHARE * memory:
        yield (
            f"warning: checkpoint.local: {size:.3g} GiB for each rank are more than "
            f"{MEMORY_SHARE:.0%} of machine.device.host_memory_gib ({memory:.3g}): a disk of the "
            "node is taken, or there are no snapshots"
        )


def _warn_of_limit(
    every: int, minutes: float, step_seconds: float | None, limit_seconds: float
) -> Iterator[str]:
    known = step_seconds or 0.0
    # A save that is due by time comes up to two steps later.
    intervals = [60 * minutes + 2 * known] * bool(minutes)
    if every and step_seconds is not None:
        intervals.append(every * step_seconds)
    if not intervals and every:
        return  # in a time that is not known
    if intervals and min(intervals) < limit_seconds:
        return
    key, given = ("every", every) if every and not minutes else ("minutes", minutes)
    most = max(0.0, (limit_seconds - 2 * known) / 60)
    yield (
        f"warning: checkpoint.{key}: {given:g}, so a job saves only when it is asked to stop, "
        f"after {duration(limit_seconds)}, and a failure loses all its work; need "
        f"checkpoint.minutes below {most:.3g}"
    )


def _steps(count: int, step_seconds: float | None) -> str:
    """A number of steps, and their time if it is known."""
    time = "" if step_seconds is None else f", {duration(count * step_seconds)}"
    return f"{count} steps{time}"


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there is one."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
