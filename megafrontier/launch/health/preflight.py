"""Preflight: before the first step, is every node fit for the run?

Every rank tries its device, its links and the storage, and gathers a few numbers from all ranks. So
all ranks reach the same verdict, and rank 0 names the hosts that failed.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path

import torch

from megafrontier.checkpoint.folder import clean_hidden
from megafrontier.common.checkpoints import list_checkpoints, step_of
from megafrontier.common.errors import (
    NodesUnfit,
    RunFailed,
    StorageFailed,
    UserError,
    as_run_directory_error,
)
from megafrontier.common.files import sync_file
from megafrontier.config import Config, DeviceConfig
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.links import measure
from megafrontier.launch.rendezvous import check_placement
from megafrontier.parallel.env import Identity
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.world import World
from megafrontier.plan.footprint import GIB
from megafrontier.plan.reserve import Reserve
from megafrontier.plan.resolve import RunPlan
from megafrontier.training.callbacks.save import checkpoint_bytes, checkpoint_root

SKEW_SECONDS = 5.0
SEEN_SECONDS = 10.0
"""How long a file written on one host may take to be seen on another."""
NAMED_HOSTS = 16
"""The most hosts that are named in messages about no bad nodes."""
STORAGE = "run.directory"
Problem = UserError | StorageFailed
"""What is wrong on a rank."""


def preflight(
    config: Config,
    plan: RunPlan,
    identity: Identity,
    mesh: Mesh,
    warn: Callable[[str], None],
) -> None:
    """Check everything. `warn` is called on rank 0 for slow links and wrong clocks.

    Raises on all ranks: UserError if there is no room for checkpoints; NodesUnfit if few hosts
    fail, which are then in bad-nodes.txt; RunFailed if most hosts fail, or StorageFailed if the
    storage failed them.
    """
    directory, world = Path(config.run.directory), mesh.world
    world.run_on_all(partial(check_room, config, plan, world))
    hosts, clocks, rates = _measure(plan, identity, mesh)
    slow = slow_link(config, plan, world, rates, len(hosts.unique()))
    problem: Problem | None = None
    with world.status.doing("its device"):
        # A launcher's ranks have checked theirs before communicators took memory.
        if world.device.type != "cuda" or not identity.has_launcher:
            problem = check_device(plan.machine.device, world.device)
    storage = check_storage(directory, identity, world)
    _refuse(problem or storage, hosts, identity, world, directory)
    if config.preflight.if_slow == "fail":
        _refuse(slow, hosts, identity, world, directory)
    for found in slow, clock_skew(clocks, world.rank):
        for line in _named_hosts(found, identity.host, world, NAMED_HOSTS).values():
            warn(f"warning: preflight: {line}")


def _refuse(
    problem: Problem | None,
    hosts: torch.Tensor,
    identity: Identity,
    world: World,
    directory: Path,
) -> None:
    """End the run if some ranks have a problem. Unless most hosts have one, the next start is
    without these hosts. `hosts` [ranks]: a number for each host. Raises as `preflight` does."""
    flags = [problem is not None, isinstance(problem, StorageFailed)]
    found = world.gather(torch.tensor(flags, dtype=torch.float64, device=world.device))
    failed, by_storage = (len(hosts[flag].unique()) for flag in found.cpu().bool().unbind(1))
    if not failed:
        return
    count = len(hosts.unique())
    # A launcher's job of one node can move to another node. Local ranks have only this host.
    is_general = 2 * failed > count and (count > 1 or not identity.has_launcher)
    most = min(failed, NAMED_HOSTS) if is_general else failed
    named = _named_hosts(problem, identity.host, world, most)
    line = "; ".join(named.values())
    if is_general:
        kind = StorageFailed if 2 * by_storage > count else RunFailed
        raise kind(f"preflight: {failed} of {count} hosts fail: {line}")
    add = partial(excluded_nodes.add, directory, named)
    world.run_on_all(add if world.rank == 0 else lambda: None)
    raise NodesUnfit(f"preflight: {line}")


def _named_hosts(problem: Problem | None, host: str, world: World, most: int) -> dict[str, str]:
    """Each host with a problem and a line about it, `most` hosts at most; the same on every rank.
    `host`: this rank's."""
    named: dict[str, str] = {}
    while len(named) < most:
        mine = None if problem is None or host in named else f"{host}: {problem}"
        line = world.first_error(mine)
        if line is None:
            break
        named[line.partition(": ")[0]] = line
    return named


# Devices


def check_device(device: DeviceConfig, found: torch.device) -> UserError | None:
    """What is wrong with a rank's device: too little free memory, or it does not answer."""
    if device.memory_gib is None or device.is_stood_in_for_by(found.type):
        return None
    need = device.memory_gib - Reserve.of_device(device).gib
    name = "host" if found.type == "cpu" else f"device {found.index}"
    try:
        if found.type == "cuda":
            free = torch.cuda.mem_get_info(found)[0] / GIB
        else:  # All memory, because other processes of a host come and go.
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except RuntimeError as error:  # torch: the device fails, or has no memory left for a context
        said = str(error).splitlines()[0]
    else:
        if free >= need:
            return None
        said = f"{free:.1f} GiB of memory"
    return UserError(f"{name}: {said}, need {need:.1f} GiB (machine.device.memory_gib)")


def check_rank(device: DeviceConfig, identity: Identity, check_memory: bool) -> None:
    """Check a launcher's rank before the ranks meet, so before RCCL takes memory.

    Raises UserError if it is not one of `machine.device.ranks_per_host` consecutive ranks a host,
    if the machine file has accelerators and torch finds none, if the host has fewer than ranks, or,
    with `check_memory`, if another process uses the memory of this rank's.
    """
    if not identity.has_launcher:
        return
    check_placement(identity, device.ranks_per_host)
    if device.name == "cpu":
        return
    count = torch.cuda.device_count()
    # A launcher that binds devices to ranks shows each rank one device.
    if 1 < count <= identity.local_rank:
        raise UserError(
            f"{identity.source}: local rank {identity.local_rank} on {identity.host} sees {count} "
            "accelerators; need no more ranks a host, or machine.device.name=cpu"
        )
    if not device.is_accelerator:
        return
    if not torch.cuda.is_available():
        raise UserError(
            f"machine.device.name: {device.name}, but torch finds no accelerator; need a node with "
            "one, and a torch for it"
        )
    if check_memory:
        found = torch.device("cuda", identity.local_rank % count)
        if (problem := check_device(device, found)) is not None:
            raise UserError(f"{problem}, or preflight.enabled=false")


# Links and clocks


def _measure(
    plan: RunPlan, identity: Identity, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What all ranks measure: a number for each host [ranks], clocks [ranks] in seconds, rates
    [ranks, levels] in GB/s (infinite for a level of one rank)."""
    world = mesh.world
    rates = [0.0] * len(plan.levels.sizes)
    for _ in range(2):  # one may be disturbed for a moment
        for level, stated in enumerate(stated_rates(plan, world.device)):
            size = max(2**20, min(2**26, int((stated or 0) * 5e6)))  # about 5 ms
            rate = min(measure(hierarchy, level, size) for hierarchy in mesh.linked())
            rates[level] = max(rates[level], rate)
    world.barrier()  # so that all ranks read their clocks at the same time
    own = torch.tensor([identity.host_number, time.time(), *rates], dtype=torch.float64)
    found = world.gather(own.to(world.device)).cpu()
    return found[:, 0], found[:, 1], found[:, 2:]


def stated_rates(plan: RunPlan, device: torch.device) -> list[float | None]:
    """The machine file's GB/s of each level; None if it states none, or if CPUs stand in for the
    machine's devices."""
    machine = plan.machine
    rates = [level.gigabytes_per_second for level in machine.levels.values()]
    stands_in = machine.device.is_stood_in_for_by(device.type)
    return [None] * len(rates) if stands_in else rates


def slow_link(
    config: Config, plan: RunPlan, world: World, rates: torch.Tensor, hosts: int
) -> UserError | None:
    """This rank's slow link, if it has one: below `preflight.slow_link` of the stated rate, or of
    the median over all ranks."""
    for level, stated in enumerate(stated_rates(plan, world.device)):
        # Ranks of one host are not compared: their rates differ by which of them had the cores.
        if plan.levels.sizes[level] == 1 or (stated is None and hosts == 1):
            continue
        usual = float(rates[:, level].median()) if stated is None else stated
        rate, need = float(rates[world.rank, level]), config.preflight.slow_link * usual
        if rate < need:
            of = f"all ranks' median {usual:.3g}" if stated is None else f"stated {usual:g}"
            name = plan.levels.names[level]
            return UserError(f"link {name} {rate:.3g} GB/s, need {need:.3g} ({of})")
    return None


def clock_skew(clocks: torch.Tensor, rank: int) -> UserError | None:
    """How far this rank's clock is from the median, if too far."""
    skew = float(clocks[rank] - clocks.median())
    if abs(skew) <= SKEW_SECONDS:
        return None
    return UserError(f"clock off by {skew:+.1f} s, need within {SKEW_SECONDS:g} s")


# Storage


def clear_room(config: Config, world: World) -> None:
    """Delete what a killed save or deletion left, because it occupies the room of the next save.
    All ranks wait, however long it takes: this is no check of a node."""
    if world.rank == 0:
        with suppress(OSError):
            clean_hidden(checkpoint_root(config))
    world.barrier()


def check_room(config: Config, plan: RunPlan, world: World) -> None:
    """Check on rank 0 that there is room for checkpoints: for those that `checkpoint.keep` asks for
    and that are not there yet, and for the next one, which is written before the oldest goes.

    Raises UserError if there is not.
    """
    if world.rank:
        return
    root = checkpoint_root(config)
    with world.status.doing(STORAGE):
        own = list_checkpoints(root)
        where = root if root.exists() else Path(config.run.directory)  # it may be a link
        free = shutil.disk_usage(where).free / GIB
    count = max(1, min(config.checkpoint.keep + 1 - len(own), _saves_to_come(config, own)))
    need = count * checkpoint_bytes(config, plan) / GIB
    if free < need:
        raise UserError(
            f"run.directory: {where}: {free:.3g} GiB free, need {need:.3g} for "
            f"{count} checkpoints (checkpoint.keep {config.checkpoint.keep})"
        )


def _saves_to_come(config: Config, own: Sequence[Path]) -> int:
    """How many checkpoints will be saved at most after the newest of the run's `own`."""
    done = (step_of(own[-1]) or 0) if own else 0
    steps = max(1, (config.train.stop_at or config.train.steps) - done)
    # By time, any step may be saved.
    every = 1 if config.checkpoint.minutes else config.checkpoint.every
    return ceil(steps / (every or steps))


def check_storage(directory: Path, identity: Identity, world: World) -> Problem | None:
    """Why this host cannot write to the run directory, or does not see a file that rank 0 writes
    there, if so; one rank a host tries. All ranks must call this."""

    def write() -> str:
        # A name that no host has looked for: a file system may remember that it was missing.
        name = f".preflight-{secrets.token_hex(8)}"
        # Only the work on files has this status. A rank in an exchange waits for another's work.
        with world.status.doing(STORAGE):
            (directory / name).touch()
        return name

    path = directory / world.broadcast_from_rank_0(write)
    problem = None
    with world.status.doing(STORAGE):
        if identity.local_rank == 0:
            problem = _try_storage(path, identity.rank)
    world.barrier()
    if world.rank == 0:
        path.unlink()
    return problem


def _try_storage(path: Path, rank: int) -> Problem | None:
    """Why this host cannot write beside `path`, or does not see it within SEEN_SECONDS, if so."""
    directory, deadline = path.parent, time.monotonic() + SEEN_SECONDS
    trial = directory / f".preflight-{rank}"
    try:
        with trial.open("wb") as file:
            file.write(b"trial")
            sync_file(file)
        trial.unlink()
        while not path.exists():
            if time.monotonic() > deadline:
                need = "not the folder that rank 0 sees, need one that hosts share"
                return UserError(f"run.directory: {directory}: {need}")
            time.sleep(0.1)
    except OSError as error:
        return as_run_directory_error(error, directory)
    return None
