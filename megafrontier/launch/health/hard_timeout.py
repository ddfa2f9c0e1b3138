"""The last means to end a rank: a thread that needs no Python.

A launch waits while its device's queue is full, and some (of compiled blocks, of Triton's kernels
on ROCm) keep Python's lock meanwhile, as a question to a device that does not answer may. Where
the run hangs, no thread of Python could then tell anybody, or end the process.
"""

import faulthandler
import threading

STDERR = 2


class HardTimeout:
    """Ends the process with exit code 1 and all stacks on stderr when it has not been armed again
    for so long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False

    def arm(self, seconds: float) -> None:
        """End the process in so many seconds, in place of what was said before. Nothing once it has
        been disarmed."""
        with self._lock:
            if not self._is_over:
                faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)

    def disarm(self) -> None:
        """For good."""
        with self._lock:
            self._is_over = True
            faulthandler.cancel_dump_traceback_later()
