"""The learning rate as a pure function of the step."""

from math import cos, pi

from megafrontier.config import OptimizerConfig, ScheduleConfig


def learning_rate(
    step: int, steps: int, optimizer: OptimizerConfig, schedule: ScheduleConfig
) -> float:
    """Learning rate of the 0-based optimizer `step` out of `steps`.

    Linear warm-up to `optimizer.lr`; then cosine (Loshchilov & Hutter 2017), linear or wsd
    (warm-up, stable, linear decay over the last `decay_fraction`) down to `min_lr`, or constant.
    """
    if step < schedule.warmup_steps:
        return optimizer.lr * (step + 1) / schedule.warmup_steps
    after_warmup = max(1, steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / after_warmup)
    # `decay_fraction` refers to all steps, not to those after the warm-up.
    decay = min(1.0, schedule.decay_fraction * steps / after_warmup)
    factor = _decay_factor(progress, schedule.name, decay)
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * factor


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
