"""Authenticated requests between processes of different sites, over TCP.

A connection begins with a nonce of 16 bytes from each side. The secret and both nonces give a key
for each direction. A frame is the length of its header and of its payload, a HMAC-SHA256 with the
key of the direction over the frame's number, the lengths, header and payload, then the header
(JSON) and the payload (bytes). So a frame cannot be forged, changed, repeated or left out.

Note [Peers without the secret]
Nothing that a peer sends is believed before its HMAC is right. Until then its frame may not be
longer than the longest legal one, and the time for all of it is limited, not only for each read. At
most `MOST_UNVERIFIED` connections of a server have not sent a right frame; another one replaces the
oldest.
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
Handler = Callable[[Header], tuple[Header, bytes]]
"""From a request's header to header and payload of the answer."""

NONCE, MAC = 16, 32
_LENGTHS = struct.Struct("<IQ")
LARGEST_HEADER = 1 << 20
"""Bytes."""
SLOWEST = 1 << 16
"""Bytes per second of the slowest link that a payload may take."""
TIMEOUT_SECONDS = 5.0
IDLE_SECONDS = 60.0
"""After so long without a request, a server drops a connection."""
PAUSE_SECONDS = 0.1
"""Until a server accepts again after an error."""
MOST_UNVERIFIED = 128
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
    """One end of a connection. timeout: seconds without a byte after which the peer is gone."""

    def __init__(self, sock: socket.socket, secret: bytes, is_client: bool, timeout: float) -> None:
        """Exchange nonces. Raises OSError."""
        self._socket, self.timeout = sock, timeout
        self.begin()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent = self._received = 0
        own = os.urandom(NONCE)
        self._write(own)
        other = self._read(NONCE)
        nonces = own + other if is_client else other + own
        keys = [hmac.digest(secret, way + nonces, "sha256") for way in (b"request", b"answer")]
        self._send_key, self._receive_key = keys if is_client else reversed(keys)

    def begin(self, largest: int = 0) -> None:
        """Give all that is sent and received from now on `timeout`, and the time in which the
        slowest link takes `largest` bytes."""
        self._late = time.monotonic() + self.timeout + largest / SLOWEST

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Send a frame. Raises OSError."""
        text = json.dumps(header).encode()
        lengths = _LENGTHS.pack(len(text), len(payload))
        mac = self._mac(self._send_key, self._sent, lengths, text, payload)
        self._sent += 1
        self._write(lengths + mac + text)
        self._write(payload)

    def receive(self, largest: int = 0) -> tuple[Header, bytes]:
        """Receive a frame with a payload of at most `largest` bytes. Raises OSError, also for a
        frame that is not authentic, and ValueError for a header that is not finite."""
        lengths = self._read(_LENGTHS.size)
        header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
        if header_bytes > LARGEST_HEADER or payload_bytes > largest:
            raise ConnectionError("a frame too long")
        mac = self._read(MAC)
        text, payload = self._read(header_bytes), self._read(payload_bytes)
        expected = self._mac(self._receive_key, self._received, lengths, text, payload)
        if not hmac.compare_digest(mac, expected):
            raise ConnectionError("a frame with another secret")
        self._received += 1
        header: Header = json.loads(text, parse_constant=_refuse_constant)
        return header, payload

    def close(self) -> None:
        """Close the connection."""
        self.shut_down()
        self._socket.close()

    def shut_down(self) -> None:
        """End what other threads send and receive."""
        _shut_down(self._socket)

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
            self._limit()
            count = self._socket.recv_into(view)
            if count == 0:
                why = "" if self._received else ", is sites.secret the same there?"
                raise ConnectionError(f"closed by the other side{why}")
            view = view[count:]
        return bytes(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._limit()
            view = view[self._socket.send(view) :]

    def _limit(self) -> None:
        """Let the next call of the socket take the time that is left. Raises TimeoutError."""
        left = self._late - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(min(left, self.timeout))


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} in a header")


class Server:
    """Answers requests in threads, one for each connection, after `start`."""

    def __init__(self, secret: bytes, handler: Handler, host: str, port: int = 0) -> None:
        """Listen on `port` (0: any free one) of an address of this host. Raises UserError."""
        self._secret, self._handler = secret, handler
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._unverified: list[socket.socket] = []
        """Connections without an authentic request so far, oldest first."""
        self._peers: set[socket.socket] = set()
        try:
            self._socket = _listen(host, port)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            fits = "need a free port of an address of this host, or another sites.listen"
            raise UserError(f"sites.addresses: {host}:{port}: {why}, {fits}") from error
        self.host: str = self._socket.getsockname()[0]
        self.port: int = self._socket.getsockname()[1]

    def start(self) -> None:
        """Begin to answer, also those who have connected before."""
        threading.Thread(target=self._accept, daemon=True, name="sites").start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._is_closed.set()
        _shut_down(self._socket)  # wakes `accept`
        self._socket.close()
        with self._lock:
            for sock in (*self._unverified, *self._peers):
                _shut_down(sock)

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._admit(self._socket.accept()[0])
            # Such as no more files or threads, or a peer that is gone again.
            except (OSError, RuntimeError):
                self._is_closed.wait(PAUSE_SECONDS)

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            self._unverified.append(sock)
            if len(self._unverified) > MOST_UNVERIFIED:
                _shut_down(self._unverified.pop(0))  # its thread ends
        try:
            threading.Thread(target=self._serve, args=(sock,), daemon=True, name="sites").start()
        except RuntimeError:
            self._forget(sock)
            raise

    def _serve(self, sock: socket.socket) -> None:
        try:
            channel = Channel(sock, self._secret, is_client=False, timeout=TIMEOUT_SECONDS)
            header, _ = channel.receive()
            with self._lock:
                self._unverified.remove(sock)  # ValueError if it has been replaced
                self._peers.add(sock)
            channel.timeout = IDLE_SECONDS
            while True:
                answer, payload = self._handler(header)
                channel.begin(len(payload))
                channel.send(answer, payload)
                channel.begin()
                header, _ = channel.receive()
        except (OSError, ValueError):
            pass
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._peers.discard(sock)
            if sock in self._unverified:
                self._unverified.remove(sock)
        sock.close()


def lookup(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Family and address of a host. Of both kinds it is the IPv4 one, which most sites reach.
    Raises OSError and UnicodeError."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return family, address


def _listen(host: str, port: int) -> socket.socket:
    family, address = lookup(host, port)
    return socket.create_server(address[:2], family=family, backlog=MOST_UNVERIFIED)


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class Client:
    """Requests to one server. Connects when needed. For one thread at a time."""

    def __init__(self, address: tuple[str, int], secret: bytes, timeout: float) -> None:
        """timeout: seconds for connecting, and for a request to an idle server."""
        self.address, self._secret, self._timeout = address, secret, timeout
        self._channel: Channel | None = None
        self._used = 0.0
        self._lock = threading.Lock()

    def request(self, header: Header, largest: int = 0) -> tuple[Header, bytes]:
        """The answer to a request, with a payload of at most `largest` bytes. Raises
        SiteUnreachable."""
        with self._lock:
            try:
                if time.monotonic() - self._used > IDLE_SECONDS / 2:
                    self._drop()  # before the server does
                if self._channel is None:
                    sock = socket.create_connection(self.address, self._timeout)
                    self._channel = self._open(sock)
                self._channel.begin(largest)
                self._channel.send(header)
                answer = self._channel.receive(largest)
                self._used = time.monotonic()
                return answer
            except (OSError, ValueError) as error:
                self._drop()
                host, port = self.address
                raise SiteUnreachable(f"{host}:{port}: {error}") from error

    def close(self) -> None:
        """Close the connection, also in the middle of a request."""
        if (channel := self._channel) is not None:
            channel.shut_down()
        with self._lock:
            self._drop()

    def _open(self, sock: socket.socket) -> Channel:
        try:
            return Channel(sock, self._secret, is_client=True, timeout=self._timeout)
        except OSError:
            sock.close()
            raise

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
