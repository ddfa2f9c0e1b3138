"""The outcome of a step: the mean loss, the gradient norm, whether the update is applied, and what
the step cost; all of it exchanged in one message.

All of it stays on the device, so that the optimizer can follow without the host having looked.
"""

import resource
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafrontier.common.async_copy import AsyncHostCopy, DeviceTimer, on_device
from megafrontier.common.signals import stop_requested
from megafrontier.optim.clipping import clip_factor, square_sum
from megafrontier.training.plan import GIB
from megafrontier.training.trainer import Trainer


@dataclass(frozen=True)
class StepStats:
    """Each float64 [] but `costs`, the same bits on every rank.

    A step `is_bad` where its loss or gradient is not finite, and a spike where the spike rule finds
    so; neither changes a weight, nor does a step that `is_empty`: without a target, and so without
    a loss, which is NaN. `divisor` is what the summed gradients are to be divided by:
    tokens and loss scale, and what clipping takes off. `stops` counts ranks asked to stop. `memory`
    is the most any rank has used, in GiB; `costs` [1 + 2 · levels] has the seconds that computing
    waited for the levels, the bytes sent and the seconds spent per level since the last verdict,
    means over the ranks; `waited` is this rank's own part of the first.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    tokens: torch.Tensor
    stops: torch.Tensor
    is_bad: torch.Tensor
    is_spike: torch.Tensor
    is_empty: torch.Tensor
    divisor: torch.Tensor
    memory: torch.Tensor
    costs: torch.Tensor
    waited: float

    @property
    def skip(self) -> torch.Tensor:
        return torch.stack([self.is_bad, self.is_spike, self.is_empty]).amax(0)


def finish_step(
    trainer: Trainer, totals: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> StepStats:
    """The verdict on a step. `totals` float64 [2] is this rank's loss and tokens, `gradients` its
    1-D shards, summed over all ranks and tokens, and scaled."""
    hierarchy, engine = trainer.hierarchy, trainer.engine
    (sent, seconds), waited = engine.ledger.take(), engine.ledger.take_waited()
    mine = on_device([float(stop_requested()), waited, *sent, *seconds], hierarchy.device)
    used = on_device([peak_memory_gib(hierarchy.device)], hierarchy.device)
    square = square_sum(gradients).view(1)
    if not hierarchy.is_first_replica(engine.placement.optimizer):
        square = torch.zeros_like(square)  # counted already, in the same bits
    with engine.ledger.waiting("loss and norm"):
        sums, memory = trainer.world.sum_and_maximum(torch.cat([square, totals, mine]), used)
    norm, loss_sum, tokens, stops = sums[0].sqrt(), *sums[1:4].unbind()
    # Divided once, by the exact number of tokens in the global batch.
    count = tokens.clamp(min=1)
    divisor = count * trainer.loss_scale.scale
    loss, norm = loss_sum / count, norm / divisor
    is_bad = (~(loss.isfinite() & norm.isfinite())).double()
    is_empty = (tokens == 0).double()
    is_spike = trainer.spikes.detect(loss, norm, torch.maximum(is_bad, is_empty))
    loss = torch.where(is_empty > 0, torch.nan, loss)
    divisor = divisor / clip_factor(norm, trainer.config.train.clip_grad_norm)
    costs = sums[4:] / trainer.world.size
    flags = is_bad, is_spike, is_empty
    return StepStats(loss, norm, tokens, stops, *flags, divisor, memory[0], costs, waited)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this rank has used: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `samples` is the range of global sample numbers it used."""

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
    stop: bool
    """Whether any rank has been asked to stop; all ranks know it after the same step."""
    spiked: bool
    """Whether it was skipped though finite, as a spike."""
    loss_scale: float
    """Of the next step."""
    memory_gib: float
    """The most that any rank has used."""
    waiting_seconds: float
    """That computing stood still for the levels, as `comm` since the step before had its verdict;
    mean over the ranks."""
    own_waiting_seconds: float
    """This rank's."""
    comm: dict[str, dict[str, float]]
    """By level the bytes sent and seconds spent since the step before had its verdict, means over
    the ranks: what a step publishes counts with the next."""


class AsyncStepResult:
    """A step whose work has been handed to the device; `read` waits for its end."""

    def __init__(
        self, trainer: Trainer, begin: DeviceTimer, lr: float, first: int, found: StepStats
    ) -> None:
        """`first` is the step's first sample."""
        self._trainer, self._begin, self._lr = trainer, begin, lr
        self._samples = first, first + trainer.config.train.global_batch
        self._step = trainer.step
        numbers = [
            found.loss, found.norm, found.tokens, found.stops, found.skip, found.is_spike,
            trainer.loss_scale.scale.double(), found.memory,
        ]  # fmt: skip
        self._deferred = AsyncHostCopy(torch.cat([torch.stack(numbers), found.costs]))
        self._waited = found.waited

    @property
    def ended(self) -> DeviceTimer:
        """When the device has done the step."""
        return self._deferred.ready

    def read(self) -> StepResult:
        """What the step did; to be called once, in the order of the steps."""
        trainer = self._trainer
        loss, norm, tokens, stops, skip, spike, scale, memory, *costs = self._deferred.read()
        trainer.tokens += int(tokens)
        names = trainer.engine.ledger.names
        waiting, sent, spent = costs[0], costs[1 : len(names) + 1], costs[len(names) + 1 :]
        return StepResult(
            step=self._step,
            loss=loss,
            grad_norm=norm,
            lr=self._lr,
            tokens=int(tokens),
            total_tokens=trainer.tokens,
            seconds=self.ended.seconds_since(self._begin),
            skipped=bool(skip),
            samples=self._samples,
            stop=stops > 0,
            spiked=bool(spike),
            loss_scale=scale,
            memory_gib=memory,
            waiting_seconds=waiting,
            own_waiting_seconds=self._waited,
            comm={
                name: {"bytes": round(sent[i]), "seconds": spent[i]} for i, name in enumerate(names)
            },
        )
