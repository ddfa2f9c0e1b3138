"""All ranks of a run and what they agree on: the control plane."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megafrontier.common.errors import (
    FatalError,
    RunFailed,
    StorageFailed,
    UserError,
    as_fatal_os_error,
)
from megafrontier.parallel.fault_injection import fault_point
from megafrontier.parallel.groups import all_gather_stacked

T = TypeVar("T")
_ERRORS: dict[int, type[FatalError]] = {
    kind.code: kind for kind in (UserError, RunFailed, StorageFailed)
}
"""The errors that `World.raise_first` can raise, by exit code."""


class Operation(NamedTuple):
    """Work that a rank does alone, or together with one `peer` (a rank). The name is empty while
    the rank takes part in work of a whole group."""

    name: str = ""
    peer: int | None = None
    waits_for: str = ""
    """The collective or message of other ranks without which the work does not go on."""


class RankStatus:
    """What one rank is doing now. The main thread writes it; the watchdog's threads read it."""

    def __init__(self) -> None:
        self.waits_for: Callable[[], str] = lambda: ""
        """Gives `Operation.waits_for`."""
        self._doing = Operation()
        # Work that the host has given to the device: it is over when the event is.
        self._enqueued: deque[tuple[Operation, torch.cuda.Event]] = deque()

    @property
    def current(self) -> Operation:
        """What the rank is doing; on a GPU what the device is doing, because the host may be far
        ahead of it."""
        # A copy, because the main thread may go on.
        enqueued = (one for one, event in self._enqueued.copy() if not event.query())
        return next(enqueued, self._doing)._replace(waits_for=self.waits_for())

    @contextmanager
    def doing(
        self, name: str, peer: int | None = None, device: torch.device | None = None
    ) -> Iterator[None]:
        """Set the status for the body. It stays set if the body raises, because the other ranks
        then wait for this operation. `device`: the body gives the work to it."""
        self._doing = Operation(name, peer)
        fault_point(name, peer=peer)
        yield
        if device is not None and device.type == "cuda":
            self._enqueue(self._doing)
        self._doing = Operation()

    def _enqueue(self, operation: Operation) -> None:
        event = torch.cuda.Event()
        event.record()
        self._enqueued.append((operation, event))
        while self._enqueued and self._enqueued[0][1].query():
            self._enqueued.popleft()


class World:
    """All ranks of a run. Errors, stop requests and metrics are exchanged here.

    Every method that communicates must be called by all ranks, in the same order. Its groups are
    separate from those that weights and gradients use. There is one for each level of the machine
    (None for a level of size 1, no groups for a single process), so that no message crosses a slow
    level more often than it must.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        groups: Sequence[dist.ProcessGroup | None] = (),
        status: RankStatus | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.groups = tuple(groups)
        self.status = RankStatus() if status is None else status

    @classmethod
    def single(cls, device: torch.device | None = None) -> "World":
        """The world of a single process, on the CPU by default."""
        return cls(0, 1, device or torch.device("cpu"))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small float64 tensor [n] over all ranks, with the same bits on every rank."""
        for group in self.groups:
            if group is not None:
                # Gathered and added in the order of the coordinates. An all-reduce promises the
                # same bits only within one group.
                values = all_gather_stacked(values, group).sum(0)
        return values

    def sum_and_maximum(
        self, sums: torch.Tensor, maxima: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum `sums` [n], as `sum` does, and take the elementwise maximum of `maxima` [m] over all
        ranks, in one message a level. Both are small float64 tensors."""
        count = len(sums)
        for group in self.groups:
            if group is not None:
                found = all_gather_stacked(torch.cat([sums, maxima]), group)
                sums, maxima = found[:, :count].sum(0), found[:, count:].amax(0)
        return sums, maxima

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather a small float64 tensor [n] from every rank: [size, n] in rank order."""
        found = values.view(1, -1)
        for group in self.groups:
            if group is not None:
                found = all_gather_stacked(found, group).flatten(0, 1)
        return found

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor [n] of any size over all ranks. Unlike `sum` it needs no memory for a copy
        of each rank, and bits may differ between ranks."""
        found = values.clone()
        for group in self.groups:
            if group is not None:
                dist.all_reduce(found, group=group)
        return found

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of a small tensor [n] over all ranks."""
        found = values.clone()
        for group in self.groups:
            if group is not None:
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_true(True)

    def all_true(self, ok: bool) -> bool:
        """Whether `ok` is true on every rank. Also a barrier."""
        failures = torch.tensor([0.0 if ok else 1.0], dtype=torch.float64, device=self.device)
        return bool(self.sum(failures).item() == 0)

    def first_error(self, message: str | None) -> str | None:
        """The message of the lowest rank that has one; None if no rank has. Also a barrier."""
        if self.all_true(message is None):
            return None
        mine = self.size if message is None else self.rank
        lowest = -int(self.maximum(torch.tensor([-mine], device=self.device)).item())
        return self._broadcast_text(message if self.rank == lowest else None)

    def run_on_all(
        self,
        act: Callable[[], T],
        as_error: Callable[[Exception], FatalError] | None = None,
    ) -> T:
        """Call `act` on every rank and return its result. If it fails on some ranks, all ranks
        raise the error of the lowest of these.

        `as_error` turns an exception into the UserError, StorageFailed or RunFailed that all ranks
        raise. It must raise an exception that is not for all ranks; this rank then fails alone, and
        its watchdog tells the others. The default, `as_shared_error`, does so for all exceptions
        but UserError, StorageFailed, RunFailed and errors of the file system.
        """
        problem: FatalError | None = None
        try:
            found = act()
        except Exception as error:
            problem = (as_error or as_shared_error)(error)
        self.raise_first(problem)
        return found

    def raise_first(self, problem: FatalError | None) -> None:
        """Raise the lowest rank's `problem` on all ranks, if some rank has one.

        `problem`: UserError, StorageFailed or RunFailed. Subclasses are raised as these.
        """
        agreed = self.first_error(None if problem is None else f"{problem.code} {problem}")
        if agreed is not None:
            code, _, line = agreed.partition(" ")
            raise _ERRORS[int(code)](line)

    def broadcast_from_rank_0(self, look: Callable[[], str]) -> str:
        """Call `look` on rank 0 and return its result on every rank; errors as in `run_on_all`.

        Use it to look at shared files: file systems do not show the same state to all nodes at
        every moment, and another run may be writing.
        """
        return self._broadcast_text(self.run_on_all(lambda: look() if self.rank == 0 else None))

    def _broadcast_text(self, text: str | None) -> str:
        """Send the text of the one rank that has one to all ranks; the others pass None."""
        # As bytes under a maximum, in which missing text counts as zeros: no rank then holds more
        # than the text itself.
        raw = b"" if text is None else text.encode()
        length = int(self.maximum(torch.tensor([len(raw)], device=self.device)).item())
        data = torch.zeros(length, dtype=torch.uint8, device=self.device)
        data[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8, device=self.device)
        return bytes(self.maximum(data).tolist()).decode()


def as_shared_error(error: Exception) -> FatalError:
    """The error that all ranks raise for an exception that one of them met; raises `error` itself
    if it is a bug."""
    if isinstance(error, UserError | StorageFailed | RunFailed):
        return error
    if isinstance(error, OSError):
        return as_fatal_os_error(error)
    raise error
