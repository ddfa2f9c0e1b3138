"""Numbers and moments between host and device without either waiting for the other."""

import time
from collections.abc import Sequence

import torch


def on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """`values` as float64 [n] on `device`; a GPU fetches them by itself."""
    found = torch.tensor(values, dtype=torch.float64)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


class DeviceTimer:
    """Now, or on a GPU: when it has done all that it was given until now."""

    def __init__(self, device: torch.device) -> None:
        self._at, self._reached = time.perf_counter(), None
        if device.type == "cuda":
            self._reached = torch.cuda.Event(enable_timing=True)
            self._reached.record()

    def wait(self) -> None:
        """Return when it has come."""
        if self._reached is not None:
            self._reached.synchronize()

    def seconds_since(self, earlier: "DeviceTimer") -> float:
        """From an earlier moment of the same device to this one, which has been waited for."""
        if self._reached is None or earlier._reached is None:
            return self._at - earlier._at
        return earlier._reached.elapsed_time(self._reached) / 1e3


class AsyncHostCopy:
    """float64 [n] that the host reads later. On a GPU they are copied to it behind the work that
    makes them, so that only `read` waits, and only if that work is not over."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        self.ready = DeviceTimer(values.device)

    def read(self) -> list[float]:
        """The numbers, as soon as they are there."""
        self.ready.wait()
        numbers: list[float] = self._values.tolist()
        return numbers
