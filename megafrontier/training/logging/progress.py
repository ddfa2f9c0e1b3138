"""What a person sees of a run: plain lines on standard output and in log.txt."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from statistics import median
from typing import Any, TextIO

from megafrontier.optim.gradients import is_scale_overflow


class ProgressLine:
    """Prints lines on `stream` and in the file `log`; of the steps, every `every`-th."""

    def __init__(
        self,
        steps: int,
        stream: TextIO,
        every: int,
        log: TextIO | None = None,
        stop_at: int | None = None,
    ) -> None:
        """`steps` is the run's last step, `stop_at` this process's last step (None: the same)."""
        self._steps, self._every = steps, every
        self._stop_at = stop_at or steps
        self._streams = [stream] if log is None else [stream, log]
        # The median ignores single steps that compiled, evaluated or hung; 20 steps are few enough
        # to follow a lasting change.
        self._recent_seconds: deque[float] = deque(maxlen=20)

    def update(self, values: dict[str, Any]) -> None:
        """Print one line of metrics in the format of metrics.jsonl, if it is due. `waiting` among
        them is the fraction of the step for which computation waited for communication."""
        step, is_evaluation = values["step"], "step_seconds" not in values
        if not is_evaluation:
            self._recent_seconds.append(values["step_seconds"])
        is_special = is_evaluation or values.get("skipped", False)
        if is_special or step % self._every == 0 or step >= self._stop_at:
            seconds = median(self._recent_seconds or [0]) * max(self._stop_at - step, 0)
            self.note(format_line(values, self._steps, None if is_evaluation else seconds))

    def note(self, line: str) -> None:
        """Print a line."""
        for stream in self._streams:
            # The disk may be full, or the other end of a pipe closed.
            with suppress(OSError):
                print(line, file=stream, flush=True)


_PARTS: dict[str, Callable[[float], str]] = {
    "loss": lambda nats: f"loss {nats:.3f}",
    "valid_loss": lambda nats: f"valid loss {nats:.3f}",
    "average_valid_loss": lambda nats: f"of the average {nats:.3f}",
    "grad_norm": lambda norm: f"grad {norm:.2f}",
    "lr": lambda rate: f"lr {rate:.1e}",
    "tokens_per_second": lambda speed: f"{speed:,.0f} tok/s",
    "tflops_per_device": lambda speed: f"{speed:.3g} TF/s",
    "mfu": lambda fraction: f"MFU {fraction:.1%}",
    "waiting": lambda fraction: f"wait {fraction:.0%}",
    "context_imbalance": lambda fraction: f"imbalance {fraction:.1%}",
    "memory_gib": lambda memory: f"{memory:.1f} GiB",
}


def format_line(values: dict[str, Any], steps: int, eta_seconds: float | None) -> str:
    """One line of metrics for people, without those that are null or absent.

    `steps` is the run's last step; without `eta_seconds` the line has no remaining time.
    """
    parts = [f"step {values['step']}/{steps}"]
    if values.get("skipped"):
        parts.append(f"skipped: {_why_skipped(values)}")
    parts += [show(values[key]) for key, show in _PARTS.items() if values.get(key) is not None]
    parts += [
        f"{key.removeprefix('valid_loss/')} {values[key]:.3f}"
        for key in values
        if key.startswith("valid_loss/") and values[key] is not None
    ]
    for task, results in values.get("tasks", {}).items():
        parts.append(" ".join([task, *(f"{key} {results[key]:.4g}" for key in results)]))
    if eta_seconds is not None:
        parts.append(f"ETA {timedelta(seconds=round(eta_seconds))}")
    return "  ".join(parts)


def _why_skipped(values: Mapping[str, Any]) -> str:
    if values.get("tokens_per_second") == 0:
        return "no token has a target"
    if values.get("spike"):
        return "spike in loss or gradient"
    scale = values.get("loss_scale", 0)
    if is_scale_overflow(scale, values.get("loss")):
        return f"gradient too large for fp16, loss scale lowered to {scale:g}"
    return "loss or gradient not finite"
