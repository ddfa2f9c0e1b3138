"""Probe the slow network's links and one rank's device, as `megafrontier probe` does."""

from dataclasses import dataclass
from typing import Any

from megafrontier.config import load_config
from megafrontier.launch.context import join_machine
from megafrontier.probe.device import measure_device
from megafrontier.probe.links import measure_collectives, measure_pairs
from scripts.benchmarks.shared.job import Job


@dataclass
class Probed:
    """What one rank measured: bytes a second and seconds by level and kind, and its device."""

    levels: dict[str, dict[str, tuple[float, float]]]
    device: dict[str, Any]


def run(job: Job) -> Probed:
    """Links with all ranks side by side, by messages of `job.options["bytes"]`. The device with all
    other ranks idle, because ranks that wait for a device leave the cores to those that do not."""
    large = int(job.options["bytes"])
    config = load_config(job.config, job.overrides)
    with join_machine(config) as (plan, mesh):
        hierarchy, device = mesh.hierarchy(), {}
        pairs = measure_pairs(hierarchy, large)
        collectives = measure_collectives(hierarchy, large)
        if mesh.world.rank == 0:
            found, _ = measure_device(mesh.device, plan.machine.device)
            names = ("matrix_tflops", "memory_gigabytes_per_second", "launch_microseconds")
            device = {name: getattr(found, name) for name in names}
        mesh.world.all_true(True)
    levels = {}
    for name, pair, others in zip(plan.levels.names, pairs, collectives, strict=True):
        kinds = {"pair": pair, **others}
        levels[name] = {k: (v.bytes_per_second, v.latency_seconds) for k, v in kinds.items()}
    return Probed(levels, device)
