"""Actions of a pipeline that take the time of a device, and no core meanwhile.

An action computes its small part and then waits until its time is over, as a host does whose device
computes. Time that an action waits for its input does not count.
"""

import time
from collections.abc import Callable
from typing import Any


class StandIn:
    """The clock of the action that runs."""

    def __init__(self) -> None:
        self._begin = 0.0

    def restart(self) -> None:
        """The input of the action is there."""
        self._begin = time.perf_counter()

    def taking(self, seconds: float, action: Callable[..., Any]) -> Callable[..., Any]:
        """The action, which lasts at least `seconds`."""

        def slow(*arguments: Any, **named: Any) -> Any:
            self.restart()
            result = action(*arguments, **named)
            time.sleep(max(0.0, self._begin + seconds - time.perf_counter()))
            return result

        return slow

    def restarting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """A wait for an input, after which the action's time begins."""

        def waited(*arguments: Any, **named: Any) -> Any:
            result = wait(*arguments, **named)
            self.restart()
            return result

        return waited
