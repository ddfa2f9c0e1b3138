"""`megafrontier probe`: measure links and device on all ranks, and write a machine file."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from megafrontier.common.errors import UserError
from megafrontier.common.files import write_atomically
from megafrontier.config import Config, LevelConfig, MachineConfig, load_machine
from megafrontier.launch.device import choose_device
from megafrontier.launch.main import launch
from megafrontier.launch.rendezvous import join
from megafrontier.parallel.env import Identity, identify
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Mesh, MeshShape
from megafrontier.parallel.world import World
from megafrontier.probe.contention import measure_contention
from megafrontier.probe.device import measure_device
from megafrontier.probe.levels import cluster, machine_of, surprises
from megafrontier.probe.links import (
    Link,
    measure_alone,
    measure_collectives,
    measure_pairs,
    median_link,
    prime_levels,
)


def probe_command(nproc: int | None, machine: str | None, write: Path | None, as_json: bool) -> int:
    """Measure on all ranks of a launcher, or on `nproc` local ones. Returns the exit code.

    machine: name or path of a machine file to compare with. write: gets the measured one.

    Raises UserError for a machine file that cannot be read.
    """
    stated = None if machine is None else load_machine(machine)
    body = partial(_probe_rank, stated, write, as_json)
    return launch(Config(), body, nproc, lambda ranks: None)


def _probe_rank(stated: MachineConfig | None, write: Path | None, as_json: bool) -> int:
    identity = identify(os.environ)
    device = choose_device(identity, "any" if stated is None else stated.device.name)
    per_host = ranks_on_this_host(identity, os.environ)
    strides = prime_levels(identity.world_size, per_host)
    with join(identity, MeshShape(strides), device) as mesh:
        found = _measure(mesh, per_host, stated)
        if identity.rank == 0:
            print(
                json.dumps(found.as_dict(), indent=1) if as_json else found.describe(), flush=True
            )
            if write is not None:
                write_atomically(write, found.yaml())
    return 0


def ranks_on_this_host(identity: Identity, environment: Mapping[str, str]) -> int:
    """Ranks of each host. Raises UserError if the hosts have different numbers."""
    if identity.source in ("local", "alone"):
        return identity.world_size
    if identity.source == "torchrun":
        count = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    else:  # "8(x4)", or "8(x3),4" if the hosts differ
        text = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
        match = re.fullmatch(r"(\d+)(\(x\d+\))?", text)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE: {text}, need the same number on each node")
        count = int(match[1])
    if identity.world_size % count:
        raise UserError(
            f"{identity.world_size} ranks with {count} on this host, need as many on each"
        )
    return count


class Found:
    """What a probe measured."""

    def __init__(
        self,
        machine: MachineConfig,
        products: dict[int, float],
        collectives: dict[str, dict[str, Link]],
        alone: dict[str, float],
        lines: list[str],
    ) -> None:
        self.machine, self.products, self.collectives = machine, products, collectives
        self.alone, self.lines = alone, lines

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self.machine),
            "collectives": {
                level: {
                    name: {"gigabytes_per_second": link.bytes_per_second / 1e9,
                           "latency_microseconds": link.latency_seconds * 1e6}
                    for name, link in links.items()
                }
                for level, links in self.collectives.items()
            },
            "alone_gigabytes_per_second": {n: rate / 1e9 for n, rate in self.alone.items()},
            "products_tflops": self.products,
            "surprises": self.lines,
        }  # fmt: skip

    def yaml(self) -> str:
        """The machine file."""
        values = asdict(self.machine)
        levels = {name: _given(level) for name, level in values["levels"].items()}
        return "# Written by `megafrontier probe`.\n" + yaml.safe_dump(
            {"levels": levels, "device": _given(values["device"])}, sort_keys=False
        )

    def describe(self) -> str:
        """A few lines."""
        device = self.machine.device
        lines = []
        for name, level in self.machine.levels.items():
            rates = ", ".join(
                f"{kind.replace('_', '-')} {link.bytes_per_second / 1e9:.3g}"
                for kind, link in self.collectives[name].items()
            )
            size = "" if level.size is None else f" of {level.size}"
            alone = f"; one pair alone {self.alone[name] / 1e9:.3g}" if name in self.alone else ""
            lines.append(
                f"level {name}{size}: {level.gigabytes_per_second:g} GB/s{_share(level)}{alone}"
                f"{'; ' + rates if rates else ''}; latency {level.latency_microseconds:g} us; "
                f"computing loses {level.slows_compute:g} s a second"
            )
        sides = ", ".join(f"{side}: {rate:.3g}" for side, rate in self.products.items())
        lines.append(
            f"device {device.name}: {device.line_matrix_tflops:g} TFLOP/s in square products "
            f"({sides}), {device.matrix_tflops:g} in training; copies "
            f"{device.memory_gigabytes_per_second:g} GB/s; an operation starts in "
            f"{device.launch_microseconds:g} us"
        )
        return "\n".join([*lines, *(f"surprise: {line}" for line in self.lines)])


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _share(level: LevelConfig) -> str:
    rate, line = level.gigabytes_per_second, level.line_gigabytes_per_second
    return "" if rate is None or line is None else f" ({rate / line:.0%} of the line rate)"


def _measure(mesh: Mesh, per_host: int, stated: MachineConfig | None) -> Found:
    world, strides = mesh.world, mesh.levels
    device = stated.device if stated is not None else MachineConfig().device
    measured, products = measure_device(world.device, device)
    measured.ranks_per_host = per_host
    if world.size == 1:
        return Found(MachineConfig({}, measured), products, {}, {}, [])
    pairs = [link.bytes_per_second for link in measure_pairs(mesh.hierarchy())]
    everyone = world.gather(torch.tensor(pairs, dtype=torch.float64, device=world.device))
    usual = everyone.median(0).values.tolist()
    levels = cluster(strides, usual, per_host)
    alone = _alone(mesh, levels)
    over = Mesh(MeshShape(levels), world, mesh.timeout).hierarchy()
    links = [_agree(mesh, link) for link in measure_pairs(over)]
    collectives = [
        {name: _agree(mesh, link) for name, link in found.items()}
        for found in measure_collectives(over)
    ]
    links = [_fastest(link, found) for link, found in zip(links, collectives, strict=True)]
    losses = [_usual(world, loss) for loss in measure_contention(over, links)]
    machine = machine_of(levels, links, losses, measured, stated)
    rates = [link.bytes_per_second for link in links]
    lines = list(surprises(strides, everyone.tolist(), levels, rates, stated))
    by_level = dict(zip(levels.names, collectives, strict=True))
    return Found(machine, products, by_level, alone, lines)


def _fastest(pair: Link, collectives: dict[str, Link]) -> Link:
    """What a level reaches: in exchanges of two ranks, or in a collective."""
    rates = [link.bytes_per_second for link in (pair, *collectives.values())]
    return Link(max(rates), pair.latency_seconds)


def _agree(mesh: Mesh, link: Link) -> Link:
    """The median over all ranks."""
    own = torch.tensor(
        [link.bytes_per_second, link.latency_seconds], dtype=torch.float64, device=mesh.device
    )
    return median_link([Link(*row) for row in mesh.world.gather(own).tolist()])


def _usual(world: World, seconds: float) -> float:
    """The median over all ranks."""
    own = torch.tensor([seconds], dtype=torch.float64, device=world.device)
    return float(world.gather(own).median())


def _alone(mesh: Mesh, levels: Levels) -> dict[str, float]:
    """Bytes a second of one pair at the shortest distance of each level."""
    found = {}
    for name, stride in zip(levels.names, levels.strides, strict=True):
        rate = measure_alone(mesh.hierarchy(), mesh.levels.strides.index(stride)) or 0.0
        own = torch.tensor([rate], dtype=torch.float64, device=mesh.device)
        found[name] = float(mesh.world.maximum(own).item())
    return found
