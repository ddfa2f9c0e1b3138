"""Numbers between host and device without either waiting for the other."""

from collections.abc import Sequence

import torch


def on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """`values` as float64 [n] on `device`; a GPU fetches them by itself."""
    found = torch.tensor(values, dtype=torch.float64)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


class DeferredRead:
    """float64 [n] that the host reads later. On a GPU they are copied to it behind the work that
    makes them, so that only `read` waits, and only if that work is not over."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """The numbers, as soon as they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers
