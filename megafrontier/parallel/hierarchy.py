"""One process's view of the machine: its coordinates and a process group for each level."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from megafrontier.common.errors import LOST, StorageFailed, UserError, as_generic_fatal_error
from megafrontier.parallel.collectives import all_gather_stacked
from megafrontier.parallel.levels import Levels
from megafrontier.parallel.rank_status import RankStatus

T = TypeVar("T")


class Waiting(Protocol):
    """Has begun collectives."""

    def drain(self) -> None:
        """Return when they are over."""
        ...


class CommArbiter:
    """Lets one engine at a time have collectives under way on the shared groups; those of two could
    be in another order on every rank."""

    def __init__(self) -> None:
        self._holder: Waiting | None = None

    def take(self, taker: Waiting) -> None:
        """Go on when the collectives of whoever had the turn are over."""
        if self._holder is not taker:
            self.end()
        self._holder = taker

    def end(self) -> None:
        """Return when no collective is under way any more. Raises what one of them raised."""
        if self._holder is not None:
            self._holder.drain()


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
    activity: RankStatus = field(default_factory=RankStatus)
    turn: CommArbiter = field(default_factory=CommArbiter)
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

    def broadcast_to_replicas(self, tensors: Iterable[torch.Tensor], depth: int) -> None:
        """Give all that hold the same piece at `depth` the first replica's tensors, in place: the
        outermost level first, so that a source has them when its level's turn comes."""
        self.turn.end()
        for tensor in tensors:
            for level in reversed(range(depth, len(self.levels.sizes))):
                if (group := self.groups[level]) is not None:
                    source = self.levels.peers(self.rank, level)[0]
                    dist.broadcast(tensor, source, group=group)

    def sum(self, values: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """Sum a small float64 tensor [n] over the first `depth` levels (default: all).

        Each level gathers and adds in the order of the coordinates, so that every rank holds the
        same bits; an all-reduce promises that only within one group.
        """
        for group in self.control[:depth]:
            if group is not None:
                values = all_gather_stacked(values, group).sum(0)
        return values

    def sum_and_maximum(
        self, sums: torch.Tensor, maxima: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Small float64 tensors [n] summed over all ranks and [m] with each element's largest, in
        one message a level; the same bits on every rank, as `sum`."""
        count = len(sums)
        for group in self.control:
            if group is not None:
                found = all_gather_stacked(torch.cat([sums, maxima]), group)
                sums, maxima = found[:, :count].sum(0), found[:, count:].amax(0)
        return sums, maxima

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's small float64 tensor [n], as [size, n] in rank order, on every rank."""
        found = values.view(1, -1)
        for group in self.control:
            if group is not None:
                found = all_gather_stacked(found, group).flatten(0, 1)
        return found

    def drain_and_barrier(self) -> None:
        """Return when no rank has any collective under way."""
        self.turn.end()
        self.all_true(True)

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

    def run_on_all(self, act: Callable[[], T]) -> T:
        """What `act` returns; where it raises UserError or StorageFailed on some ranks, or a file
        system's error, which is one or the other, all raise the lowest one's."""
        problem: UserError | StorageFailed | None = None
        try:
            found = act()
        except (UserError, StorageFailed) as error:
            problem = error
        except OSError as error:
            problem = as_generic_fatal_error(error)
        self.raise_first(problem)
        return found

    def raise_first(self, problem: UserError | StorageFailed | None) -> None:
        """Raise the lowest rank's problem on all ranks, where some have one."""
        mine = None if problem is None else f"{problem.code} {problem}"
        agreed = self.first_error(mine)
        if agreed is not None:
            code, _, line = agreed.partition(" ")
            raise StorageFailed(line) if int(code) == LOST else UserError(line)

    def broadcast_from_rank_0(self, look: Callable[[], str]) -> str:
        """What `look` returns on rank 0, on every rank.

        File systems do not show all nodes the same at every moment, and another run may be writing.
        All ranks raise what it raises, as in `run_on_all`.
        """
        return self._broadcast_text(self.run_on_all(lambda: look() if self.rank == 0 else None))

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise largest value of a small tensor [n] over all ranks."""
        found = values.clone()
        for group in self.control:
            if group is not None:
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return found

    def _broadcast_text(self, text: str | None) -> str:
        """The text of the one rank that has one; the others give None, which is less than it in
        every byte. No rank holds more than the text itself."""
        raw = b"" if text is None else text.encode()
        length = int(self.maximum(torch.tensor([len(raw)], device=self.device)).item())
        data = torch.zeros(length, dtype=torch.uint8, device=self.device)
        data[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8, device=self.device)
        return bytes(self.maximum(data).tolist()).decode()
