"""A unit's optimizer shard in host memory (`partition.offload`).

Note [An offloaded step]
A unit's gradient crosses to the host as soon as it is complete, while the units before it still run
backward. When its norm is known, a thread updates the masters unit by unit, in the order of the
next forward, and rounds them to the computing type. New weights cross to the device when the next
forward comes to their unit. Only there does the host wait for the thread.
"""

import torch

from megafrontier.comm.streams import WorkHandle
from megafrontier.common.async_copy import DeviceTimer
from megafrontier.common.buffers import empty


class HostShard:
    """The master of a unit on the host, and what crosses between host and device.

    master: fp32 [n]. Only the host reads and writes it, so it is not page-locked.
    staging: fp32 [n], page-locked if the device is an accelerator. It holds the gradient until the
        update, then the new weights until they have been published.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of the weights on `device`."""
        self._device = device
        # Tensors of a simulation have no memory anywhere.
        self.memory = device if device.type == "meta" else torch.device("cpu")
        self.master = empty(numel, torch.float32, self.memory)
        self.staging = empty(numel, torch.float32, self.memory, pinned=device.type == "cuda")
        self._weights = self.staging.view(dtype)[:numel]
        self._is_rounded = False

    def receive(self, gradient: torch.Tensor) -> torch.Tensor:
        """Copy the gradient to the host, behind the work of the current stream. Returns the
        copy."""
        self.staging.copy_(gradient, non_blocking=True)
        return self.staging

    def round(self) -> None:
        """Bring the master, rounded to the type of the weights, to the memory from which it is
        published."""
        self._weights.copy_(self.master)
        self._is_rounded = True

    def take_weights(self, update: WorkHandle) -> torch.Tensor:
        """The weights [n] to publish. Waits for the `update` of the master."""
        update.wait()
        if not self._is_rounded:  # the master comes from a checkpoint
            DeviceTimer(self._device).wait()  # for the last copy out of the memory
            self.round()
        self._is_rounded = False
        return self._weights
