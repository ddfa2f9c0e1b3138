"""Local ranks: forked from one parent that has already imported torch.

Eight fresh interpreters would each pay for the import; a fork costs milliseconds. The parent must
not have started threads of its own (no parallel torch operation, no device) before it forks.
"""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafrontier.errors import UserError

GRACE_SECONDS = 10.0


def fork_ranks(count: int, body: Callable[[], int]) -> int:
    """Run `body` in `count` forked processes that find themselves as ranks 0 … count - 1.

    Returns 0 when all return 0, else the first failing rank's exit code; when one fails, the
    others are asked to end and, after a grace period, killed.
    """
    with tempfile.TemporaryDirectory(prefix="megafrontier-") as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        children = [_fork_one(rank, count, Path(folder), body) for rank in range(count)]
        return _wait_for(children)


def _fork_one(rank: int, count: int, folder: Path, body: Callable[[], int]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ["MEGAFRONTIER_LOCAL"] = f"{rank}/{count}"
        os.environ["MEGAFRONTIER_STORE"] = str(folder / "store")
        code = body()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except UserError as error:
        # All ranks meet the same bad input; one of them says so.
        code = 2
        if rank == 0:
            print(f"megafrontier: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for(children: list[int]) -> int:
    living = set(children)
    handlers = _forward_signals(living)
    first_failure = 0
    deadline = float("inf")
    try:
        while living:
            for child in list(living):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    living.discard(child)
                    code = os.waitstatus_to_exitcode(status)
                    if code and not first_failure:
                        first_failure = code if code > 0 else 128 - code
                        deadline = time.monotonic() + GRACE_SECONDS
                        _send(living, signal.SIGTERM)
            if time.monotonic() > deadline:
                _send(living, signal.SIGKILL)
            time.sleep(0.02)
    finally:
        _send(living, signal.SIGKILL)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return first_failure


def _forward_signals(living: set[int]) -> dict[int, Any]:
    """Pass what the parent is told on to the ranks, and keep waiting for them."""

    def forward(number: int, _frame: object) -> None:
        _send(living, number)

    numbers = (signal.SIGTERM, signal.SIGUSR1)
    return {number: signal.signal(number, forward) for number in numbers}


def _send(children: set[int], number: int) -> None:
    for child in children:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            continue
