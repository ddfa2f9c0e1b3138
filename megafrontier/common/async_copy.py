"""Numbers and times that go between host and device without either waiting for the other."""

import time
from collections.abc import Mapping, Sequence

import torch


def copy_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. The host does not wait for the copy."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_device(values: Sequence[float] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` [n] of the host as float64 [n] on `device`. The host does not wait for the copy."""
    return copy_async(torch.as_tensor(values, dtype=torch.float64), device)


class DeviceTimer:
    """The time at which the device has done all work that it was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._host_time, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Return when the device has got there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "DeviceTimer") -> float:
        """Seconds from an earlier timer of the same device to this one. Call `wait` first."""
        if self._event is None or earlier._event is None:
            return self._host_time - earlier._host_time
        return earlier._event.elapsed_time(self._event) / 1e3


class AsyncHostCopy:
    """Named float64 tensors [] or [n] that the host reads later.

    On a GPU they are copied to the host behind the work that computes them. Only `read` waits, and
    only if that work is not done yet.
    """

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._shapes = {name: value.shape for name, value in values.items()}
        flat = torch.cat([value.reshape(-1) for value in values.values()])
        if flat.is_cuda:
            self._flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._flat.copy_(flat, non_blocking=True)
        else:
            self._flat = flat
        self.ready = DeviceTimer(flat.device)

    def wait(self) -> torch.Tensor:
        """The values, one after another, in host memory."""
        self.ready.wait()
        return self._flat

    def read(self) -> dict[str, float | list[float]]:
        """The values by name: a number for a tensor [], a list for [n]."""
        numbers = iter(self.wait().tolist())
        return {
            name: [next(numbers) for _ in range(shape[0])] if shape else next(numbers)
            for name, shape in self._shapes.items()
        }
