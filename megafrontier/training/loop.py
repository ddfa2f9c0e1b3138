"""The loop and one optimizer step. Everything that is not a step is a callback."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megafrontier.data.samples import Batch
from megafrontier.optim.clipping import clip_factor, global_norm
from megafrontier.optim.schedule import learning_rate
from megafrontier.signals import stop_requested
from megafrontier.training.batches import read_step
from megafrontier.training.callback import Callback
from megafrontier.training.trainer import Trainer


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `samples` is the range of global sample numbers it used."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    skipped: bool
    samples: tuple[int, int]
    stop: bool
    """Whether any rank has been asked to stop; all ranks know it after the same step."""
    spiked: bool
    """Whether it was skipped though finite, as a spike."""


def run(
    trainer: Trainer, callbacks: Sequence[Callback], beat: Callable[[int], None] = lambda step: None
) -> None:
    """Train from where the trainer stands to its last step, or to the one in hand when a signal
    asks to stop. `beat` hears of every step and callback that is done."""
    stop = not trainer.hierarchy.all_true(not stop_requested())
    while trainer.step < trainer.last_step and not stop:
        result = train_step(trainer)
        beat(trainer.step)
        for callback in callbacks:
            callback.after_step(trainer, result)
            beat(trainer.step)
        stop = result.stop
    for callback in callbacks:
        callback.at_end(trainer)
        beat(trainer.step)


def train_step(trainer: Trainer) -> StepResult:
    """One optimizer step: every micro-batch forward and backward, then one update.

    The loss is a sum over tokens until the end, where it is divided once by the exact number of
    tokens in the global batch. A step with a non-finite loss or gradient changes no weight, nor
    does one that the spike rule finds.
    """
    begin = time.perf_counter()
    config, engine, scale = trainer.config, trainer.engine, trainer.loss_scale
    lr = learning_rate(trainer.step, config.train.steps, config.optimizer, config.schedule)
    first_sample = trainer.loader.first_sample(trainer.step)
    micro_batches = read_step(trainer.loader, trainer.step, trainer.hierarchy.rank)
    totals = torch.zeros(2, dtype=torch.float64, device=trainer.hierarchy.device)
    for number, batch in enumerate(micro_batches, start=1):
        seed_dropout(config.run.seed, batch)
        loss = trainer.model(batch.tokens, batch.targets, batch.documents)
        engine.backward(loss * scale.scale, is_last=number == len(micro_batches))
        totals += torch.stack([loss.detach().double(), (batch.targets >= 0).sum().double()])

    gradients = engine.finish_gradients()
    asked = totals.new_full((1,), float(stop_requested()))
    with engine.ledger.waiting("loss and norm"):
        loss_sum, tokens, stops = trainer.hierarchy.sum(torch.cat([totals, asked])).tolist()
        norm = global_norm(gradients, trainer.hierarchy, engine.placement.optimizer).item()
    count = max(tokens, 1.0)
    norm /= count * scale.scale
    finite = math.isfinite(norm) and math.isfinite(loss_sum)
    spiked = finite and trainer.spikes.judge(loss_sum / count, norm)
    if finite and not spiked:
        factor = clip_factor(norm, config.train.clip_grad_norm) / (count * scale.scale)
        torch._foreach_mul_(gradients, factor)
        trainer.optimizer.step(gradients, lr)
        engine.publish()
    engine.clear_gradients()
    scale.update(finite)
    trainer.step += 1
    trainer.tokens += int(tokens)
    return StepResult(
        trainer.step,
        loss_sum / count,
        norm,
        lr,
        int(tokens),
        time.perf_counter() - begin,
        spiked or not finite,
        (first_sample, first_sample + config.train.global_batch),
        stops > 0,
        spiked,
    )


def seed_dropout(seed: int, batch: Batch) -> None:
    """Make dropout a pure function of the run's seed and the samples, so that there is no random
    state to save and a resumed run draws what the unbroken one would have."""
    torch.manual_seed((seed * 0x9E3779B97F4A7C15 + batch.first_sample) & 0x7FFF_FFFF_FFFF_FFFF)
