"""Notice at once that a rank on the same host was killed.

When a rank is killed, gloo's connections to it break, and all its peers notice. Those of NCCL and
RCCL may not: neither a fabric nor shared memory reports the end of a process, and the other ranks
would wait until the watchdog's time limit. But the kernel closes every socket of a process that
ends. So each rank listens on a socket, and the ranks before and after it on its host keep a
connection to it. Nothing is sent until the rank leaves in order. Rank 0 needs no monitor, because
the store ends with it.
"""

import hashlib
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from megafrontier.parallel.env import Identity

_GOODBYE = b"."


class PeerMonitor:
    """One rank's socket, and its connections to the sockets of its neighbours on the same host.

    Create it before the ranks meet: then every neighbour's socket exists when they have met.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Without abstract socket names (only Linux has them), this rank is not monitored.
        self._is_open = False
        with suppress(OSError):
            self._socket.bind(self._name(identity.rank))
            self._socket.listen(2)
            self._is_open = True

    def _name(self, rank: int) -> str:
        """The abstract name of a rank's socket, different for every run on this host."""
        # A digest, because a name has at most 107 bytes.
        name = f"{self._identity.rendezvous} {self._identity.start} {rank}"
        return f"\0megafrontier {hashlib.sha256(name.encode()).hexdigest()}"

    def start(self, on_lost: Callable[[int], None]) -> None:
        """Call `on_lost`, on a thread, with the rank of a neighbour that ends without `leave`."""
        for rank in (self._identity.rank - 1, self._identity.rank + 1):
            connection = self._connect(rank) if self._is_open and rank > 0 else None
            if connection is not None:
                arguments = (rank, connection, on_lost)
                threading.Thread(target=_wait, args=arguments, name="peer", daemon=True).start()

    def _connect(self, rank: int) -> socket.socket | None:
        """A connection to a rank's socket. None if the rank is on another host."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Do not block: a socket whose queue is full is not one of ours.
        connection.setblocking(False)
        try:
            connection.connect(self._name(rank))
        except OSError:
            connection.close()
            return None
        connection.setblocking(True)
        return connection

    def leave(self) -> None:
        """Tell the neighbours that this rank ends in order."""
        self._socket.setblocking(False)
        with suppress(OSError):  # no more connections
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):  # the neighbour has left before
                    connection.sendall(_GOODBYE)
        self._socket.close()


def _wait(rank: int, connection: socket.socket, on_lost: Callable[[int], None]) -> None:
    received = b""
    with connection, suppress(ConnectionError):
        received = connection.recv(1)
    if received != _GOODBYE:
        on_lost(rank)
