"""One step's metrics in the form of a metrics.jsonl line."""

import math
from typing import Any

from megafrontier.model.flops import flops_per_token
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


def peak_tflops(trainer: Trainer) -> float | None:
    """What the machine file states of the device, where that says something of this run: of an
    accelerator it is the peak in 16 bits, and a CPU may stand in for it."""
    device = trainer.plan.machine.device
    is_anothers = device.is_stood_in_for_by(trainer.hierarchy.device.type)
    if is_anothers or (device.is_accelerator and trainer.config.train.precision == "fp32"):
        return None
    return device.peak_tflops


def step_metrics(trainer: Trainer, result: StepResult) -> dict[str, Any]:
    """The line of one step. Bytes and seconds per level are means over the ranks, memory is the
    largest."""
    per_second = result.tokens / result.seconds
    device_flops = per_second * flops_per_token(trainer.config.model) / trainer.world.size
    peak = peak_tflops(trainer)
    values: dict[str, Any] = {
        "step": result.step,
        "loss": result.loss if math.isfinite(result.loss) else None,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": result.total_tokens,
        "step_seconds": result.seconds,
        "tokens_per_second": per_second,
        "tflops_per_device": device_flops / 1e12,
        "mfu": device_flops / 1e12 / peak if peak else None,
        "memory_gib": result.memory_gib,
        "comm": result.comm,
    }
    if trainer.loss_scale.enabled:
        values["loss_scale"] = result.loss_scale
    if result.skipped:
        values |= {"skipped": True, "samples": list(result.samples)}
    if result.spiked:
        values["spike"] = True
    return values
