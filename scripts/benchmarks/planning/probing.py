"""Probe the slow network's links and one rank's device, as `megafrontier probe` does."""

from dataclasses import dataclass
from typing import Any

from megafrontier.config import load_config
from megafrontier.launch.context import join_machine
from megafrontier.probe.device import measure_device
from megafrontier.probe.links import measure_collectives, measure_pairs
from scripts.benchmarks.slow_network.job import Job

MESSAGE_BYTES = 2**17
"""Of the large messages: the links are so slow that longer ones would take minutes."""


@dataclass
class Probed:
    """What one rank measured: the values of a machine file."""

    levels: dict[str, dict[str, float]]
    device: dict[str, Any]


def prepare(job: Job) -> None:
    """As `slow_network.ranks.prepare`."""


def run(job: Job) -> Probed:
    """Links with all ranks side by side. The device with all other ranks idle, because ranks that wait
    for a device leave the cores to those that do not."""
    config = load_config(job.config, job.overrides)
    with join_machine(config) as (plan, mesh):
        hierarchy, device = mesh.hierarchy(), {}
        pairs = measure_pairs(hierarchy, MESSAGE_BYTES)
        collectives = measure_collectives(hierarchy, MESSAGE_BYTES)
        if mesh.world.rank == 0:
            found, _ = measure_device(mesh.device, plan.machine.device)
            names = ("matrix_tflops", "memory_gigabytes_per_second", "launch_microseconds")
            device = {name: getattr(found, name) for name in names}
        mesh.world.all_true(True)
        levels = {}
        for name, pair, others in zip(plan.levels.names, pairs, collectives, strict=True):
            rates = [link.bytes_per_second for link in (pair, *others.values())]
            levels[name] = {
                "gigabytes_per_second": max(rates) / 1e9,
                "latency_microseconds": pair.latency_seconds * 1e6,
            }
    return Probed(levels, device)
