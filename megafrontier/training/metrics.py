"""One step's metrics, gathered over the ranks, in the form of a metrics.jsonl line."""

import resource
from typing import Any

import torch

from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.model.flops import flops_per_token
from megafrontier.training.loop import StepResult
from megafrontier.training.trainer import Trainer

GIB = 2**30


def step_metrics(trainer: Trainer, result: StepResult) -> dict[str, Any]:
    """The line of one step. Bytes and seconds per level are means over the ranks, memory is the
    largest. Every rank must call it."""
    per_second = result.tokens / result.seconds
    device_flops = per_second * flops_per_token(trainer.config.model) / trainer.hierarchy.size
    peak = trainer.arrangement.machine.device.peak_tflops
    values: dict[str, Any] = {
        "step": result.step,
        "loss": None if result.skipped and not result.spiked else result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": trainer.tokens,
        "step_seconds": result.seconds,
        "tokens_per_second": per_second,
        "tflops_per_device": device_flops / 1e12,
        "mfu": device_flops / 1e12 / peak if peak else None,
        "memory_gib": peak_memory_gib(trainer.hierarchy),
        "comm": traffic(trainer),
    }
    if trainer.loss_scale.enabled:
        values["loss_scale"] = trainer.loss_scale.scale
    if result.skipped:
        values |= {"skipped": True, "samples": list(result.samples)}
    if result.spiked:
        values["spike"] = True
    return values


def traffic(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Bytes sent and seconds spent per level since the ledger was last read, mean per rank."""
    ledger, hierarchy = trainer.engine.ledger, trainer.hierarchy
    sent, seconds = ledger.take()
    mine = torch.tensor([*sent, *seconds], dtype=torch.float64, device=hierarchy.device)
    mean = (hierarchy.sum(mine) / hierarchy.size).tolist()
    count = len(ledger.names)
    return {
        name: {"bytes": round(mean[i]), "seconds": mean[count + i]}
        for i, name in enumerate(ledger.names)
    }


def peak_memory_gib(hierarchy: Hierarchy) -> float:
    """Largest memory any rank has used: allocated on a GPU, resident on a CPU."""
    device = hierarchy.device
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mine = torch.tensor([used / GIB], dtype=torch.float64, device=device)
    return float(hierarchy.maximum(mine).item())
