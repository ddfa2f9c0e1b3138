"""The loop and one optimizer step. Everything that is not a step is a callback."""

from collections.abc import Callable, Sequence

import torch

from megafrontier.common.async_copy import DeviceTimer
from megafrontier.common.errors import is_collective
from megafrontier.common.signals import stop_requested
from megafrontier.data.sampling.samples import Batch
from megafrontier.optim.schedule import learning_rate
from megafrontier.parallel.world import World
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.step import AsyncStepResult, StepResult, finish_step
from megafrontier.training.trainer import Trainer, read_step

Heartbeat = Callable[[int | None], None]
LATE_MICRO_BATCHES = 8


def _nothing(_step: int | None) -> None:
    """Of a run that nobody watches."""


def run(
    trainer: Trainer,
    callbacks: Sequence[Callback],
    heartbeat: Heartbeat = _nothing,
    read_late: bool | None = None,
) -> None:
    """Train from where the trainer stands to its last step, or to the one in hand when a signal
    asks to stop. `heartbeat` hears of every step and callback that is done, and with None of every
    micro-batch that is under way.

    With `read_late` (default: `reads_late`) the host hands the device a step before it reads what
    the one before did, so that the device never waits for it; a request to stop is heard a step
    later.
    """
    if read_late is None:
        read_late = reads_late(trainer)
    stop = stop_agreed(trainer.world)
    for callback in callbacks if not stop else ():
        callback.at_start(trainer)
        heartbeat(None)
    waiting: AsyncStepResult | None = None
    while trainer.step < trainer.last_step and not stop:
        newest = start_step(trainer, heartbeat, waiting)
        if waiting is not None:
            stop = _tell(trainer, callbacks, waiting, heartbeat)
        waiting = newest
        is_wanted = any(
            callback.needs_settled_state(trainer, trainer.step) for callback in callbacks
        )
        if not read_late or is_wanted:
            stop = _tell(trainer, callbacks, waiting, heartbeat) or stop
            waiting = None
            # What callbacks do may take long, and a step more, too.
            stop = stop or (is_wanted and stop_agreed(trainer.world))
    if waiting is not None:
        _tell(trainer, callbacks, waiting, heartbeat)
    for callback in callbacks:
        callback.at_end(trainer)
        heartbeat(trainer.step)


def stop_agreed(world: World) -> bool:
    """Whether any rank has been asked to stop; all ranks call it."""
    return not world.all_true(not stop_requested())


def reads_late(trainer: Trainer) -> bool:
    """Whether it is worth it: on a GPU, unless a step has so many micro-batches that a moment
    between two of them is nothing, and one more after a request to stop is long."""
    is_short = trainer.loader.micro_batches <= LATE_MICRO_BATCHES
    return is_short and trainer.hierarchy.device.type == "cuda"


def _tell(
    trainer: Trainer, callbacks: Sequence[Callback], step: AsyncStepResult, heartbeat: Heartbeat
) -> bool:
    """Wait for a step and tell the callbacks; whether any rank has been asked to stop.

    What all ranks raise alike leaves nothing under way: another step has begun perhaps, and ranks
    that gave up their groups first would end the others with an error of these.
    """
    result = step.read()
    heartbeat(result.step)  # not before: a device may be far behind the host
    try:
        for callback in callbacks:
            callback.after_step(trainer, result)
            heartbeat(result.step)
    except Exception as error:
        if is_collective(error):
            trainer.hierarchy.drain_and_barrier()
        raise
    return result.stop


def train_step(trainer: Trainer) -> StepResult:
    """One optimizer step from its beginning to its end."""
    return start_step(trainer).read()


def start_step(
    trainer: Trainer, heartbeat: Heartbeat = _nothing, after: AsyncStepResult | None = None
) -> AsyncStepResult:
    """One optimizer step: every micro-batch forward and backward, then one update. It takes as long
    as from now, or from the end of the step `after` which it follows at once.

    The loss is a sum over tokens until the end, where it is divided once by the exact number of
    tokens in the global batch. A step with a non-finite loss or gradient changes no weight, nor
    does one that the spike rule finds. On a GPU nothing here waits for the device.
    """
    begin = after.ended if after is not None else DeviceTimer(trainer.hierarchy.device)
    config, engine = trainer.config, trainer.engine
    _, first_sample = trainer.loader.position(trainer.step)
    lr = learning_rate(trainer.step, config.train.steps, config.optimizer, config.schedule)
    micro_batches = read_step(trainer.loader, trainer.step, trainer.hierarchy.rank)
    totals = torch.zeros(2, dtype=torch.float64, device=trainer.hierarchy.device)
    for number, batch in enumerate(micro_batches, start=1):
        seed_dropout(config.run.seed, batch)
        loss = trainer.model(batch.tokens, batch.targets, batch.documents)
        is_last = number == len(micro_batches)
        engine.backward(trainer.loss_scale.scaled(loss), is_last)
        heartbeat(None)
        totals += torch.stack([loss.detach().double(), (batch.targets >= 0).sum().double()])

    gradients = engine.finish_gradients()
    verdict = finish_step(trainer, totals, gradients)
    trainer.optimizer.step(gradients, lr, verdict.divisor, verdict.skip)
    engine.publish()
    engine.clear_gradients()
    scale = trainer.loss_scale.scale
    trainer.loss_scale.update(verdict.is_bad)
    # The errors of a skipped step must not come back, and the others are in units of the scale.
    engine.scale_errors((1 - verdict.skip) * trainer.loss_scale.scale / scale)
    trainer.step += 1
    return AsyncStepResult(trainer, begin, lr, first_sample, verdict)


def seed_dropout(seed: int, batch: Batch) -> None:
    """Make dropout a pure function of the run's seed and the samples, so that there is no random
    state to save and a resumed run draws what the unbroken one would have."""
    value = (seed * 0x9E3779B97F4A7C15 + batch.first_sample) & 0x7FFF_FFFF_FFFF_FFFF
    # Not torch.manual_seed: for devices that are not there it keeps every call, with its stack.
    if batch.tokens.is_cuda:
        torch.cuda.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)
