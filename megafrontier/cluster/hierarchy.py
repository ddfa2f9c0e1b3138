"""One process's view of the machine: its coordinates and a process group for each level."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from megafrontier.cluster.identity import Identity
from megafrontier.cluster.levels import Levels
from megafrontier.cluster.rollcall import RollCall
from megafrontier.errors import PeersLost, RanksAbsent, UserError


@dataclass(frozen=True)
class Hierarchy:
    """Levels, this rank's coordinates, and the group of its peers at each level.

    The group of a level of size 1 is None: nothing crosses it. The methods here use groups of their
    own, `control`, because the moves of weights and gradients may be under way on `groups`, and two
    rows of collectives on one group would not have the same order on every rank.
    """

    levels: Levels
    rank: int
    groups: tuple[dist.ProcessGroup | None, ...]
    device: torch.device
    control: tuple[dist.ProcessGroup | None, ...] = ()
    coordinates: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "coordinates", self.levels.coordinates(self.rank))

    @property
    def size(self) -> int:
        return self.levels.ranks

    def piece(self, depth: int) -> tuple[int, int]:
        """(number, count) of this rank's piece of a buffer cut through `depth` levels."""
        number = 0
        for size, coordinate in zip(
            self.levels.sizes[:depth], self.coordinates[:depth], strict=True
        ):
            number = number * size + coordinate
        return number, prod(self.levels.sizes[:depth])

    def is_first_replica(self, depth: int) -> bool:
        """Whether this rank is the first of those that hold the same piece at `depth`."""
        return all(coordinate == 0 for coordinate in self.coordinates[depth:])

    def sum(self, values: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """Sum a small float64 tensor [n] over the first `depth` levels (default: all).

        Each level gathers and adds in the order of the coordinates, so that every rank holds the
        same bits; an all-reduce promises that only within one group.
        """
        for group in self.control[:depth]:
            if group is not None:
                values = torch.stack(_all_of(values, group)).sum(0)
        return values

    def sum_and_maximum(
        self, sums: torch.Tensor, maxima: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Small float64 tensors [n] summed over all ranks and [m] with each element's largest, in
        one message a level; the same bits on every rank, as `sum`."""
        count = len(sums)
        for group in self.control:
            if group is not None:
                found = torch.stack(_all_of(torch.cat([sums, maxima]), group))
                sums, maxima = found[:, :count].sum(0), found[:, count:].amax(0)
        return sums, maxima

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's small float64 tensor [n], as [size, n] in rank order, on every rank."""
        found = values.view(1, -1)
        for group in self.control:
            if group is not None:
                found = torch.cat(_all_of(found, group))
        return found

    def all_true(self, ok: bool) -> bool:
        """Whether `ok` holds on every rank. Also a barrier."""
        failures = torch.tensor([0.0 if ok else 1.0], dtype=torch.float64, device=self.device)
        return bool(self.sum(failures).item() == 0)

    def first_error(self, message: str | None) -> str | None:
        """The message of the lowest rank that has one, on every rank. Also a barrier."""
        if self.all_true(message is None):
            return None
        mine = self.size if message is None else self.rank
        lowest = -int(self.maximum(torch.tensor([-mine], device=self.device)).item())
        return self._broadcast_text(message if self.rank == lowest else None)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise largest value of a small tensor [n] over all ranks."""
        found = values.clone()
        for group in self.control:
            if group is not None:
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return found

    def _broadcast_text(self, text: str | None) -> str:
        """The text of the one rank that has one; the others give None and add zeros to it."""
        raw = b"" if text is None else text.encode()
        length = int(self.maximum(torch.tensor([len(raw)], device=self.device)).item())
        data = torch.zeros(length, dtype=torch.float64, device=self.device)
        data[: len(raw)] = torch.tensor(list(raw), dtype=torch.float64, device=self.device)
        return bytes(int(x) for x in self.sum(data).tolist()).decode()


def _all_of(values: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return parts


@contextmanager
def join(
    identity: Identity,
    levels: Levels,
    device: torch.device,
    timeout_seconds: float = 1800,
    meeting_seconds: float = 600,
    met: Callable[[RollCall | None], None] = lambda roll: None,
) -> Iterator[Hierarchy]:
    """Meet the other ranks, make a group for each level, and leave in order at the end.

    `met` is called with the roll of the ranks that have met, None for one alone, before anything
    else that needs them.

    Raises UserError when the host names contradict the levels, RanksAbsent when ranks do not come
    in `meeting_seconds`, PeersLost when rank 0 does not. `timeout_seconds` is that of every
    collective. Works with gloo on a CPU and with NCCL or RCCL (both are torch's `nccl`) on a GPU.
    """
    if levels.ranks != identity.world_size:
        raise UserError(
            f"machine.levels: hold {levels.ranks} ranks, but {identity.world_size} were started"
        )
    if identity.world_size == 1:
        met(None)
        yield Hierarchy(levels, 0, (None,) * len(levels.sizes), device)
        return
    timeout = timedelta(seconds=timeout_seconds)
    roll = _meet(identity, meeting_seconds)
    roll.store.set_timeout(timeout)
    met(roll)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("world", roll.store),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timeout,
    )
    try:
        groups, control = (_groups(levels, identity.rank, timeout) for _ in range(2))
        hierarchy = Hierarchy(levels, identity.rank, groups, device, control)
        _check_hosts(hierarchy, identity)
        yield hierarchy
    except BaseException:
        give_up(device)
        raise
    dist.destroy_process_group()


def give_up(device: torch.device) -> None:
    """Leave the groups without the others, who may be gone. NCCL's and RCCL's own way out waits
    for every collective that has begun, and so for ever for those of ranks that are."""
    if device.type != "cuda":
        dist.destroy_process_group()
    elif hasattr(dist.distributed_c10d, "_abort_process_group"):  # torch has no public name for it
        dist.distributed_c10d._abort_process_group()


def _meet(identity: Identity, seconds: float) -> RollCall:
    """The roll of all ranks, which are there. Raises RanksAbsent or PeersLost when they are not."""
    # Told the number of ranks, torch's store would wait for so many, and could not say for whom.
    place = f"{identity.rendezvous}?rank={identity.rank}&world_size=-1"
    try:
        store, _, _ = next(rendezvous(place, timeout=timedelta(seconds=seconds)))
        roll = RollCall(store, identity)
        absent = roll.meet(seconds)
    except RuntimeError as error:  # torch's, of the store
        raise _unmet(identity, error) from error
    if absent:
        raise RanksAbsent(absent, f"did not come to {identity.rendezvous} within {seconds:g} s")
    return roll


def _unmet(identity: Identity, error: RuntimeError) -> PeersLost:
    """Rank 0 could not open the store, or the others could not reach it there."""
    why = str(error).splitlines()[0]
    if identity.rank == 0:
        return PeersLost(f"rank 0: cannot wait at {identity.rendezvous}: {why}")
    lost = PeersLost(f"rank 0: no answer at {identity.rendezvous}: {why}")
    # It is not there to say so. Two a host do: one of them may be lost too.
    lost.is_one_ranks = identity.local_rank < 2
    return lost


def _groups(levels: Levels, rank: int, timeout: timedelta) -> tuple[dist.ProcessGroup | None, ...]:
    # Each rank creates only its own groups: creating everybody's would be O(world) work a rank.
    # They do not inherit the timeout; NCCL's own is 10 minutes.
    return tuple(
        dist.new_group(levels.peers(rank, i), timeout=timeout, use_local_synchronization=True)
        if size > 1
        else None
        for i, size in enumerate(levels.sizes)
    )


def _check_hosts(hierarchy: Hierarchy, identity: Identity) -> None:
    """Refuse levels that hosts cut through: up to some level all peers share a host, beyond it no
    two do. Every rank looks at all hosts, so that all refuse alike."""
    mine = torch.tensor([identity.host_number], dtype=torch.float64, device=hierarchy.device)
    hosts = hierarchy.gather(mine).flatten().tolist()
    held = next((i for i, other in enumerate(hosts) if other != hosts[0]), len(hosts))
    firsts = hosts[::held]
    if hosts != [first for first in firsts for _ in range(held)] or len({*firsts}) < len(firsts):
        raise UserError(
            f"machine.levels: {len(hosts)} ranks, of which the first host has {held} in a row and "
            "others another number; need the same number of consecutive ranks on every host"
        )
    sizes = hierarchy.levels.sizes
    fits = [prod(sizes[:depth]) for depth in range(len(sizes) + 1)]
    if held not in fits:
        steps = " × ".join(f"{n} {s}" for n, s in zip(hierarchy.levels.names, sizes, strict=True))
        raise UserError(
            f"machine.levels: {steps}, but every host has {held} ranks, which cuts through a "
            f"level; need sizes that multiply to {held} up to a host's edge"
        )


def misplaced(identity: Identity, expected: int | None) -> str | None:
    """What is wrong with the ranks that a launcher put on this rank's host, where the machine file
    has `expected` of them. Local ranks are an arrangement made on purpose and are not checked."""
    if expected is None or identity.source in ("local", "alone"):
        return None
    if identity.local_rank < expected and identity.rank % expected == identity.local_rank:
        return None
    return (
        f"machine.device.ranks_per_host: rank {identity.rank} is local rank "
        f"{identity.local_rank} on {identity.host}, need {expected} consecutive ranks a host"
    )


def check_ranks_per_host(hierarchy: Hierarchy, identity: Identity, expected: int | None) -> None:
    """Refuse, on every rank alike, a launch whose ranks on a host are not the machine file's: a
    rank that saw it alone would leave the others waiting. Raises UserError."""
    error = hierarchy.first_error(misplaced(identity, expected))
    if error is not None:
        raise UserError(error)
