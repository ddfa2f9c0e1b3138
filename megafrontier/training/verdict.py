"""What becomes of a step: the mean loss, the gradient norm, and whether any weight may change.

All of it stays on the device, so that the optimizer can follow without the host having looked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafrontier.optim.clipping import clip_factor, global_norm
from megafrontier.signals import stop_requested
from megafrontier.training.trainer import Trainer


@dataclass(frozen=True)
class Verdict:
    """Each float64 [], the same bits on every rank.

    A step `is_bad` where its loss or gradient is not finite, and a spike where the spike rule finds
    so; neither changes a weight. `divisor` is what the summed gradients are to be divided by:
    tokens and loss scale, and what clipping takes off. `stops` counts ranks asked to stop.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    tokens: torch.Tensor
    stops: torch.Tensor
    is_bad: torch.Tensor
    is_spike: torch.Tensor
    divisor: torch.Tensor

    @property
    def skip(self) -> torch.Tensor:
        return torch.maximum(self.is_bad, self.is_spike)


def judge(trainer: Trainer, totals: torch.Tensor, gradients: Sequence[torch.Tensor]) -> Verdict:
    """The verdict on a step. `totals` float64 [2] is this rank's loss and tokens, `gradients` its
    1-D shards, summed over all ranks and tokens, and scaled."""
    hierarchy, engine = trainer.hierarchy, trainer.engine
    asked = totals.new_full((1,), float(stop_requested()))
    with engine.ledger.waiting("loss and norm"):
        loss_sum, tokens, stops = hierarchy.sum(torch.cat([totals, asked])).unbind()
        norm = global_norm(gradients, hierarchy, engine.placement.optimizer)
    # Divided once, by the exact number of tokens in the global batch.
    count = tokens.clamp(min=1)
    divisor = count * trainer.loss_scale.scale
    loss, norm = loss_sum / count, norm / divisor
    is_bad = (~(loss.isfinite() & norm.isfinite())).double()
    is_spike = _judge_spike(trainer, loss, norm, is_bad)
    divisor = divisor / clip_factor(norm, trainer.config.train.clip_grad_norm)
    return Verdict(loss, norm, tokens, stops, is_bad, is_spike, divisor)


def _judge_spike(
    trainer: Trainer, loss: torch.Tensor, norm: torch.Tensor, is_bad: torch.Tensor
) -> torch.Tensor:
    """Only a run that asks for the spike rule pays for looking at the numbers at once."""
    if not trainer.spikes.enabled or is_bad.item():
        return torch.zeros_like(loss)
    return torch.full_like(loss, float(trainer.spikes.judge(loss.item(), norm.item())))
