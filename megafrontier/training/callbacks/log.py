"""What a run writes about its steps: a line of metrics each, and the first rank's timeline."""

import math
import time
from pathlib import Path
from typing import Any

from megafrontier.comm.ledger import Trace
from megafrontier.model.flops import flops_per_token
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.goodput import GoodputMeter
from megafrontier.training.resume.restarts import now_text
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


class Log(Callback):
    """Writes every step's metrics."""

    def __init__(self) -> None:
        self._goodput: GoodputMeter | None = None

    def at_start(self, trainer: Trainer) -> None:
        if trainer.is_first:
            self._goodput = GoodputMeter(Path(trainer.config.run.directory), time.time())

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if not trainer.is_first:
            return
        shown = {}
        if trainer.world.size > 1:
            shown["waiting"] = min(1.0, result.waiting_seconds / result.seconds)
        values = step_metrics(trainer, result)
        if self._goodput is not None:
            values["goodput"] = self._goodput.update(result.seconds, time.time())
        trainer.run_logger.write(values, **shown)


def step_metrics(trainer: Trainer, result: StepResult) -> dict[str, Any]:
    """A step's line in metrics.jsonl.

    Bytes and seconds per level are means over the ranks, memory is the largest. Recorded metrics
    come last. Starts anew to count the seconds between steps.
    """
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
        "at": now_text(),
        "between_seconds": trainer.between_seconds,
    }
    trainer.between_seconds = {}
    if trainer.loss_scale.enabled:
        values["loss_scale"] = result.loss_scale
    limit = trainer.config.train.clip_grad_norm
    if limit and not result.skipped:
        values["clipped"] = result.grad_norm > limit
    if result.skipped:
        values |= {"skipped": True, "samples": list(result.samples)}
    if result.spiked:
        values["spike"] = True
    return values | result.metrics


def peak_tflops(trainer: Trainer) -> float | None:
    """The machine file's peak of the device, or None if it says nothing about this run: an
    accelerator's peak is in 16 bits, and a CPU may stand in for the accelerator."""
    device = trainer.plan.machine.device
    is_other_device = device.is_stood_in_for_by(trainer.mesh.device.type)
    if is_other_device or (device.is_accelerator and trainer.config.train.precision == "fp32"):
        return None
    return device.peak_tflops


class TraceWriter(Callback):
    """Attaches a trace to the ledger if `log.trace` asks for it, and writes it to trace.json."""

    def __init__(self, trainer: Trainer) -> None:
        self._trace: Trace | None = None
        if trainer.config.log.trace and trainer.is_first:
            ledger = trainer.engine.ledger
            self._trace = ledger.trace = Trace(ledger.names)

    def at_end(self, trainer: Trainer) -> None:
        if not trainer.config.log.trace:
            return
        trainer.engine.finish_publishing()  # by all ranks: the last step's trace ends with it
        if self._trace is None:
            return
        trainer.engine.ledger.take(wait=True)  # the device may still be at it
        trainer.engine.ledger.take_waited(wait=True)
        path = Path(trainer.config.run.directory) / "trace.json"
        try:
            self._trace.write(path)
        except OSError as error:  # no reason to fail, because the run is saved
            trainer.run_logger.info(f"warning: {path} is not written: {error.strerror}")
