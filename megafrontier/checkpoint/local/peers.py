"""Shard files between nodes, over HTTP in threads, apart from the collectives of training.

Each rank has a server. It takes copies of the shards of its partner (PUT) and gives the files of
its node to ranks that start on other nodes (GET). A request must have the token that the ranks of
a start share. A node that is gone costs a request a timeout, never a step.
"""

import hmac
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import AF_INET, AF_INET6
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple

import torch

from megafrontier.checkpoint.local.slots import Generation

TIMEOUT_SECONDS = 30.0
"""Without a byte, after which a node is gone."""
_CHUNK = 2**22
_ENTRY_LIMIT = 2**24
"""Bytes of an entry."""


class Peer(NamedTuple):
    """The server of a rank. `host`: a number of its node."""

    rank: int
    host: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.address}"


class IncomingShard(NamedTuple):
    """What a PUT announces: set and number of the shard, the snapshot, the id of the one to keep,
    bytes."""

    set_name: str
    number: int
    generation: Generation
    kept: str
    entry_size: int
    size: int


class ShardReceiver(NamedTuple):
    """What a server does. `begin` gives memory [size] for a shard, `publish` takes its entry; both
    raise OSError without room and ValueError for a shard that is not of this start. `find` gives
    the path of a file of this node, None without one."""

    begin: Callable[[IncomingShard], torch.Tensor]
    publish: Callable[[IncomingShard, bytes], None]
    find: Callable[[str], Path | None]


class PeerServer:
    """The server of one rank, on a free port."""

    def __init__(self, receiver: ShardReceiver, address: str) -> None:
        """Listen on an address of this host. Every request is refused until there is a `token`.
        Raises OSError."""
        self._server = _Server(address, partial(_Handler, receiver))
        self.port: int = self._server.server_address[1]
        serve = partial(self._server.serve_forever, poll_interval=0.1)
        self._thread = threading.Thread(target=serve, name="snapshot-server", daemon=True)
        self._thread.start()

    def accept(self, token: str) -> None:
        """Answer requests that have the token."""
        self._server.token = token

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingTCPServer):  # http.server's own looks names up, which may take seconds
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    token = ""

    def __init__(self, address: str, handler: Any) -> None:
        self.address_family = AF_INET6 if ":" in address else AF_INET
        super().__init__((address, 0), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is the other side's to report."""


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_SECONDS

    server: _Server

    def __init__(self, receiver: ShardReceiver, *args: Any) -> None:
        self._receiver = receiver
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing on stderr."""

    def _is_known(self) -> bool:
        found, token = self.headers.get("Authorization", ""), self.server.token
        if token and hmac.compare_digest(found.encode(errors="replace"), token.encode()):
            return True
        self.send_error(403)
        return False

    def do_GET(self) -> None:
        if not self._is_known():
            return
        path = self._receiver.find(self.path.removeprefix("/"))
        try:
            file = path.open("rb") if path else None
        except OSError:
            file = None
        if file is None:
            self.send_error(404)
            return
        with file:
            self.send_response(200)
            self.send_header("Content-Length", str(file.seek(0, 2)))
            self.end_headers()
            file.seek(0)
            self.connection.sendfile(file)

    def do_PUT(self) -> None:
        if not self._is_known():
            return
        unread = int(self.headers["Content-Length"])
        try:
            incoming = _announced(self.headers["Shard"])
            memory = self._receiver.begin(incoming)
            unread = 0
            entry = self.rfile.read(incoming.entry_size)
            _read_into(self.rfile, memory)
            self._receiver.publish(incoming, entry)
        except (OSError, ValueError, TypeError, LookupError) as error:
            with suppress(OSError):
                while unread > 0:  # or the answer would be lost with the connection
                    unread -= len(self.rfile.read(min(unread, _CHUNK))) or unread
                self.send_error(507, " ".join(_why(error).split()))
            return
        self.send_response(201)
        self.end_headers()


def _announced(text: str) -> IncomingShard:
    """Raises ValueError, TypeError or LookupError if it announces no shard."""
    set_name, number, (step, id_), kept, entry_size, size = json.loads(text)
    if not 0 < int(entry_size) <= _ENTRY_LIMIT:
        raise ValueError(f"an entry of {entry_size} bytes")
    generation = int(step), str(id_)
    return IncomingShard(set_name, int(number), generation, str(kept), int(entry_size), int(size))


def _read_into(file: Any, memory: torch.Tensor) -> None:
    view = memory.numpy().data
    while view:
        if not (count := file.readinto(view[:_CHUNK])):
            raise ValueError("the connection ended early")
        view = view[count:]


def send_shard(
    peer: Peer, token: str, incoming: IncomingShard, entry: bytes, path: Path
) -> str | None:
    """Send a shard file to the server of another rank. Returns why that failed, None if it did
    not."""
    announced = json.dumps(incoming)

    def body() -> Iterator[bytes]:
        yield entry
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    headers = {"Shard": announced, "Content-Length": str(len(entry) + incoming.size)}
    try:
        with _request(peer, token, "PUT", "/", headers, body()) as answer:
            return None if answer.status == 201 else f"{peer}: {answer.reason}"
    except (OSError, HTTPException) as error:
        return f"{peer}: {_why(error)}"


def fetch_file(peer: Peer, token: str, name: str, target: Path) -> int:
    """Fetch a file of the node of another rank. Returns its size. Raises OSError with one line."""
    try:
        with _request(peer, token, "GET", f"/{name}", {}) as answer, target.open("wb") as file:
            if answer.status != 200:
                raise OSError(f"{peer}: {answer.status} {answer.reason}")
            size = int(answer.headers["Content-Length"])
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
            if file.tell() != size:
                raise OSError(f"{peer}: {file.tell()} bytes, need {size}")
            return size
    except HTTPException as error:
        raise OSError(f"{peer}: {_why(error)}") from error


@contextmanager
def _request(
    peer: Peer,
    token: str,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: Iterator[bytes] | None = None,
) -> Iterator[HTTPResponse]:
    connection = HTTPConnection(peer.address, peer.port, timeout=TIMEOUT_SECONDS)
    try:
        # An answer that there is no room may come before the whole body is sent.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, body, {**headers, "Authorization": token})
        yield connection.getresponse()
    finally:
        connection.close()


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
