"""What a step did, and the way its numbers take from the device to the host."""

from dataclasses import dataclass

import torch

from megafrontier.common.async_copy import AsyncHostCopy, DeviceTimer
from megafrontier.training.step import StepStats
from megafrontier.training.trainer import Trainer


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


class Pending:
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
