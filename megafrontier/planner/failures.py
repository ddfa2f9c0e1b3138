"""What failures of nodes cost a layout, and how often it should save: `plan --mtbf`."""

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from megafrontier.config import Config, load_machine
from megafrontier.plan.intervals import STORAGE_SHARE, FailureModel, SaveCost
from megafrontier.plan.resolve import RunPlan
from megafrontier.plan.saves import duration, minutes_between_saves
from megafrontier.planner.search import CandidateLayout
from megafrontier.training.callbacks.save import checkpoint_bytes
from megafrontier.training.resume.restarts import (
    FILE_NAME,
    START_SECONDS,
    read_records,
    start_seconds,
)


@dataclass(frozen=True)
class Failures:
    """mtbf_hours: mean time between two failures of one node. start_seconds: of a start, from the
    failure to the first new step; `is_measured`: in the run's own directory."""

    mtbf_hours: float
    nodes: int
    start_seconds: float
    is_measured: bool

    @classmethod
    def of(cls, config: Config, nodes: int, mtbf_hours: float) -> "Failures":
        """With the starts that the run's attempts.jsonl has measured, if it has any."""
        measured = start_seconds(read_records(Path(config.run.directory) / FILE_NAME))
        seconds = median(measured) if measured else START_SECONDS
        return cls(mtbf_hours, nodes, seconds, bool(measured))

    @property
    def job_seconds(self) -> float:
        """Mean seconds between two failures of the job."""
        return 3600 * self.mtbf_hours / self.nodes

    def __str__(self) -> str:
        source = "as this run has measured" if self.is_measured else "not measured yet"
        return (
            f"failures: one node in {self.mtbf_hours:g} hours (--mtbf), so the job every "
            f"{duration(self.job_seconds)} on {self.nodes} nodes; a start takes "
            f"{self.start_seconds:.3g} s ({source}); {STORAGE_SHARE:.0%} of failures also lose the "
            "snapshots of the partner node"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mtbf_hours": self.mtbf_hours,
            "job_mtbf_seconds": self.job_seconds,
            "start_seconds": self.start_seconds,
            "start_is_measured": self.is_measured,
            "storage_share": STORAGE_SHARE,
        }


@dataclass(frozen=True)
class BestSaves:
    """The intervals for which the goodput is best, in seconds of steps, and that goodput.
    `local_every`: None without local snapshots."""

    every: float
    local_every: float | None
    goodput: float


@dataclass(frozen=True)
class LayoutFailures:
    """What a layout makes of failures: with checkpoints in storage alone, with local snapshots
    too, and as configured."""

    storage: SaveCost
    local: SaveCost
    without_local: BestSaves
    with_local: BestSaves
    configured: float
    step_seconds: float

    @classmethod
    def of(cls, layout: CandidateLayout, failures: Failures) -> "LayoutFailures":
        """Of a simulated layout."""
        config, plan, step = layout.config, layout.plan, layout.step.seconds
        storage, local = save_costs(config, plan, failures.nodes)
        alone = FailureModel(failures.job_seconds, failures.start_seconds, storage)
        both = replace(alone, local=local)
        every, local_every = configured_intervals(config, plan, step)
        model = both if local_every else alone
        return cls(
            storage,
            local,
            BestSaves(*alone.best(step)),
            BestSaves(*both.best(step)),
            model.goodput(every, local_every),
            step,
        )

    @property
    def local_steps(self) -> int:
        """Steps between local snapshots."""
        return max(1, round((self.with_local.local_every or 0.0) / self.step_seconds))

    def lines(self, name: str) -> list[str]:
        """For people. `name`: of the layout."""
        alone, both = self.without_local, self.with_local
        return [
            f"goodput, {name}: {self.configured:.2%} as configured",
            f"  {alone.goodput:.2%} with checkpoint.minutes={alone.every / 60:.3g} "
            f"(a save stops the steps for {_short(self.storage.stall)} s, and is complete "
            f"{_short(self.storage.behind)} s later)",
            f"  {both.goodput:.2%} with checkpoint.local.every={self.local_steps} "
            f"({_short(self.local.stall)} s, {_short(self.local.behind)} s) and "
            f"checkpoint.minutes={both.every / 60:.3g}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "configured": self.configured,
            "storage": {
                "goodput": self.without_local.goodput,
                "minutes": self.without_local.every / 60,
                "stall_seconds": self.storage.stall,
                "behind_seconds": self.storage.behind,
            },
            "local": {
                "goodput": self.with_local.goodput,
                "every": self.local_steps,
                "minutes": self.with_local.every / 60,
                "stall_seconds": self.local.stall,
                "behind_seconds": self.local.behind,
            },
        }


def save_costs(config: Config, plan: RunPlan, nodes: int) -> tuple[SaveCost, SaveCost]:
    """Of a checkpoint in storage, and of a local snapshot with a copy on a partner node.

    Steps wait while each rank copies its shards to host memory, over its link to the host, and
    without `checkpoint.asynchronous` until all is written. Snapshots are copied under the next
    forward and backward, so they cost this at most.
    """
    machine, total = load_machine(config.machine), checkpoint_bytes(config, plan)
    device, storage = machine.device, machine.storage
    shard = total / plan.levels.ranks / 1e9
    link = device.host_link_gigabytes_per_second
    memory = device.host_memory_gigabytes_per_second
    copy = shard / (link if device.is_accelerator else memory)
    rate = min(nodes * storage.host_gigabytes_per_second, storage.gigabytes_per_second or inf)
    written = total / 1e9 / rate
    network = next(
        (v.gigabytes_per_second for v in reversed(machine.levels.values())), None
    ) or memory  # fmt: skip
    stall = copy + storage.latency_seconds
    in_storage = SaveCost(stall, written)
    if not config.checkpoint.asynchronous:
        in_storage = SaveCost(stall + written, 0.0)
    return in_storage, SaveCost(copy, shard / memory + shard / network)


def configured_intervals(
    config: Config, plan: RunPlan, step_seconds: float
) -> tuple[float, float | None]:
    """Seconds of steps between checkpoints, at most those of the whole run, and between local
    snapshots (None: none)."""
    minutes, every = minutes_between_saves(config, plan), config.checkpoint.every
    intervals = [config.train.steps * step_seconds]
    intervals += [60 * minutes] * bool(minutes) + [every * step_seconds] * bool(every)
    local_every = config.checkpoint.local.every * step_seconds
    return max(step_seconds, min(intervals)), local_every or None


def _short(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
