"""Authenticated requests between processes of different sites, over TCP.

A connection begins with a nonce of 16 bytes from each side. The secret and both nonces give a key
for each direction. A frame is the length of its header and of its payload, a HMAC-SHA256 with the
key of the direction over the frame's number, the lengths, header and payload, then the header
(JSON) and the payload (bytes). So a frame cannot be forged, changed, repeated or left out.
"""

import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from megafrontier.common.errors import UserError

Header = dict[str, Any]
Handler = Callable[[Header, bytes], tuple[Header, bytes]]
"""From a request's header and payload to those of the answer."""

NONCE, MAC = 16, 32
_LENGTHS = struct.Struct("<IQ")
LARGEST_REQUEST = 1 << 20
"""Bytes of a header, and of the payload of a request, whose sender may not have the key."""
SHORTEST_SECRET = 16
SHORTEST_SILENCE = 0.5

T = TypeVar("T")


class SiteUnreachable(Exception):
    """A site does not answer, in one line."""


def read_secret(path: str) -> bytes:
    """The secret of a file, without white space around it. Raises UserError."""
    try:
        with open(path, "rb") as file:
            secret = file.read().strip()
    except OSError as error:
        raise UserError(f"sites.secret: {path}: {error.strerror}, need a file") from error
    if len(secret) < SHORTEST_SECRET:
        raise UserError(f"sites.secret: {path}: {len(secret)} bytes, need {SHORTEST_SECRET}")
    return secret


class Channel:
    """One end of a connection."""

    def __init__(self, sock: socket.socket, secret: bytes, is_client: bool) -> None:
        """Exchange nonces. Raises OSError."""
        self._socket, self._is_client = sock, is_client
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent = self._received = 0
        own = os.urandom(NONCE)
        sock.sendall(own)
        other = self._read(NONCE)
        nonces = own + other if is_client else other + own
        keys = [hmac.digest(secret, way + nonces, "sha256") for way in (b"request", b"answer")]
        self._send_key, self._receive_key = keys if is_client else reversed(keys)

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Send a frame. Raises OSError."""
        text = json.dumps(header).encode()
        lengths = _LENGTHS.pack(len(text), len(payload))
        mac = self._mac(self._send_key, self._sent, lengths, text, payload)
        self._sent += 1
        self._socket.sendall(lengths + mac + text)
        self._socket.sendall(payload)

    def receive(self) -> tuple[Header, bytes]:
        """Receive a frame. Raises OSError, also for one that is not authentic."""
        lengths = self._read(_LENGTHS.size)
        header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
        if max(header_bytes, 0 if self._is_client else payload_bytes) > LARGEST_REQUEST:
            raise ConnectionError("a frame too long")
        mac = self._read(MAC)
        text, payload = self._read(header_bytes), self._read(payload_bytes)
        expected = self._mac(self._receive_key, self._received, lengths, text, payload)
        if not hmac.compare_digest(mac, expected):
            raise ConnectionError("a frame with another secret")
        self._received += 1
        header: Header = json.loads(text)
        return header, payload

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @staticmethod
    def _mac(key: bytes, number: int, *parts: bytes) -> bytes:
        mac = hmac.new(key, struct.pack("<Q", number), "sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                why = "" if self._received else ", is sites.secret the same there?"
                raise ConnectionError(f"closed by the other side{why}")
            view = view[count:]
        return bytes(data)


class Server:
    """Answers requests in threads, one for each connection, after `start`."""

    def __init__(self, secret: bytes, handler: Handler, port: int = 0) -> None:
        """Listen on `port` (0: any free one) of all interfaces. Raises UserError if it is taken."""
        self._secret, self._handler = secret, handler
        self._channels: set[Channel] = set()
        try:
            self._socket = socket.create_server(("", port), backlog=64)
        except OSError as error:
            raise UserError(f"sites.addresses: port {port}: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]

    def start(self) -> None:
        """Begin to answer, also those who have connected before."""
        threading.Thread(target=self._accept, daemon=True, name="sites").start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        with suppress(OSError):  # wakes `accept`
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in list(self._channels):
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True, name="sites").start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, ValueError), sock:
            channel = Channel(sock, self._secret, is_client=False)
            self._channels.add(channel)
            try:
                while True:
                    channel.send(*self._handler(*channel.receive()))
            finally:
                self._channels.discard(channel)


class Client:
    """Requests to one server. Connects when needed. For one thread at a time."""

    def __init__(self, address: tuple[str, int], secret: bytes, timeout: float) -> None:
        """timeout: seconds, of a connection's start and of each read."""
        self.address, self._secret, self._timeout = address, secret, timeout
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def request(self, header: Header, payload: bytes = b"") -> tuple[Header, bytes]:
        """The answer to a request. Raises SiteUnreachable."""
        with self._lock:
            try:
                if self._channel is None:
                    sock = socket.create_connection(self.address, self._timeout)
                    self._channel = Channel(sock, self._secret, is_client=True)
                self._channel.send(header, payload)
                return self._channel.receive()
            except (OSError, ValueError) as error:
                self._drop()
                host, port = self.address
                raise SiteUnreachable(f"{host}:{port}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None


class Patience:
    """When a site that did not answer is asked again: after as long as it took not to answer, so
    that it costs others at most half of their time."""

    def __init__(self) -> None:
        self._silent_until = 0.0
        self.reason = ""
        """Why the site did not answer the last time."""

    def ask(self, request: Callable[[], T]) -> T | None:
        """What `request` returns; None if the site is unreachable, or has been just now."""
        began = time.monotonic()
        if began < self._silent_until:
            return None
        try:
            return request()
        except SiteUnreachable as error:
            now, self.reason = time.monotonic(), str(error)
            self._silent_until = now + max(SHORTEST_SILENCE, now - began)
            return None
