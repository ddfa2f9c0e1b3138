"""Measure one device: matrix products, copies, and the start of an operation."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.config import DeviceConfig

SHAPES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024)}
"""Sides of square products."""
COPIED = {"cuda": 2**28, "cpu": 2**25}
LAUNCHES = 200
REPEATS = 6


def measure_products(device: torch.device) -> dict[int, float]:
    """TFLOP/s of square matrix products by their side: in bf16 on an accelerator, else fp32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {}
    for side in SHAPES[device.type]:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        found[side] = 2 * side**3 / fastest(partial(torch.mm, a, b), device) / 1e12
    return found


def measure_copies(device: torch.device) -> float:
    """GB/s that a copy reads and writes."""
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest(partial(target.copy_, source), device) / 1e9


def measure_launches(device: torch.device) -> float:
    """Microseconds that the host needs to start an operation, in forward and backward of a layer
    that is too small to take any time itself."""
    layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    layer.to(device)
    small = torch.zeros(4, 16, device=device)
    with _Counter() as counter:
        layer(small).sum().backward()
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        layer(small).sum().backward()
    seconds = time.perf_counter() - begin
    _settle(device)
    return seconds / (LAUNCHES * counter.operations) * 1e6


class _Counter(TorchDispatchMode):
    """Counts operations that compute."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        self.operations += func._schema.is_mutable or not any(r.alias_info for r in returned)
        return func(*args, **(kwargs or {}))


def measure_device(
    device: torch.device, stated: DeviceConfig
) -> tuple[DeviceConfig, dict[int, float]]:
    """The device with measured rates, and those of its products by side."""
    products = measure_products(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = replace(
        stated,
        name=stated.name if stated.is_accelerator else name,
        matrix_tflops=float(f"{max(products.values()):.4g}"),
        memory_gigabytes_per_second=float(f"{measure_copies(device):.4g}"),
        launch_microseconds=float(f"{measure_launches(device):.3g}"),
    )
    return found, products


def fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several calls."""
    found = []
    for _ in range(REPEATS):
        _settle(device)
        begin = time.perf_counter()
        run()
        _settle(device)
        found.append(time.perf_counter() - begin)
    return min(found)


def average(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the mean of several in a row. Ranks that share a link and call it side by
    side have their share of it on average, and more in the fastest call."""
    run()
    _settle(device)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        run()
    _settle(device)
    return (time.perf_counter() - begin) / REPEATS


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
