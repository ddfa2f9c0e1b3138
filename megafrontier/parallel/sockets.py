"""The TCP connections of this process's groups and stores, and how another thread breaks them.

Note [Broken connections]
gloo cannot abort a collective: a rank that waits for a peer waits until the peer answers, its
connection breaks, or minutes have passed. Nor can a wait in torch's store be interrupted. So a
rank that is to leave its groups shuts its own connections down. Each of its collectives then
fails, those that wait and those that come, and so do those of its peers.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FOLDER = "/proc/self/fd"


class Connections:
    """The connections that this process has opened in `opening`, known by inode: another file may
    have a closed connection's descriptor. Keeps nothing until `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._lock = threading.Lock()
        self._is_broken = False
        self._opened: set[str] = set()
        self._before: list[set[str]] = []
        """The sockets that were open before each body of `opening` that is in progress."""

    @contextmanager
    def opening(self) -> Iterator[None]:
        """The body opens connections of a group or store."""
        if not self.is_on:
            yield
            return
        before = set(_sockets())
        with self._lock:
            self._before.append(before)
        try:
            yield
        finally:
            with self._lock:
                self._before.remove(before)
                self._opened |= _sockets().keys() - before
            if self._is_broken:
                self.shut_down()

    def shut_down(self) -> None:
        """Break all these connections, those that bodies of `opening` have opened so far, and,
        until `forget`, those that they are going to open."""
        with self._lock:
            self._is_broken = True
            now = _sockets()
            chosen = set(self._opened).union(*(now.keys() - before for before in self._before))
            for inode in chosen & now.keys():
                _shut_down(now[inode])

    def forget(self) -> None:
        """Keep none of them: they are closed."""
        with self._lock:
            self._is_broken = False
            self._opened.clear()


def _sockets() -> dict[str, int]:
    """A descriptor of each open socket, by inode."""
    sockets = {}
    for name in os.listdir(_FOLDER):
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(f"{_FOLDER}/{name}")
            if target.startswith("socket:"):
                sockets[target] = int(name)
    return sockets


def _shut_down(descriptor: int) -> None:
    """Shut a TCP connection down; leave every other socket. gloo's thread would spin over a socket
    that listens no more."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if copy.family in (socket.AF_INET, socket.AF_INET6) and not listens:
            copy.shutdown(socket.SHUT_RDWR)


CONNECTIONS = Connections()
"""Of this process, as torch's process groups are."""
