"""The learning rate as a pure function of the step."""

from math import cos, pi

from megafrontier.config import OptimizerConfig, ScheduleConfig


def learning_rate(
    step: int, steps: int, optimizer: OptimizerConfig, schedule: ScheduleConfig
) -> float:
    """Rate of 0-based optimizer `step` out of `steps`.

    Linear warm-up to `optimizer.lr`; then cosine (Loshchilov & Hutter 2017), linear, wsd
    (warm-up, stable, linear decay over the last `decay_fraction`) or constant, to `min_lr`.
    """
    if step < schedule.warmup_steps:
        return optimizer.lr * (step + 1) / schedule.warmup_steps
    after_warmup = max(1, steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / after_warmup)
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * _shape(progress, schedule)


def _shape(progress: float, schedule: ScheduleConfig) -> float:
    """Height between 0 (`min_lr`) and 1 (`lr`) at `progress` in [0, 1] after the warm-up."""
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        return (1 + cos(pi * progress)) / 2
    if schedule.name == "linear":
        return 1 - progress
    if schedule.decay_fraction == 0:
        return 1.0
    return min(1.0, (1 - progress) / schedule.decay_fraction)
