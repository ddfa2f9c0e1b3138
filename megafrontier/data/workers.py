"""Processes that work for a command and end with it: at once, where it fails or is told to end."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Self, TypeVar

from megafrontier.common.errors import UserError

Item = TypeVar("Item")
Made = TypeVar("Made")


class Workers:
    """`count` processes, forked from this one. Left by an exception they are killed, whatever they
    have in hand; they hold nothing that needs an end."""

    def __init__(self, count: int, start: Callable[[], None] | None = None) -> None:
        """`start` is called in each at first; it need not be picklable."""
        self._ahead = 2 * count + 2
        # fork: workers share what there is, and need not import anything again.
        context = multiprocessing.get_context("fork")
        others = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(count, context, _begin, (start,))
        # All workers fork now, before any thread or lock of ours exists.
        self._pool.submit(int).result()
        self._processes = set(multiprocessing.active_children()) - others

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes if kind is not None else ():
            process.kill()
        self._pool.shutdown(cancel_futures=True)

    def results(
        self, work: Callable[[Item], Made], items: Iterator[Item], remedy: str
    ) -> Iterator[Made]:
        """What `work` makes of each item, in their order. Few are under way at any time, so that
        memory does not grow with their number. Raises UserError, with the `remedy`, when a worker
        is killed."""
        under_way: deque[Future[Made]] = deque()
        try:
            for item in items:
                under_way.append(self._pool.submit(work, item))
                if len(under_way) >= self._ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            line = f"a worker was killed, perhaps for want of memory; {remedy}"
            raise UserError(line) from error


def _begin(start: Callable[[], None] | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which a whole group may get: the parent's
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if start is not None:
        start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
