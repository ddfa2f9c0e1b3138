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
LAYER = {"cuda": (8192, 4096, 16384), "cpu": (256, 256, 1024)}
"""Tokens, width and inner width of the layer whose products are timed one after another."""
SUSTAINED_SECONDS = {"cuda": 2.0, "cpu": 0.1}
"""Long enough that a device has only the power that it keeps."""
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


def measure_training(device: torch.device) -> float:
    """TFLOP/s that the products of a layer reach one after another, in forward and backward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens, width, inner = LAYER[device.type]
    shapes = (tokens, width), (inner, width), (tokens, inner)
    values, weight, gradient = (torch.randn(*s, device=device).to(dtype) for s in shapes)

    def train() -> None:
        torch.mm(values, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), values)

    times = max(1, int(SUSTAINED_SECONDS[device.type] / fastest(train, device)))
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        train()
    synchronize(device)
    return times * 6 * tokens * width * inner / (time.perf_counter() - begin) / 1e12


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
    synchronize(device)
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
    """The device with measured rates, and those of its products by side.

    Products show what training reaches only in part: if the machine file states both rates, its
    proportion of the two stays.
    """
    products = measure_products(device)
    line = max(products.values())
    if stated.matrix_tflops and stated.line_matrix_tflops:
        trained = line * stated.matrix_tflops / stated.line_matrix_tflops
    else:
        trained = min(line, measure_training(device))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = replace(
        stated,
        name=stated.name if stated.is_accelerator else name,
        matrix_tflops=float(f"{trained:.4g}"),
        line_matrix_tflops=float(f"{line:.4g}"),
        memory_gigabytes_per_second=float(f"{measure_copies(device):.4g}"),
        launch_microseconds=float(f"{measure_launches(device):.3g}"),
    )
    return found, products


def fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several calls."""
    found = []
    for _ in range(REPEATS):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found)


def average(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the mean of several in a row. Ranks that share a link and call it side by
    side have their share of it on average, and more in the fastest call."""
    run()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        run()
    synchronize(device)
    return (time.perf_counter() - begin) / REPEATS


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
