"""Callbacks that send signals, so that it does not depend on timing at which step a run is asked to
stop. The environment says which, as STEP PROCESS SIGNAL."""

import os
import signal
import threading

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


class SignalAfterStep(SignalInStep):
    """Each rank signals after a step, before its evaluation."""

    def before_step(self, trainer):
        pass

    def after_step(self, trainer, result):
        if result.step == self._step:
            self._send()


class SignalsUntilSaved(SignalInStep):
    """After the first signal, more follow to rank and parent until a checkpoint is complete."""

    def __init__(self):
        super().__init__()
        self._saved, self._count = threading.Event(), 0
        self._thread = threading.Thread(target=self._pester, daemon=True)

    def _send(self):
        super()._send()
        self._thread.start()

    def _pester(self):
        while not self._saved.wait(0.005):
            for number in (signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
                os.kill(os.getppid(), number)
                self._count += 1

    def on_checkpoint_saved(self, trainer, path):
        self._saved.set()
        if trainer.world.rank == 1:
            self._thread.join()
            print(f"{self._count} more signals", flush=True)
