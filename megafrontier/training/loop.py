"""The training loop and one optimizer step. Everything that is not a step is a callback."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

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


class StepQueue:
    """Started steps whose results the host has not read, at most `depth` (0 or 1) between steps.

    With depth 1 the host gives the device a step before it reads the result of the step before, so
    that the device never waits for the host. In return a request to stop takes effect a step later.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps: deque[AsyncStepResult] = deque()

    @property
    def newest(self) -> AsyncStepResult | None:
        return self._steps[-1] if self._steps else None

    def push(self, step: AsyncStepResult) -> Iterator[StepResult]:
        """Add a started step and yield the results of the steps before it."""
        self._steps.append(step)
        yield from self._read(keep=1)

    def settle(self, needs_settled_state: bool) -> Iterator[StepResult]:
        """Yield what has to be read before the next step: if a callback needs the trainer's state
        between two steps, the result of every step."""
        yield from self._read(keep=0 if needs_settled_state else self._depth)

    def _read(self, keep: int) -> Iterator[StepResult]:
        while len(self._steps) > keep:
            yield self._steps.popleft().read()


def run(
    trainer: Trainer,
    callbacks: Sequence[Callback],
    heartbeat: Heartbeat = lambda step: None,
    depth: int | None = None,
) -> None:
    """Train from the trainer's step to its last step, or until a signal asks to stop.

    callbacks: called in the order of their priority, those of equal priority in this order.
    heartbeat: is called with the step after each step and each callback, and with None after each
        micro-batch.
    depth: of the `StepQueue`; default: `queue_depth`.
    """
    callbacks = sorted(callbacks, key=lambda callback: -callback.priority)
    try:
        _run(trainer, callbacks, heartbeat, queue_depth(trainer) if depth is None else depth)
    except Exception as error:
        _on_error(trainer, callbacks, error)
        raise


def _on_error(trainer: Trainer, callbacks: Sequence[Callback], error: Exception) -> None:
    for callback in callbacks:
        try:
            callback.on_error(trainer, error)
        except Exception as other:  # must not replace the error that ends the run
            where = f"{type(callback).__name__}.on_error"
            trainer.run_logger.info(f"warning: {where}: {type(other).__name__}: {other}")


def _run(trainer: Trainer, callbacks: Sequence[Callback], heartbeat: Heartbeat, depth: int) -> None:
    queue = StepQueue(depth)
    stop = stop_agreed(trainer.world)
    for callback in callbacks if not stop else ():
        callback.at_start(trainer)
        heartbeat(None)
    while trainer.step < trainer.last_step and not stop:
        for result in queue.push(start_step(trainer, callbacks, heartbeat, queue.newest)):
            stop = _after_step(trainer, callbacks, result, heartbeat)
        settled = any(callback.needs_settled_state(trainer, trainer.step) for callback in callbacks)
        for result in queue.settle(settled):
            stop = _after_step(trainer, callbacks, result, heartbeat) or stop
        if settled and not stop:
            # Evaluation and checkpoints may take long, and so does another step.
            stop = stop_agreed(trainer.world)
    for result in queue.settle(True):
        _after_step(trainer, callbacks, result, heartbeat)
    for callback in callbacks:
        callback.at_end(trainer)
        heartbeat(trainer.step)


def stop_agreed(world: World) -> bool:
    """Whether any rank has been asked to stop. All ranks call it."""
    return not world.all_true(not stop_requested())


def queue_depth(trainer: Trainer) -> int:
    """1 if reading results late is worth it: on a GPU, unless a step has many micro-batches. Then
    the gap between two steps is short compared with a step, and the step that a request to stop
    has to wait for is long."""
    is_short = trainer.loader.micro_batches <= LATE_MICRO_BATCHES
    return int(is_short and trainer.hierarchy.device.type == "cuda")


def _after_step(
    trainer: Trainer, callbacks: Sequence[Callback], result: StepResult, heartbeat: Heartbeat
) -> bool:
    """Call the callbacks with a step's result. Returns whether any rank has been asked to stop."""
    heartbeat(result.step)
    try:
        for callback in callbacks:
            callback.after_step(trainer, result)
            heartbeat(result.step)
    except Exception as error:
        if is_collective(error):
            # The next step may be in progress. A rank that destroyed its process groups now would
            # end the others with an error about these.
            trainer.hierarchy.drain_and_barrier()
        raise
    return result.stop


def train_step(trainer: Trainer) -> StepResult:
    """One optimizer step from beginning to end, without callbacks."""
    return start_step(trainer).read()


def start_step(
    trainer: Trainer,
    callbacks: Sequence[Callback] = (),
    heartbeat: Heartbeat = lambda step: None,
    previous: AsyncStepResult | None = None,
) -> AsyncStepResult:
    """Hand one optimizer step to the device: all micro-batches forward and backward, one update.

    A step with a non-finite loss or gradient changes no weight, nor does a spike. On a GPU nothing
    here waits for the device. The step's time counts from now, or if `previous` is still in
    progress, from the end of that.
    """
    begin = DeviceTimer(trainer.hierarchy.device) if previous is None else previous.ended
    for callback in callbacks:
        callback.before_step(trainer)
    config, engine = trainer.config, trainer.engine
    _, first_sample = trainer.loader.position(trainer.step)
    lr = learning_rate(trainer.step, config.train.steps, config.optimizer, config.schedule)
    totals = forward_backward(trainer, heartbeat)
    gradients = engine.finish_gradients()
    for callback in callbacks:
        callback.before_optimizer(trainer, gradients)
    stats = finish_step(trainer, totals, gradients)
    trainer.optimizer.step(gradients, lr, stats.divisor, stats.skip)
    scale_change = trainer.loss_scale.update(stats.is_bad)
    engine.finish_step(stats.skip, scale_change)
    trainer.step += 1
    return AsyncStepResult(trainer, begin, lr, first_sample, stats)


def forward_backward(trainer: Trainer, heartbeat: Heartbeat) -> torch.Tensor:
    """Forward and backward of a step's micro-batches; gradients go to their shards.

    Returns this rank's sum of losses and number of tokens, float64 [2] on the device. The sum is
    divided only at the end of the step, once, by the number of tokens in the global batch.
    """
    batches = read_step(trainer.loader, trainer.step, trainer.hierarchy.rank)
    totals = torch.zeros(2, dtype=torch.float64, device=trainer.hierarchy.device)
    for number, batch in enumerate(batches, start=1):
        seed_dropout(trainer.config.run.seed, batch)
        loss = trainer.model(batch.tokens, batch.targets, batch.documents)
        trainer.engine.backward(trainer.loss_scale.scaled(loss), is_last=number == len(batches))
        heartbeat(None)
        totals += torch.stack([loss.detach().double(), (batch.targets >= 0).sum().double()])
    return totals


def seed_dropout(seed: int, batch: Batch) -> None:
    """Make dropout a pure function of the run's seed and the samples.

    There is no random state to save, and a resumed run draws the same masks.
    """
    value = (seed * 0x9E3779B97F4A7C15 + batch.first_sample) & 0x7FFF_FFFF_FFFF_FFFF
    # torch.manual_seed would keep every call with its stack for devices that are not there.
    if batch.tokens.is_cuda:
        torch.cuda.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)
