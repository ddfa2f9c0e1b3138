"""Before the first step: is every node fit for the run?

Each rank tries its device, its links and the storage, and tells a few numbers, which all ranks
gather; so all come to the same verdict, and rank 0 names the hosts.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megafrontier.common.errors import (
    NodesUnfit,
    RunFailed,
    StorageFailed,
    UserError,
)
from megafrontier.config import Config, DeviceConfig
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.links import measure
from megafrontier.launch.health.storage import (
    STORAGE,
    Problem,
    check_checkpoints,
    check_shared,
    check_storage,
)
from megafrontier.parallel.env import Identity
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.training.plan import GIB, RunPlan

MEMORY_PART = 0.9
"""Drivers and firmware keep some of what is sold; a process of an earlier job keeps more."""
SKEW_SECONDS = 1.0
NAMED = 16
"""Hosts that a line names at most."""


@dataclass(frozen=True)
class Table:
    """What all ranks told, by rank: `host` [ranks] a number for each host, `clock` [ranks] in
    seconds, `rates` [ranks, levels] in GB/s, infinite where a level has one rank."""

    host: torch.Tensor
    clock: torch.Tensor
    rates: torch.Tensor

    def ranks_beside(self, rank: int) -> str:
        """The ranks of a rank's host, for people."""
        mine = torch.nonzero(self.host == self.host[rank]).flatten().tolist()
        return f"ranks {mine[0]} to {mine[-1]}" if len(mine) > 1 else f"rank {mine[0]}"

    @property
    def hosts(self) -> int:
        return len(self.host.unique())


@dataclass(frozen=True)
class Place:
    """What all ranks told, and which of them this is."""

    table: Table
    identity: Identity
    hierarchy: Hierarchy


def preflight(
    config: Config,
    plan: RunPlan,
    identity: Identity,
    hierarchy: Hierarchy,
    warn: Callable[[str], None],
) -> None:
    """Try everything; what is only slow is a call of `warn`, on rank 0.

    Raises on every rank alike: NodesUnfit where single hosts fail, their names in bad-nodes.txt;
    where most of them do RunFailed, or StorageFailed if it is the storage's own fault; UserError
    where the storage lacks room.
    """
    directory = Path(config.run.directory)
    hierarchy.world.run_on_all(partial(check_checkpoints, config, plan, hierarchy))
    table = _tell(plan, identity, hierarchy)
    if slow_links(config, plan, table, hierarchy):  # perhaps only disturbed for a moment
        again = _tell(plan, identity, hierarchy)
        table = replace(table, rates=torch.maximum(table.rates, again.rates))
    problem: Problem | None = None
    with hierarchy.world.status.doing("its device"):
        # A launcher's have tried their accelerators before they met.
        if hierarchy.device.type != "cuda" or not identity.has_launcher:
            lacking = check_device(plan.machine.device, hierarchy.device)
            problem = UserError(lacking) if lacking else None
    with hierarchy.world.status.doing(STORAGE):
        problem = problem or check_storage(directory, identity)
    if table.hosts > 1:
        problem = check_shared(directory, identity, hierarchy) or problem
    place = Place(table, identity, hierarchy)
    _refuse(problem, place, directory)
    slow, skewed = slow_links(config, plan, table, hierarchy), clock_skew(table)
    if config.preflight.if_slow == "fail":
        _refuse(slow.get(hierarchy.world.rank), place, directory)
    for found in filter(None, (slow, skewed)):
        for line in _name_hosts(found.get(hierarchy.world.rank), place, NAMED).values():
            warn(f"warning: preflight: {line}")


def _tell(plan: RunPlan, identity: Identity, hierarchy: Hierarchy) -> Table:
    levels = range(len(hierarchy.levels.sizes))
    stated = stated_rates(plan, hierarchy)
    rates = [measure(hierarchy, level, _size_bytes(stated[level])) for level in levels]
    hierarchy.world.barrier()  # so that all read their clocks at one time
    mine = torch.tensor([identity.host_number, time.time(), *rates], dtype=torch.float64)
    told = hierarchy.world.gather(mine.to(hierarchy.device)).cpu()
    return Table(told[:, 0], told[:, 1], told[:, 2:])


def stated_rates(plan: RunPlan, hierarchy: Hierarchy) -> list[float | None]:
    """The machine file's GB/s of each level. None are expected of CPUs that stand in for its
    devices."""
    machine = plan.machine
    rates = [level.gigabytes_per_second for level in machine.levels.values()]
    stands_in = machine.device.is_stood_in_for_by(hierarchy.device.type)
    return [None] * len(rates) if stands_in else rates


def _size_bytes(rate: float | None) -> int:
    """About 5 ms at the stated rate."""
    return 2**20 if rate is None else max(2**20, min(2**26, int(rate * 5e6)))


def check_device(device: DeviceConfig, found: torch.device) -> str | None:
    """What the device lacks, if anything."""
    if device.memory_gib is None or device.is_stood_in_for_by(found.type):
        return None
    need = MEMORY_PART * device.memory_gib
    kind = "host" if found.type == "cpu" else f"device {found.index}"
    try:
        free = _free_gib(found)
    except RuntimeError as error:  # torch's, of a device that fails or has no room to begin at all
        said = str(error).splitlines()[0]
        return f"{kind}: {said}, need {need:.1f} GiB of memory (machine.device.memory_gib)"
    if free >= need:
        return None
    return f"{kind}: {free:.1f} GiB of memory, need {need:.1f} (machine.device.memory_gib)"


def _free_gib(found: torch.device) -> float:
    """Of a device what no other process has; of a host all, which others only borrow."""
    if found.type == "cuda":
        return torch.cuda.mem_get_info(found)[0] / GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def slow_links(
    config: Config, plan: RunPlan, table: Table, hierarchy: Hierarchy
) -> dict[int, Problem]:
    """What is slow, by rank. Ranks of one host are not compared among each other: what differs
    there is whose turn it was on the cores."""
    found: dict[int, Problem] = {}
    for level, stated in enumerate(stated_rates(plan, hierarchy)):
        if hierarchy.levels.sizes[level] == 1 or (stated is None and table.hosts == 1):
            continue
        rates, name = table.rates[:, level], hierarchy.levels.names[level]
        usual = float(rates.median()) if stated is None else stated
        need = config.preflight.slow_link * usual
        of = f"all ranks' median {usual:.3g}" if stated is None else f"stated {usual:g}"
        for rank in torch.nonzero(rates < need).flatten().tolist():
            text = f"link {name} {rates[rank]:.3g} GB/s, need {need:.3g} ({of})"
            found.setdefault(rank, UserError(text))
    return found


def clock_skew(table: Table) -> dict[int, Problem]:
    """Whose clock differs from most hosts', by the host's first rank. A rank that was late to read
    it counts as its host's earliest does."""
    hosts, inverse = table.host.unique(return_inverse=True)
    earliest = torch.full((len(hosts),), float("inf"), dtype=torch.float64)
    earliest.scatter_reduce_(0, inverse, table.clock, "amin")
    skew = earliest - earliest.median()
    found: dict[int, Problem] = {}
    for number in torch.nonzero(skew.abs() > SKEW_SECONDS).flatten().tolist():
        first = int(torch.nonzero(inverse == number)[0])
        text = f"clock off by {skew[number]:+.1f} s, need within {SKEW_SECONDS:g} s"
        found[first] = UserError(text)
    return found


def _name_hosts(problem: Problem | None, place: Place, most: int) -> dict[str, str]:
    """Each host with a problem and what it is, the same on every rank; so many hosts at most."""
    host, hierarchy = place.identity.host, place.hierarchy
    named: dict[str, str] = {}
    mine = None
    if problem is not None:
        mine = f"{host}\t{host} ({place.table.ranks_beside(hierarchy.world.rank)}): {problem}"
    while len(named) < most:
        heard = hierarchy.world.first_error(None if host in named else mine)
        if heard is None:
            break
        name, _, line = heard.partition("\t")
        named[name] = line
    return named


def _refuse(problem: Problem | None, place: Place, directory: Path) -> None:
    """End where some ranks have a problem, without their hosts the next time unless most have."""
    hosts, hierarchy = place.table.hosts, place.hierarchy
    flags = [problem is not None, isinstance(problem, StorageFailed)]
    mine = torch.tensor(flags, dtype=torch.float64, device=hierarchy.device)
    told = hierarchy.world.gather(mine).cpu().bool()
    count, of_storage = (len(place.table.host[flag].unique()) for flag in told.unbind(1))
    if not count:
        return
    # A job of one node may go to another; of local ranks this host is all there is.
    is_general = 2 * count > hosts and (hosts > 1 or not place.identity.has_launcher)
    named = _name_hosts(problem, place, min(count, NAMED) if is_general else count)
    line = "; ".join(list(named.values())[:NAMED])
    line += f"; and {count - NAMED} more hosts" * (count > NAMED)
    if is_general:
        kind = StorageFailed if 2 * of_storage > hosts else RunFailed
        raise kind(f"preflight: {count} of {hosts} hosts fail: {line}")
    hierarchy.world.run_on_all(partial(_list, directory, named, line, hierarchy))
    raise NodesUnfit(f"preflight: {line}")


def _list(directory: Path, hosts: Iterable[str], line: str, hierarchy: Hierarchy) -> None:
    """Raises StorageFailed where another start would meet the same hosts."""
    if hierarchy.world.rank:
        return
    try:
        excluded_nodes.add(directory, hosts)
    except OSError as error:
        not_listed = f"not listed, {directory / excluded_nodes.FILE_NAME}: {error.strerror}"
        raise StorageFailed(f"preflight: {line}; {not_listed}") from error


def check_present(device: DeviceConfig, identity: Identity, tries_memory: bool) -> None:
    """Raises UserError where a launcher's rank finds no accelerator and the machine file has one,
    or fewer than the host has ranks, or with `tries_memory` one whose memory another process has:
    of a few ranks it is their nodes' matter, of most the environment's."""
    if not identity.has_launcher or device.name == "cpu":
        return
    count = torch.cuda.device_count()
    if 1 < count <= identity.local_rank:  # a launcher that binds them shows each rank one
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
    if tries_memory:  # before RCCL takes some for each of its communicators
        found = torch.device("cuda", identity.local_rank % count)
        if (problem := check_device(device, found)) is not None:
            raise UserError(f"{problem}, or preflight.enabled=false")
