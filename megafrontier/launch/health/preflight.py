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
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

import torch

from megafrontier.checkpoint.folder import clean_partials, list_checkpoints, step_of
from megafrontier.common.errors import (
    NodesUnfit,
    RunFailed,
    StorageFailed,
    UserError,
    as_fatal_error,
    as_run_directory_error,
)
from megafrontier.common.files import sync_file
from megafrontier.config import Config, DeviceConfig
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.links import measure
from megafrontier.parallel.env import Identity
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.world import World
from megafrontier.training.callbacks.save import checkpoint_bytes, checkpoint_root
from megafrontier.training.plan import GIB, RunPlan

FREE_FRACTION = 0.9
"""Of a device's stated memory. Drivers keep some of it; processes of an earlier job keep more."""
SKEW_SECONDS = 5.0
SEEN_SECONDS = 10.0
"""How long a file written on one host may take to be seen on another."""
NAMED_HOSTS = 16
"""The most hosts that are named in messages about no bad nodes."""
STORAGE = "run.directory"
Problem = UserError | StorageFailed
"""What is wrong on a rank."""


@dataclass(frozen=True)
class Measurements:
    """What all ranks measured, by rank: `host` [ranks] is a number for each host, `clock` [ranks]
    in seconds, `rates` [ranks, levels] in GB/s (infinite for a level of one rank)."""

    host: torch.Tensor
    clock: torch.Tensor
    rates: torch.Tensor

    @property
    def hosts(self) -> int:
        return len(self.host.unique())

    def ranks_of_host(self, rank: int) -> str:
        """The ranks of a rank's host, as text."""
        ranks = torch.nonzero(self.host == self.host[rank]).flatten().tolist()
        return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


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
    measured = _measure(plan, identity, mesh)
    if slow_links(config, plan, measured, world.device):  # perhaps only disturbed for a moment
        again = _measure(plan, identity, mesh)
        measured = replace(measured, rates=torch.maximum(measured.rates, again.rates))
    problem: Problem | None = None
    with world.status.doing("its device"):
        # A launcher's ranks have checked theirs before communicators took memory.
        if world.device.type != "cuda" or not identity.has_launcher:
            problem = check_device(plan.machine.device, world.device)
    with world.status.doing(STORAGE):
        problem = problem or check_storage(directory, identity)
    if measured.hosts > 1:
        problem = check_shared(directory, identity, world) or problem
    agreement = Agreement(measured, identity, world, directory)
    agreement.refuse(problem)
    slow, skewed = slow_links(config, plan, measured, world.device), clock_skew(measured)
    if config.preflight.if_slow == "fail":
        agreement.refuse(slow.get(world.rank))
    for found in filter(None, (slow, skewed)):
        for line in agreement.named_hosts(found.get(world.rank), NAMED_HOSTS).values():
            warn(f"warning: preflight: {line}")


@dataclass(frozen=True)
class Agreement:
    """What follows from problems that some ranks have. All ranks call the methods alike."""

    measured: Measurements
    identity: Identity
    world: World
    directory: Path

    def refuse(self, problem: Problem | None) -> None:
        """End the run if some ranks have a problem. Unless most hosts have one, the next start is
        without these hosts. Raises as `preflight` does."""
        hosts, world = self.measured.hosts, self.world
        flags = [problem is not None, isinstance(problem, StorageFailed)]
        found = world.gather(torch.tensor(flags, dtype=torch.float64, device=world.device))
        failed, by_storage = (
            len(self.measured.host[flag].unique()) for flag in found.cpu().bool().unbind(1)
        )
        if not failed:
            return
        # A launcher's job of one node can move to another node. Local ranks have only this host.
        is_general = 2 * failed > hosts and (hosts > 1 or not self.identity.has_launcher)
        named = self.named_hosts(problem, min(failed, NAMED_HOSTS) if is_general else failed)
        line = "; ".join(named.values())
        if is_general:
            kind = StorageFailed if 2 * by_storage > hosts else RunFailed
            raise kind(f"preflight: {failed} of {hosts} hosts fail: {line}")
        add = partial(excluded_nodes.add, self.directory, named)
        world.run_on_all(add if world.rank == 0 else lambda: None)
        raise NodesUnfit(f"preflight: {line}")

    def named_hosts(self, problem: Problem | None, most: int) -> dict[str, str]:
        """Each host with a problem and a line about it, `most` hosts at most; the same on every
        rank."""
        host, mine = self.identity.host, None
        if problem is not None:
            ranks = self.measured.ranks_of_host(self.world.rank)
            mine = f"{host}\t{host} ({ranks}): {problem}"
        named: dict[str, str] = {}
        while len(named) < most:
            message = self.world.first_error(None if host in named else mine)
            if message is None:
                break
            name, _, line = message.partition("\t")
            named[name] = line
        return named


# Devices


def check_device(device: DeviceConfig, found: torch.device) -> UserError | None:
    """What is wrong with a rank's device: too little free memory, or it does not answer."""
    if device.memory_gib is None or device.is_stood_in_for_by(found.type):
        return None
    need = FREE_FRACTION * device.memory_gib
    name = "host" if found.type == "cpu" else f"device {found.index}"
    try:
        if found.type == "cuda":
            free = torch.cuda.mem_get_info(found)[0] / GIB
        else:  # All memory, because other processes of a host come and go.
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except RuntimeError as error:  # torch: the device fails, or has no memory left for a context
        reason = str(error).splitlines()[0]
        line = f"{name}: {reason}, need {need:.1f} GiB of memory (machine.device.memory_gib)"
        return UserError(line)
    if free >= need:
        return None
    line = f"{name}: {free:.1f} GiB of memory, need {need:.1f} (machine.device.memory_gib)"
    return UserError(line)


def check_present(device: DeviceConfig, identity: Identity, check_memory: bool) -> None:
    """Check a launcher's rank before the ranks meet, so before RCCL takes memory.

    Raises UserError if the machine file has accelerators and torch finds none, if the host has
    fewer than ranks, or, with `check_memory`, if another process uses the memory of this rank's.
    """
    if not identity.has_launcher or device.name == "cpu":
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


def _measure(plan: RunPlan, identity: Identity, mesh: Mesh) -> Measurements:
    world = mesh.world
    sizes = [_message_bytes(rate) for rate in stated_rates(plan, world.device)]
    rates = [
        min(measure(hierarchy, level, size) for hierarchy in mesh.linked())
        for level, size in enumerate(sizes)
    ]
    world.barrier()  # so that all ranks read their clocks at the same time
    own = torch.tensor([identity.host_number, time.time(), *rates], dtype=torch.float64)
    found = world.gather(own.to(world.device)).cpu()
    return Measurements(found[:, 0], found[:, 1], found[:, 2:])


def stated_rates(plan: RunPlan, device: torch.device) -> list[float | None]:
    """The machine file's GB/s of each level; None if it states none, or if CPUs stand in for the
    machine's devices."""
    machine = plan.machine
    rates = [level.gigabytes_per_second for level in machine.levels.values()]
    stands_in = machine.device.is_stood_in_for_by(device.type)
    return [None] * len(rates) if stands_in else rates


def _message_bytes(rate: float | None) -> int:
    """About 5 ms at `rate` GB/s."""
    return 2**20 if rate is None else max(2**20, min(2**26, int(rate * 5e6)))


def slow_links(
    config: Config, plan: RunPlan, measured: Measurements, device: torch.device
) -> dict[int, Problem]:
    """The slow links, by rank: below `preflight.slow_link` of the stated rate, or of the median
    over all ranks."""
    found: dict[int, Problem] = {}
    for level, stated in enumerate(stated_rates(plan, device)):
        # Ranks of one host are not compared: their rates differ by which of them had the cores.
        if plan.levels.sizes[level] == 1 or (stated is None and measured.hosts == 1):
            continue
        rates, name = measured.rates[:, level], plan.levels.names[level]
        usual = float(rates.median()) if stated is None else stated
        need = config.preflight.slow_link * usual
        of = f"all ranks' median {usual:.3g}" if stated is None else f"stated {usual:g}"
        for rank in torch.nonzero(rates < need).flatten().tolist():
            text = f"link {name} {rates[rank]:.3g} GB/s, need {need:.3g} ({of})"
            found.setdefault(rank, UserError(text))
    return found


def clock_skew(measured: Measurements) -> dict[int, Problem]:
    """The ranks whose clock differs from the median."""
    skew = measured.clock - measured.clock.median()
    found: dict[int, Problem] = {}
    for rank in torch.nonzero(skew.abs() > SKEW_SECONDS).flatten().tolist():
        text = f"clock off by {skew[rank]:+.1f} s, need within {SKEW_SECONDS:g} s"
        found[rank] = UserError(text)
    return found


# Storage


def clear_room(config: Config, world: World) -> None:
    """Delete what a killed save left, because it occupies the room of the next. All ranks wait,
    however long it takes: this is no check of a node."""
    if world.rank == 0:
        with suppress(OSError):
            clean_partials(checkpoint_root(config))
    world.barrier()


def check_room(config: Config, plan: RunPlan, world: World) -> None:
    """Check on rank 0 that there is room for checkpoints: for those that `checkpoint.keep` asks for
    and that are not there yet, and for the next one, which is written before the oldest goes.

    Raises UserError if there is not, and UserError or StorageFailed if their folder is there and
    cannot be written.
    """
    if world.rank:
        return
    root = checkpoint_root(config)
    with world.status.doing(STORAGE):
        own = list_checkpoints(root)
        count = max(1, min(config.checkpoint.keep + 1 - len(own), _saves_to_come(config, own)))
        is_there = root.exists()  # It may be a link to other storage, or to another user's.
        where = root if is_there else Path(config.run.directory)
        free = shutil.disk_usage(where).free / GIB
        problem = _try_to_write(root, world.rank) if is_there else None
    need = count * checkpoint_bytes(config, plan) / GIB
    if free < need:
        raise UserError(
            f"run.directory: {where}: {free:.3g} GiB free, need {need:.3g} for "
            f"{count} checkpoints (checkpoint.keep {config.checkpoint.keep})"
        )
    if problem is not None:
        raise problem


def _saves_to_come(config: Config, own: Sequence[Path]) -> int:
    """How many checkpoints will be saved after the newest of the run's `own`."""
    done = (step_of(own[-1]) or 0) if own else 0
    steps = max(1, (config.train.stop_at or config.train.steps) - done)
    return ceil(steps / (config.checkpoint.every or steps))


def check_storage(directory: Path, identity: Identity) -> Problem | None:
    """Why this host cannot write to the run directory, if so; one rank a host tries."""
    return _try_to_write(directory, identity.rank) if identity.local_rank == 0 else None


def _try_to_write(directory: Path, rank: int) -> Problem | None:
    trial = directory / f".preflight-{rank}"
    try:
        with trial.open("wb") as file:
            file.write(b"trial")
            sync_file(file)
        trial.unlink()
    except OSError as error:
        return as_run_directory_error(error, directory)
    return None


def check_shared(directory: Path, identity: Identity, world: World) -> Problem | None:
    """Why this host does not see a file that rank 0 writes to the run directory, if so; one rank a
    host looks."""
    # A name that no host has looked for: a file system may remember that it was missing.
    path = directory / world.broadcast_from_rank_0(lambda: f".preflight-{secrets.token_hex(8)}")
    is_there = True
    # Only the work on files has this status. A rank in an exchange waits for another rank's work.
    with world.status.doing(STORAGE):
        try:
            if world.rank == 0:
                path.touch()
        except OSError:  # which check_storage reports
            is_there = False
    is_there = world.all_true(is_there)
    with world.status.doing(STORAGE):
        problem = _wait_for(path) if is_there and identity.local_rank == 0 else None
    world.barrier()
    if world.rank == 0 and is_there:
        path.unlink()
    return problem


def _wait_for(path: Path) -> Problem | None:
    """Why a file is not seen within SEEN_SECONDS, if so."""
    deadline = time.monotonic() + SEEN_SECONDS
    where = f"run.directory: {path.parent}"
    while time.monotonic() < deadline:
        try:
            path.stat()
            return None
        except OSError as error:
            failure = as_fatal_error(error, f"{where}: {error.strerror}")
            if isinstance(failure, StorageFailed):
                return failure
        time.sleep(0.1)
    return UserError(f"{where}: not the folder that rank 0 sees, need one that hosts share")
