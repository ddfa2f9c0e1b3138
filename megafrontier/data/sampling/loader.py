"""Hands a rank its micro-batches of each optimizer step, the next step's read in the background."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megafrontier.common.errors import UserError
from megafrontier.data.sampling.samples import Batch, Samples


def data_step(steps: int, skip: Sequence[Sequence[int]], first: int = 0) -> int:
    """The step of the data's own count, from 0, that is read `steps` optimizer steps after `first`
    was next, when the data steps in each range [from, to) of `skip` are left out. What lies before
    `first` has been read or left out already. Ranges may overlap."""
    step = first + steps
    for start, stop in _joined(skip):
        if step < start:
            break
        step += max(0, stop - max(start, first))
    return step


def _joined(ranges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The ranges in order, those that touch joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((start, stop) for start, stop in ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def micro_batches(global_batch: int, micro_batch: int, dp_size: int) -> int:
    """Micro-batches of each of `dp_size` ranks in a step. Raises UserError when the sizes do not
    divide."""
    at_a_time = micro_batch * dp_size
    if global_batch % at_a_time:
        raise UserError(
            f"train.global_batch: {global_batch}, need a multiple of {at_a_time} "
            f"(train.micro_batch {micro_batch} x {dp_size} data-parallel ranks)"
        )
    return global_batch // at_a_time


class Loader:
    """Micro-batches of the `dp_rank`-th of `dp_size` data-parallel ranks.

    Of the `global_batch` samples of a step, rank d takes the d-th stretch and cuts it into
    micro-batches in order; so the samples of a step, and their order, are the same at any number of
    ranks and any micro-batch size. Its one state, the `position`, is a function of the step as long
    as `global_batch` and `skip` stay.
    Raises UserError when the batch sizes do not divide.
    """

    def __init__(
        self,
        samples: Samples,
        global_batch: int,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        skip: Sequence[Sequence[int]] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self._samples = samples
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._first = dp_rank * (global_batch // dp_size)
        self._skip = [list(pair) for pair in skip]
        self._origin = 0, 0, 0
        self._device = torch.device(device)
        self.micro_batches = micro_batches(global_batch, micro_batch, dp_size)
        """Micro-batches of one rank in a step."""
        self._thread: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._ahead: dict[int, Future[list[Batch]]] = {}

    def position(self, step: int) -> tuple[int, int]:
        """What optimizer step `step` reads: the data's own step, and the global number of its first
        sample over all ranks."""
        at, first_step, first_sample = self._origin
        own = data_step(step - at, self._skip, first_step)
        return own, first_sample + (own - first_step) * self._global_batch

    @property
    def windows(self) -> list[int]:
        """Windows in one epoch of each corpus."""
        return self._samples.windows

    @property
    def contents(self) -> list[str]:
        """`Samples.contents`: what tells each corpus from another one of as many windows."""
        return self._samples.contents

    def read_again(self, steps: int) -> Iterator[tuple[str, int, int]]:
        """`Samples.read_again` of what the first steps read."""
        return self._samples.read_again(steps * self._global_batch)

    def go_on(self, step: int, position: tuple[int, int]) -> None:
        """From optimizer step `step` on, continue the data at `position`, to which a loader of
        another `global_batch`, or one that left out other steps, may have come: no sample is left
        out or read twice."""
        self._origin = step, *position

    @property
    def counts_from(self) -> int:
        """The optimizer step from which on the data's own steps have the numbers that they have
        now: a checkpoint before it, of another `global_batch`, would lead to others."""
        step, first_step, first_sample = self._origin
        return 0 if first_sample == first_step * self._global_batch else step

    def data_step_of(self, sample: int) -> int:
        """The data's own step that begins with this sample."""
        _, first_step, first_sample = self._origin
        return first_step + (sample - first_sample) // self._global_batch

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step `step` (from 0), on the device.

        Any step may be asked for; the one after it is read meanwhile. Raises what reading raises.
        """
        self._forget_parent()
        future = self._ahead.pop(step, None)
        self._ahead.clear()
        batches = self._read(step) if future is None else future.result()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "data")
        self._ahead[step + 1] = self._thread.submit(self._read, step + 1)
        return [batch.to(self._device) for batch in batches]

    def close(self) -> None:
        """Stop the background thread; `step` would start it again."""
        if self._thread is not None and self._process == os.getpid():
            # What is being read nobody takes, and a storage that hangs would keep the rank.
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread, self._ahead = None, {}

    def _read(self, step: int) -> list[Batch]:
        first = self.position(step)[1] + self._first
        size = self._micro_batch
        batches = [self._samples.batch(first + i * size, size) for i in range(self.micro_batches)]
        return [b.pin_memory() for b in batches] if self._device.type == "cuda" else batches

    def _forget_parent(self) -> None:
        """A thread does not live on in a forked child, which starts its own."""
        if self._process != os.getpid():
            self._thread, self._ahead, self._process = None, {}, os.getpid()
