"""The end of an optimizer step: its statistics over all ranks, and their way to the host."""

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megafrontier.comm.ledger import KINDS
from megafrontier.common.async_copy import AsyncHostCopy, DeviceTimer
from megafrontier.common.signals import stop_requested
from megafrontier.optim.gradients import clip_factor, square_sum
from megafrontier.plan.footprint import GIB
from megafrontier.training.trainer import Trainer


@dataclass(frozen=True)
class StepStats:
    """The statistics of a step, which stay on the device so that the optimizer can follow before
    the host has read them. Tensors are float64 [], the same bits on every rank. A flag is 1 or 0.
    """

    divisor: torch.Tensor
    """What the optimizer divides the summed gradients by: tokens, loss scale and clipping."""
    is_bad: torch.Tensor
    """Flag: the loss or the gradient is not finite."""
    skip: torch.Tensor
    """Flag: the step changes no weight, because it is bad, a spike, or without a target."""
    results: dict[str, torch.Tensor]
    """What the host reads, with all recorded metrics, reduced over the ranks."""
    own_waiting_seconds: float
    """How long this rank's computation waited for communication."""


def finish_step(
    trainer: Trainer, totals: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> StepStats:
    """Sum loss, tokens and gradient norm over the ranks, and decide whether the step is skipped.

    totals: float64 [2], this rank's sum of losses and number of tokens. They count only on the
        ranks of `Mesh.counts_loss`.
    gradients: this rank's 1-D shards, summed over all ranks and tokens, times the loss scale.

    Everything is exchanged in one message per level, with the metrics recorded since the last step.
    """
    mesh, engine, metrics = trainer.mesh, trainer.engine, trainer.metrics
    if not mesh.counts_loss:
        totals = torch.zeros_like(totals)
    units = engine.trained_units
    known = [u.gradient_norms.of(g) for u, g in zip(units, gradients, strict=True)]
    square = square_sum(gradients, [unit.counts for unit in units], known)
    traffic = [kinds[kind] for kinds in engine.ledger.take_kinds() for kind in KINDS]
    waited = engine.ledger.take_waited()
    metrics.add("grad_norm", square, "sum")
    metrics.add("loss", totals[0], "sum")
    metrics.add("tokens", totals[1], "sum")
    metrics.add("stops", float(stop_requested()), "sum")
    saving = trainer.pending_save
    metrics.add("saving", float(saving is not None and not saving.is_written), "sum")
    metrics.add("waiting_seconds", waited, "mean")
    metrics.add("comm_bytes", [of.bytes for of in traffic], "mean")
    metrics.add("comm_seconds", [of.seconds for of in traffic], "mean")
    metrics.add("comm_hidden", [of.hidden for of in traffic], "mean")
    metrics.add("memory_gib", peak_memory_gib(mesh.device), "max")
    for meter in trainer.meters:
        meter.record(metrics, gradients)
    if trainer.balance is not None:
        metrics.add("expert_tokens", trainer.balance.take(mesh.device), "sum")
    with engine.ledger.waiting("loss and norm"):
        reduced = metrics.reduce(trainer.world)
    tokens = reduced["tokens"]
    # Divide once, by the exact number of tokens in the global batch.
    count = tokens.clamp(min=1)
    divisor = count * trainer.loss_scale.scale
    loss, norm = reduced["loss"] / count, reduced["grad_norm"].sqrt() / divisor
    is_bad = (~(loss.isfinite() & norm.isfinite())).double()
    is_empty = (tokens == 0).double()
    is_spike = trainer.spikes.detect(loss, norm, torch.maximum(is_bad, is_empty))
    skip = torch.stack([is_bad, is_spike, is_empty]).amax(0)
    results = reduced | {
        "loss": torch.where(is_empty > 0, torch.nan, loss),
        "grad_norm": norm,
        "skipped": skip,
        "spike": is_spike,
    }
    for meter in trainer.meters:
        meter.finish(results, count, divisor)
    if trainer.balance is not None:
        results |= trainer.balance.update(reduced["expert_tokens"], skip)
    divisor = divisor / clip_factor(norm, trainer.config.train.clip_grad_norm)
    return StepStats(divisor, is_bad, skip, results, waited)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this rank has used: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, as numbers on the host."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    total_tokens: int
    """Of the run so far."""
    seconds: float
    skipped: bool
    samples: tuple[int, int]
    """The range of global sample numbers that the step used."""
    stop: bool
    """Whether any rank has been asked to stop. All ranks learn it from the same step."""
    is_saving: bool
    """Whether any rank was still writing a checkpoint when the step ended."""
    asks_to_save: bool
    """Whether rank 0 asks for a checkpoint, because one is due by time."""
    spiked: bool
    """Whether the step was skipped because of a spike, though finite."""
    loss_scale: float
    """Of the next step."""
    memory_gib: float
    """The most that any rank has used."""
    waiting_seconds: float
    """How long computation waited for communication, mean over the ranks."""
    own_waiting_seconds: float
    """How long this rank's computation waited."""
    comm: dict[str, dict[str, Any]]
    """By level: bytes sent and seconds spent since the previous step's end, means over the ranks,
    and the same with hidden seconds for each kind that occurred (`comm.ledger.Traffic`). The
    weights that a step publishes count with the next step."""
    metrics: dict[str, float | list[float] | dict[str, float]] = field(default_factory=dict)
    """What meters, callbacks and others have recorded, by name."""
    snapshots: Sequence[float] = ()
    """How many ranks are writing a snapshot, have failed to, and have something to say of it; empty
    without snapshots."""


class AsyncStepResult:
    """A step whose work has been handed to the device. `read` waits for its end."""

    def __init__(
        self,
        trainer: Trainer,
        begin: DeviceTimer,
        lr: float,
        samples: tuple[int, int],
        stats: StepStats,
    ) -> None:
        self._trainer, self._begin, self._lr = trainer, begin, lr
        self._samples = samples
        self._step = trainer.step
        self._own_waiting_seconds = stats.own_waiting_seconds
        loss_scale = trainer.loss_scale.scale.double()
        self._copy = AsyncHostCopy(stats.results | {"loss_scale": loss_scale})

    @property
    def ended(self) -> DeviceTimer:
        """When the device has done the step."""
        return self._copy.ready

    def read(self) -> StepResult:
        """What the step did. Call it once, in the order of the steps."""
        trainer = self._trainer
        numbers: dict[str, Any] = self._copy.read()
        tokens = int(numbers.pop("tokens"))
        trainer.tokens += tokens
        traffic = (numbers.pop(f"comm_{what}") for what in ("bytes", "seconds", "hidden"))
        same = ("loss", "grad_norm", "loss_scale", "memory_gib", "waiting_seconds")
        return StepResult(
            step=self._step,
            lr=self._lr,
            tokens=tokens,
            total_tokens=trainer.tokens,
            seconds=self.ended.seconds_since(self._begin),
            skipped=bool(numbers.pop("skipped")),
            samples=self._samples,
            stop=numbers.pop("stops") > 0,
            is_saving=numbers.pop("saving") > 0,
            asks_to_save=numbers.pop("save_requests", 0) > 0,
            snapshots=numbers.pop("snapshots", ()),
            spiked=bool(numbers.pop("spike")),
            own_waiting_seconds=self._own_waiting_seconds,
            comm=_by_level(trainer.engine.ledger.names, *traffic),
            **{name: numbers.pop(name) for name in same},
            metrics=numbers | _labelled(trainer, numbers),
        )


def _labelled(trainer: Trainer, numbers: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers of the metrics that have labels, by these."""
    return {
        name: dict(zip(labels, numbers[name], strict=True))
        for meter in trainer.meters
        for name, labels in meter.labels.items()
        if name in numbers
    }


def _by_level(
    names: Sequence[str], sent: list[float], seconds: list[float], hidden: list[float]
) -> dict[str, dict[str, Any]]:
    """`StepResult.comm` of the numbers of each level and kind."""
    found = {}
    for i, name in enumerate(names):
        kinds = range(i * len(KINDS), (i + 1) * len(KINDS))
        found[name] = {
            "bytes": round(sum(sent[at] for at in kinds)),
            "seconds": sum(seconds[at] for at in kinds),
        } | {
            kind: {"bytes": round(sent[at]), "seconds": seconds[at], "hidden": hidden[at]}
            for kind, at in zip(KINDS, kinds, strict=True)
            if sent[at] or seconds[at]
        }
    return found
