"""One turn of a benchmark, and what a turn is measured with.

rounds.py starts it as: python -m scripts.benchmarks.shared.child MODULE:FUNCTION ANSWER ARGUMENTS
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.shared.measuring import resident_bytes, use_packages


class Unable(Exception):
    """Why this variant cannot be measured here."""


class Finished(Exception):
    """Raised inside a loop that is not ours, to end it when enough was measured."""


def device() -> torch.device:
    """Where to measure."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise() -> None:
    """Wait until the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """Most memory this process had: allocated on a GPU, resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resident_bytes("VmHWM")


def held_bytes() -> int:
    """What it has now, in the same measure; on a CPU before a model exists these are libraries."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else resident_bytes()


class Clock:
    """Times the steps after a warm-up: `tick` at the end of each, `figures` when `done`.

    The device is waited for at both ends of the timed span only, so that a loop that runs ahead of
    its device may.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self._warm_up, self._steps = warm_up, steps
        self._count = 0
        self._marks = [(time.perf_counter(), time.process_time())]
        self._held = held_bytes()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @property
    def done(self) -> bool:
        """Whether all steps were made."""
        return self._count >= self._warm_up + self._steps

    def tick(self) -> None:
        """A step has ended, or with a GPU: was handed to it."""
        self._count += 1
        if self._count in (self._warm_up, self._warm_up + self._steps):
            synchronise()
            self._marks.append((time.perf_counter(), time.process_time()))

    def figures(self) -> dict[str, float]:
        """Mean seconds of a step, and of all cores, seconds until the warm-up was over, peak memory
        in bytes, and what there was before the clock was made."""
        (start, _), (warm, warm_cpu), (end, end_cpu) = self._marks
        return {
            "step_seconds": (end - warm) / self._steps,
            "cpu_seconds": (end_cpu - warm_cpu) / self._steps,
            "warm_up_seconds": warm - start,
            "peak_bytes": peak_bytes(),
            "idle_bytes": self._held,
        }


def repeat(work: Callable[[], object], warm_up: int, steps: int) -> dict[str, float]:
    """The figures of `work` done again and again."""
    clock = Clock(warm_up, steps)
    while not clock.done:
        work()
        clock.tick()
    return clock.figures()


def main() -> None:
    """Call the function, write its figures or why there are none."""
    function, answer, arguments = sys.argv[1:]
    use_packages()
    module, name = function.split(":")
    values: dict[str, Any] = {}
    skipped = ""
    try:
        values = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    except ModuleNotFoundError as error:
        skipped = f"not installed: {error.name}"
    except ImportError as error:  # of another version, or for want of something that it names
        skipped = f"cannot be imported: {str(error).strip().splitlines()[0]}"
    except Unable as error:
        skipped = str(error)
    Path(answer).write_text(json.dumps([values, skipped]))


if __name__ == "__main__":
    # Under its own name, so that Unable is the same class for the modules that import it.
    importlib.import_module("scripts.benchmarks.shared.child").main()
