"""The learning rate and the weight decay as pure functions of the step."""

from collections.abc import Callable
from math import cos, pi

from megafrontier.config import OptimizerConfig, ScheduleConfig


def learning_rate(
    step: int,
    steps: int,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    samples_before: Callable[[int], int] | None = None,
) -> float:
    """Learning rate of the 0-based optimizer `step` out of `steps`.

    Linear warm-up to `optimizer.lr`; then cosine (Loshchilov & Hutter 2017), linear or wsd
    (warm-up, stable, linear decay over the last `decay_fraction`) down to `min_lr` at
    `decay_steps`, or constant.
    With `schedule.by: tokens`, time is counted in samples: `samples_before` a step.
    """
    now, after = step, step + 1
    warmup, end = schedule.warmup(steps), schedule.decay_end(steps)
    if schedule.by == "tokens" and samples_before is not None:
        now, after, warmup, end = map(samples_before, (now, after, warmup, end))
    if now < warmup:
        return optimizer.lr * after / warmup
    after_warmup = max(1, end - warmup)
    progress = min(1.0, (now - warmup) / after_warmup)
    # `decay_fraction` counts the warm-up, too.
    decay = min(1.0, schedule.decay_fraction * end / after_warmup)
    factor = _decay_factor(progress, schedule.name, decay)
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * factor


def weight_decay_factor(
    step: int,
    steps: int,
    schedule: ScheduleConfig,
    samples_before: Callable[[int], int] | None = None,
) -> float:
    """What weight decay is multiplied by in the 0-based optimizer `step` out of `steps`: from
    `start` in the first to `end` after the last, linear or as half a cosine."""
    now, end = step, steps
    if schedule.by == "tokens" and samples_before is not None:
        now, end = map(samples_before, (now, end))
    progress, decay = min(1.0, now / max(1, end)), schedule.weight_decay
    share = progress if decay.name == "linear" else (1 - cos(pi * progress)) / 2
    return decay.start + (decay.end - decay.start) * share


def _decay_factor(progress: float, name: str, decay: float) -> float:
    """1 (`lr`) to 0 (`min_lr`) at `progress` in [0, 1] after the warm-up. `decay`: the part of that
    in which wsd decays."""
    if name == "constant":
        return 1.0
    if name == "cosine":
        return (1 + cos(pi * progress)) / 2
    if name == "linear":
        return 1 - progress
    return min(1.0, (1 - progress) / decay) if decay > 0 else 1.0
