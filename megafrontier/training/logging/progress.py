"""What a person sees of a run: one live line on a terminal, or plain lines in a log."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import median
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megafrontier.optim.gradients import is_scale_overflow


class Progress:
    """Shows each step on `stream`. Use it as a context manager, which restores the terminal.

    On a terminal the newest step is one live line below the printed lines. On any other stream, and
    in the file `log`, every `every`-th step is a plain line.
    """

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
        self._stream, self._log = stream, log
        # The median ignores single steps that compiled, evaluated or hung; 20 steps are few enough
        # to follow a lasting change.
        self._recent_seconds: deque[float] = deque(maxlen=20)
        self._live: Live | None = None
        if stream.isatty():
            # transient: the live line repeats a step, so it is removed at the end.
            self._live = Live(console=Console(file=stream), auto_refresh=False, transient=True)
            self._live.start()

    def update(self, values: dict[str, Any]) -> None:
        """Show one line of metrics in the format of metrics.jsonl. `waiting` among them is the
        fraction of the step for which computation waited for communication."""
        if values.get("step_seconds") is not None:
            self._recent_seconds.append(values["step_seconds"])
        line = format_line(values, self._steps, self._eta_seconds(values))
        if self._live is not None and "valid_loss" not in values:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        if self._is_printed(values):
            self.note(line)

    def note(self, line: str) -> None:
        """Print a line above the live one and in the log."""
        # The disk may be full, or the other end of a pipe closed.
        with suppress(OSError):
            if self._live is not None:
                self._live.console.print(Text(line), soft_wrap=True)
            else:
                print(line, file=self._stream, flush=True)
        if self._log is not None:
            with suppress(OSError):
                print(line, file=self._log, flush=True)

    def close(self) -> None:
        """Remove the live line. Printed lines stay."""
        if self._live is not None:
            self._live.stop()

    def _is_printed(self, values: dict[str, Any]) -> bool:
        step = values["step"]
        special = "valid_loss" in values or values.get("skipped", False)
        return special or step % self._every == 0 or step >= self._stop_at

    def _eta_seconds(self, values: dict[str, Any]) -> float | None:
        if "valid_loss" in values or not self._recent_seconds:
            return None
        return median(self._recent_seconds) * max(self._stop_at - values["step"], 0)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_PARTS: dict[str, Callable[[float], str]] = {
    "loss": lambda nats: f"loss {nats:.3f}",
    "valid_loss": lambda nats: f"valid loss {nats:.3f}",
    "grad_norm": lambda norm: f"grad {norm:.2f}",
    "lr": lambda rate: f"lr {rate:.1e}",
    "tokens_per_second": lambda speed: f"{format_count(speed)} tok/s",
    "tflops_per_device": lambda speed: f"{speed:.3g} TF/s",
    "mfu": lambda fraction: f"MFU {fraction:.1%}",
    "waiting": lambda fraction: f"wait {fraction:.0%}",
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
    if eta_seconds is not None:
        parts.append(f"ETA {format_duration(eta_seconds)}")
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


def format_count(number: float) -> str:
    """Three digits and a suffix: 950, 12.3k, 4.56M, 1.2G."""
    for suffix in ("", "k", "M", "G"):
        # 999.5 would round to four digits, so it takes the next suffix.
        if abs(number) < 999.5:
            return f"{number:.3g}{suffix}"
        number /= 1000
    return f"{number:.3g}T"


def format_duration(seconds: float) -> str:
    """The two largest units: 42s, 3m12s, 1h04m, 2d03h."""
    total = round(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{total % 60:02d}s" if minutes else f"{total}s"
