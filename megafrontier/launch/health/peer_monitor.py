"""Ranks of one host notice when one of them is killed.

gloo's connections break then, and all hear of it. NCCL's and RCCL's may not: nothing tells the end
of a process over a fabric or in shared memory, and the others would wait for it until the watch
loses its patience. But the kernel closes what a process had open. So each rank opens a socket, to
which the ranks before and after it on its host hold a connection, and nothing is sent until it
leaves in order. Rank 0, with whom the store ends, is noticed anyway.
"""

import hashlib
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from megafrontier.parallel.env import Identity

_FAREWELL = b"."


class PeerMonitor:
    """One rank's socket, and its connections to the ranks beside it. To be made before the ranks
    meet: afterwards every neighbour's socket is there."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Without a socket of its own, on a system other than Linux say, a rank takes no part.
        self._takes_part = False
        with suppress(OSError):
            self._own.bind(self._name(identity.rank))
            self._own.listen(2)
            self._takes_part = True

    def _name(self, rank: int) -> str:
        """Of no file (Linux's abstract names), and of this run's present start alone."""
        who = self._identity
        place = who.rendezvous
        if who.source == "torchrun":  # whose rendezvous says "the environment"
            names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
            place = " ".join(os.environ.get(name, "") for name in names)
        # A name has 107 bytes at most, and a path that is the place may have more.
        digest = hashlib.sha256(f"{place} {who.restarts} {rank}".encode()).hexdigest()
        return f"\0megafrontier {digest}"

    def watch(self, lost: Callable[[int], None]) -> None:
        """Call `lost`, on a thread, with the number of a neighbour that ends without `leave`."""
        for rank in (self._identity.rank - 1, self._identity.rank + 1):
            connection = self._connect(rank) if self._takes_part and rank > 0 else None
            if connection is not None:
                waiting = (rank, connection, lost)
                threading.Thread(target=_await, args=waiting, name="beside", daemon=True).start()

    def _connect(self, rank: int) -> socket.socket | None:
        """None where that rank is on another host."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)  # where the queue there is full, it is not for this rank
        try:
            connection.connect(self._name(rank))
        except OSError:
            connection.close()
            return None
        connection.setblocking(True)
        return connection

    def leave(self) -> None:
        """Tell the neighbours that this rank's end is no loss."""
        self._own.setblocking(False)
        with suppress(OSError):  # of nobody who has yet to be told
            while True:
                connection, _ = self._own.accept()
                with connection, suppress(OSError):  # of one that has left before
                    connection.sendall(_FAREWELL)
        self._own.close()


def _await(rank: int, connection: socket.socket, lost: Callable[[int], None]) -> None:
    said = b""
    with connection, suppress(ConnectionError):
        said = connection.recv(1)
    if said != _FAREWELL:
        lost(rank)
