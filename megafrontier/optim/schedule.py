"""The learning rate as a pure function of the step."""

from math import cos, pi

from megafrontier.config import OptimizerConfig, ScheduleConfig


def learning_rate(
    step: int, steps: int, optimizer: OptimizerConfig, schedule: ScheduleConfig
) -> float:
    """Rate of 0-based optimizer `step` out of `steps`.

    Linear warm-up to `optimizer.lr`; then cosine (Loshchilov & Hutter 2017), linear, wsd
    (warm-up, stable, linear decay over the last `decay_fraction`), all to `min_lr`, or constant.
    """
    if step < schedule.warmup_steps:
        return optimizer.lr * (step + 1) / schedule.warmup_steps
    after_warmup = max(1, steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / after_warmup)
    # `decay_fraction` is of all the steps, not of those after the warm-up.
    falling = min(1.0, schedule.decay_fraction * steps / after_warmup)
    height = _height(progress, schedule.name, falling)
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * height


def _height(progress: float, name: str, falling: float) -> float:
    """Between 0 (`min_lr`) and 1 (`lr`) at `progress` in [0, 1] after the warm-up, of which wsd
    spends the last part, `falling`, going down."""
    if name == "constant":
        return 1.0
    if name == "cosine":
        return (1 + cos(pi * progress)) / 2
    if name == "linear":
        return 1 - progress
    if falling == 0:
        return 1.0
    return min(1.0, (1 - progress) / falling)
