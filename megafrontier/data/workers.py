"""Worker processes of a command, which end at once when the command fails or is interrupted."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, Self, TypeVar

from megafrontier.common.errors import UserError
from megafrontier.common.signals import die_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

_SECONDS_BETWEEN_CALLS = 0.2


class Workers(Generic[Item, Result]):
    """A pool of `count` forked processes that call `work`, which need not be picklable.

    If the `with` block raises, the workers are killed, whatever they are doing. They must not hold
    anything that needs cleaning up.
    """

    def __init__(self, count: int, work: Callable[[Item], Result]) -> None:
        self._max_pending = 2 * count + 2
        # Forked workers share the memory of this process, and import nothing again.
        context = multiprocessing.get_context("fork")
        others = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(count, context, _begin, (os.getpid(), work))
        # The first task forks all workers. Fork them now, before we have threads or locks.
        self._pool.submit(int).result()
        self._processes = set(multiprocessing.active_children()) - others

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes if kind is not None else ():
            process.kill()
        self._pool.shutdown(cancel_futures=True)

    def map(
        self, items: Iterator[Item], remedy: str, on_wait: Callable[[], None] = lambda: None
    ) -> Iterator[Result]:
        """Yield `work(item)` of each item, in order. `on_wait` is called now and then meanwhile.

        Only a few items are pending at any time, so memory does not grow with their number. Raises
        UserError, with the `remedy`, if a worker is killed.
        """
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                pending.append(self._pool.submit(_call, item))
                if len(pending) >= self._max_pending:
                    yield _result(pending.popleft(), on_wait)
            while pending:
                yield _result(pending.popleft(), on_wait)
        except BrokenProcessPool as error:
            line = f"a worker was killed, perhaps for want of memory; {remedy}"
            raise UserError(line) from error


def _result(future: Future[Result], on_wait: Callable[[], None]) -> Result:
    while not wait([future], _SECONDS_BETWEEN_CALLS).done:
        on_wait()
    return future.result()


_work: Callable[[Any], Any]


def _begin(parent: int, work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    # A terminal sends these to the whole process group; the parent acts on them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)


def _call(item: Any) -> Any:
    return _work(item)
