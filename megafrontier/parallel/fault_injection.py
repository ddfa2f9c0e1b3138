"""Faults on request, for the tests of the watchdog and of the launch. Never set it in a real run.

MEGAFRONTIER_FAULTS is a JSON list. Each entry names a fault point (`at`), the values that the point
must report to match (`rank` and others, such as `step` or `peer`), and what happens there (`do`):

    [{"at": "step", "rank": 1, "step": 3, "do": "kill"}]

`kill` and `freeze` send SIGKILL and SIGSTOP to this process, `hang` sleeps for good, `sleep` for
`seconds`, `wait` waits until `message` is in the file `path`, and `raise` raises `error` with
`message`.
"""

import builtins
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from megafrontier.common import errors
from megafrontier.parallel.env import RESTARTS, ROUND, identify

VARIABLE = "MEGAFRONTIER_FAULTS"
_NOT_COMPARED = {"at", "do", "error", "message", "path", "seconds"}


def fault_point(name: str, **state: object) -> None:
    """Fail here if MEGAFRONTIER_FAULTS asks for it. Costs one look at the environment if not."""
    if faults := os.environ.get(VARIABLE):
        state["rank"] = identify(os.environ).rank
        state["restarts"] = sum(int(os.environ.get(name, "0")) for name in (RESTARTS, ROUND))
        for fault in json.loads(faults):
            wanted = {key: value for key, value in fault.items() if key not in _NOT_COMPARED}
            if fault["at"] == name and wanted.items() <= state.items():
                _act(**fault)


def _act(
    do: str, seconds: float = 1e9, error: str = "", message: str = "", path: str = "", **_: Any
) -> None:
    if do == "raise":
        kinds = (vars(kind) for kind in (errors, builtins, torch))
        raise next(kind[error] for kind in kinds if error in kind)(message)
    if do in ("hang", "sleep"):
        time.sleep(seconds)
    elif do == "wait":
        while message not in Path(path).read_text():
            time.sleep(0.02)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[do])
