"""Callbacks that send signals, so that it does not depend on timing at which step a run is asked to
stop. The environment says which, as STEP PROCESS SIGNAL."""

import os
import signal

from megafrontier.training.callbacks.base import Callback

VARIABLE = "MEGAFRONTIER_TEST_SIGNAL"


class SignalInStep(Callback):
    """Rank 1 signals itself (getpid) or its parent (getppid) at the beginning of a step."""

    def __init__(self):
        step, self._process, name = os.environ[VARIABLE].split()
        self._step, self._signal = int(step), signal.Signals[name]

    def before_step(self, trainer):
        if trainer.step == self._step - 1 and trainer.world.rank == 1:
            self._send()

    def _send(self):
        os.kill(getattr(os, self._process)(), self._signal)
