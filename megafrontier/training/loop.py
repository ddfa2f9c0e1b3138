"""The training loop and one optimizer step. Everything that is not a step is a callback."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import torch

from megafrontier.common.async_copy import DeviceTimer
from megafrontier.common.errors import is_collective
from megafrontier.common.signals import stop_requested
from megafrontier.data.sampling.batches import BatchSizes
from megafrontier.data.sampling.samples import Batch
from megafrontier.optim.schedule import learning_rate, weight_decay_factor
from megafrontier.parallel.world import World
from megafrontier.pipeline.work import Work, count_routed
from megafrontier.splits.context import work_imbalance
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.step import AsyncStepResult, StepResult, finish_step
from megafrontier.training.trainer import Trainer, read_step

Heartbeat = Callable[[int | None], None]
LATE_MICRO_BATCHES = 8


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
    depth: how many started steps may wait for the host to read their results when the next one
        starts, 0 or 1; default: `queue_depth`. With 1 the device never waits for the host. In
        return a request to stop takes effect a step later.
    """
    callbacks = sorted(callbacks, key=lambda callback: -callback.priority)
    try:
        _run(trainer, callbacks, heartbeat, queue_depth(trainer) if depth is None else depth)
    except Exception as error:
        for callback in callbacks:
            try:
                callback.on_error(trainer, error)
            except Exception as other:  # must not replace the error that ends the run
                where = f"{type(callback).__name__}.on_error"
                trainer.run_logger.info(f"warning: {where}: {type(other).__name__}: {other}")
        raise


def _run(trainer: Trainer, callbacks: Sequence[Callback], heartbeat: Heartbeat, depth: int) -> None:
    pending: deque[AsyncStepResult] = deque()

    def read_results(keep: int) -> bool:
        """Read the oldest results until `keep` are left. Returns whether any rank is to stop."""
        stops = False
        while len(pending) > keep:
            result = pending.popleft().read()
            stops = _after_step(trainer, callbacks, result, heartbeat) or stops
        return stops

    stop = stop_agreed(trainer.world)
    if not stop:
        for callback in callbacks:
            callback.at_start(trainer)
            heartbeat(None)
        stop = stop_agreed(trainer.world)  # they may have taken long
    while trainer.step < trainer.last_step and not stop:
        previous = pending[-1] if pending else None
        pending.append(start_step(trainer, callbacks, heartbeat, previous))
        stop = read_results(keep=1)
        settled = any(callback.needs_settled_state(trainer, trainer.step) for callback in callbacks)
        stop = read_results(keep=0 if settled else depth) or stop
        if settled and not stop:
            # Evaluation and checkpoints may take long, and so does another step.
            stop = stop_agreed(trainer.world)
    read_results(keep=0)
    for callback in callbacks:
        with _counting(trainer, callback):
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
    return int(is_short and trainer.mesh.device.type == "cuda")


def _after_step(
    trainer: Trainer, callbacks: Sequence[Callback], result: StepResult, heartbeat: Heartbeat
) -> bool:
    """Call the callbacks with a step's result. Returns whether any rank has been asked to stop."""
    heartbeat(result.step)
    try:
        for callback in callbacks:
            with _counting(trainer, callback, is_between=trainer.step == result.step):
                callback.after_step(trainer, result)
            heartbeat(result.step)
    except Exception as error:
        if is_collective(error):
            # The next step may be in progress. A rank that destroyed its process groups now would
            # end the others with an error about these.
            trainer.mesh.drain_and_barrier()
        raise
    return result.stop


@contextmanager
def _counting(trainer: Trainer, callback: Callback, is_between: bool = True) -> Iterator[None]:
    """Count the body's time as a callback's. `is_between`: no step is in progress."""
    begin = monotonic()
    yield
    if is_between:
        seconds, kind = trainer.between_seconds, callback.between_steps
        seconds[kind] = seconds.get(kind, 0.0) + monotonic() - begin


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
    begin = DeviceTimer(trainer.mesh.device) if previous is None else previous.ended
    for callback in callbacks:
        callback.before_step(trainer)
    for meter in trainer.meters:
        meter.begin_step(trainer.step)
    config, engine = trainer.config, trainer.engine
    samples = trainer.loader.sample_range(trainer.step)
    sizes = BatchSizes.of(config.train)
    lr = learning_rate(
        trainer.step, config.train.steps, config.optimizer, config.schedule, sizes.before
    )
    decay = weight_decay_factor(trainer.step, config.train.steps, config.schedule, sizes.before)
    totals = forward_backward(trainer, heartbeat)
    gradients = engine.finish_gradients()
    if trainer.plan.is_offloaded:
        DeviceTimer(trainer.mesh.device).wait()  # they are in host memory
    for callback in callbacks:
        callback.before_optimizer(trainer, gradients)
    stats = finish_step(trainer, totals, gradients)
    trainer.optimizer.step(gradients, lr, stats.divisor, stats.skip, decay)
    for callback in callbacks:
        callback.after_optimizer(trainer, stats)
    scale_change = trainer.loss_scale.update(stats.is_bad)
    engine.finish_step(stats.skip, scale_change)
    trainer.step += 1
    return AsyncStepResult(trainer, begin, lr, samples, stats)


def forward_backward(trainer: Trainer, heartbeat: Heartbeat) -> torch.Tensor:
    """Forward and backward of a step's micro-batches; gradients go to their shards.

    Returns this rank's sum of losses and number of tokens, float64 [2] on the device. The sum is
    divided only at the end of the step, once, by the number of tokens in the global batch.
    """
    seed, work_rank = trainer.config.run.seed, trainer.mesh.work_rank
    batches = read_step(trainer.loader, trainer.step, trainer.mesh.rank)
    _scale_router_losses(trainer, batches)
    for batch in batches:
        _record_imbalance(trainer, batch)

    def before(batch: Batch, block: int) -> None:
        seed_dropout(seed, batch, work_rank, block)
        for meter in trainer.meters:
            meter.begin_forward(batch)

    return trainer.runner.train(
        Work(
            batches,
            before=before,
            scaled=trainer.loss_scale.scaled,
            after=lambda: heartbeat(None),
        )
    )


def _scale_router_losses(trainer: Trainer, batches: Sequence[Batch]) -> None:
    """Set the factor of the routers' losses, see Note [Losses of the router]."""
    balance = trainer.balance
    if balance is None or not balance.has_losses:
        return
    counts = torch.stack([count_routed(batch) for batch in batches]).sum(0)
    with trainer.engine.ledger.waiting("tokens of routers"):
        # Equally many ranks read each sample, so the counts are all too large by the same factor.
        counts = trainer.world.sum(counts)
    balance.scale_losses(trainer.loss_scale.scale, counts)


def _record_imbalance(trainer: Trainer, batch: Batch) -> None:
    """Record how unequally the ranks of a context split share the attention to documents."""
    size = trainer.mesh.splits.context
    if size > 1 and batch.documents is not None:
        trainer.metrics.add("context_imbalance", work_imbalance(batch.documents, size), "mean")


def seed_dropout(seed: int, batch: Batch, work_rank: int, block: int = 0) -> None:
    """Make dropout a pure function of the run's seed, the samples, the rank among those that have
    the same samples (`Mesh.work_rank`), which drop from other heads and tokens of them, and the
    first block of a pipeline's stage.

    There is no random state to save, and a resumed run draws the same masks.
    """
    value = seed * 0x9E3779B97F4A7C15 + batch.first_sample + work_rank * 0x632BE59BD9B4E019
    value += block * 0x2545F4914F6CDD1D
    value &= 0x7FFF_FFFF_FFFF_FFFF
    # torch.manual_seed would keep every call with its stack for devices that are not there.
    if batch.tokens.is_cuda:
        torch.cuda.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)
