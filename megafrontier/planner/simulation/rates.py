"""How long a device and its links take for an operation, by the rates of a machine file."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from megafrontier.common.errors import UserError
from megafrontier.config import MachineConfig

REACHED = 0.42
"""Of the peak, by matrix products in training, if the machine file does not say. An MI250X reaches
42 %, an H100 46 % (docs/planning.md)."""
FP32_SHARE = 0.5
"""Rate of fp32 products on an accelerator, as a share of those in 16 bits."""


@dataclass(frozen=True)
class DeviceRates:
    """One device, in SI units."""

    matrix_flops: float
    memory_bytes: float
    launch_seconds: float
    fp32_share: float
    is_host: bool = False
    """A CPU that trains starts each operation itself. The host of an accelerator runs ahead."""
    host_link_bytes: float = inf
    """A second, between the device and its host's memory."""
    host_memory_bytes: float = inf
    """A second, read and written by the host."""

    @classmethod
    def of(cls, machine: MachineConfig) -> "DeviceRates":
        """Raises UserError for a machine file that lacks a rate."""
        device = machine.device
        peak = None if device.peak_tflops is None else REACHED * device.peak_tflops
        matrix = device.matrix_tflops or peak
        if matrix is None:
            raise UserError(_missing("device.matrix_tflops"))
        if device.memory_gigabytes_per_second is None:
            raise UserError(_missing("device.memory_gigabytes_per_second"))
        return cls(
            matrix * 1e12,
            device.memory_gigabytes_per_second * 1e9,
            device.launch_microseconds / 1e6,
            FP32_SHARE if device.is_accelerator else 1.0,
            device.name == "cpu",
            device.host_link_gigabytes_per_second * 1e9,
            device.host_memory_gigabytes_per_second * 1e9,
        )

    def product_seconds(self, flops: float, moved: int, itemsize: int) -> float:
        """A matrix product of `flops` operations that reads and writes `moved` bytes."""
        rate = self.matrix_flops * (self.fp32_share if itemsize == 4 else 1.0)
        return max(flops / rate, moved / self.memory_bytes)


@dataclass(frozen=True)
class LinkRates:
    """A rank's link over one level, in SI units."""

    bytes_per_second: float
    latency_seconds: float
    slows_compute: float = 0.0
    """Seconds that computing loses for each second of a collective beside it."""

    def seconds(self, sent: float, messages: int) -> float:
        """`messages` one after the other, of `sent` bytes together."""
        return messages * self.latency_seconds + sent / self.bytes_per_second


def link_rates(machine: MachineConfig) -> dict[str, LinkRates]:
    """By level. Raises UserError for a machine file that lacks a rate."""
    found = {}
    for name, level in machine.levels.items():
        if level.gigabytes_per_second is None:
            raise UserError(_missing(f"levels.{name}.gigabytes_per_second"))
        found[name] = LinkRates(
            level.gigabytes_per_second * 1e9,
            level.latency_microseconds / 1e6,
            level.slows_compute,
        )
    return found


def _missing(key: str) -> str:
    return f"machine.{key}: missing, need it to plan; `megafrontier probe --write FILE` measures it"


@dataclass(frozen=True)
class Rates:
    """Those of a machine."""

    device: DeviceRates
    links: Mapping[str, LinkRates]

    @classmethod
    def of(cls, machine: MachineConfig) -> "Rates":
        """Raises UserError for a machine file that lacks a rate."""
        return cls(DeviceRates.of(machine), link_rates(machine))


_NO_TIME = LinkRates(inf, 0.0)
UNKNOWN = Rates(DeviceRates(inf, inf, 0.0, 1.0), defaultdict(lambda: _NO_TIME))
"""Of a machine whose memory alone matters: nothing takes time."""
