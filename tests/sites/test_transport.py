"""Sites answer only those who have the secret, and notice every change of a message."""

import errno
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from megafrontier.common.errors import UserError
from megafrontier.sites import transport
from megafrontier.sites.transport import (
    Channel,
    Client,
    Header,
    Server,
    SiteUnreachable,
    read_secret,
)
from tests.processes import wait_for

SECRET = b"sixteen bytes or more"


@pytest.fixture
def server():
    def answer(header: Header) -> tuple[Header, bytes]:
        return {"got": header["ask"]}, bytes(header.get("payload", 0))

    made = Server(SECRET, answer, "127.0.0.1")
    made.start()
    yield made
    made.close()


def client(server: Server, secret: bytes = SECRET) -> Client:
    return Client(("127.0.0.1", server.port), secret, 5.0)


def test_requests_are_answered_in_order_with_large_payloads(server) -> None:
    asking = client(server)
    assert asking.request({"ask": 1, "payload": 4}, 4) == ({"got": 1}, bytes(4))
    assert asking.request({"ask": 2, "payload": 1_000_000}, 1_000_000)[1] == bytes(1_000_000)


def test_another_secret_gets_no_answer(server) -> None:
    with pytest.raises(SiteUnreachable):
        client(server, b"another secret of some").request({"ask": 1})
    assert client(server).request({"ask": 1})[0] == {"got": 1}


def test_a_changed_and_a_repeated_frame_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:
        raw = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
        receiver = pool.submit(Channel, other, SECRET, False, 5.0)
        sender = Channel(raw, SECRET, is_client=True, timeout=5.0)
        sender.send({"ask": 1}, b"payload")
        assert receiver.result().receive(7) == ({"ask": 1}, b"payload")
        kept = Recorder()
        sender._socket = kept  # type: ignore[assignment]
        sender.send({"ask": 2}, b"payload")
        raw.sendall(kept.data[:-1] + b"?")
        with pytest.raises(ConnectionError, match="secret"):
            receiver.result().receive(7)
        raw.sendall(kept.data)
        assert receiver.result().receive(7)[0] == {"ask": 2}
        raw.sendall(kept.data)
        with pytest.raises(ConnectionError, match="secret"):
            receiver.result().receive(7)
        raw.close()
        other.close()


class Recorder:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.data = b""

    def send(self, data: bytes) -> int:
        self.data += data
        return len(data)

    def settimeout(self, seconds: float) -> None:
        """Never waits."""


def test_a_frame_too_long_for_a_stranger_is_refused(server) -> None:
    for lengths in (struct.pack("<IQ", 1 << 30, 0), struct.pack("<IQ", 2, 1)):
        with socket.create_connection(("127.0.0.1", server.port), 5) as stranger:
            stranger.sendall(bytes(16) + lengths + bytes(32))
            assert is_closed(stranger), "without reading a gigabyte"


@contextmanager
def unverified_peer(answer: bytes, then: bytes = b"") -> Iterator[Client]:
    """A client of a peer without the secret, which answers so, and then a byte every 20 ms for two
    seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:

        def serve() -> None:
            sock, _ = listening.accept()
            with sock, suppress(OSError):
                sock.sendall(answer)
                for _ in range(100 * len(then)):
                    sock.sendall(then)
                    time.sleep(0.02)
                while sock.recv(4096):
                    pass

        pool.submit(serve)
        asking = Client(("127.0.0.1", listening.getsockname()[1]), SECRET, 0.2)
        yield asking
        asking.close()


@pytest.mark.parametrize("answer", [b"", bytes(16), bytes(16) + struct.pack("<IQ", 1 << 20, 0)])
def test_a_peer_that_sends_a_byte_now_and_then_does_not_hold_a_client(answer) -> None:
    with unverified_peer(answer, then=b"?") as asking:
        began = time.monotonic()
        with pytest.raises(SiteUnreachable, match="timed out"):
            asking.request({"ask": 1})
        assert time.monotonic() - began < 1


@pytest.mark.parametrize("length", [9, 1 << 30, 1 << 63])
def test_a_length_that_no_answer_has_is_not_believed(length) -> None:
    answer = bytes(16) + struct.pack("<IQ", 2, length)
    with unverified_peer(answer) as asking, pytest.raises(SiteUnreachable, match="too long"):
        asking.request({"ask": 1}, largest=8)


def test_closing_a_client_ends_its_request(server) -> None:
    release = threading.Event()
    server._handler = lambda header: ({"in time": release.wait(5)}, b"")
    asking = client(server)
    with ThreadPoolExecutor() as pool:
        request = pool.submit(asking.request, {"ask": 1})
        wait_for(lambda: bool(server._peers))
        asking.close()
        assert isinstance(request.exception(2), SiteUnreachable)
        release.set()


class Accepting:
    """A listening socket that fails to accept with these errors first."""

    def __init__(self, sock: socket.socket, *numbers: int) -> None:
        self._socket, self._errors = sock, [OSError(number, "") for number in numbers]

    def accept(self):
        if self._errors:
            raise self._errors.pop()
        return self._socket.accept()

    def __getattr__(self, name: str):
        return getattr(self._socket, name)


def test_a_server_survives_errors_of_accept() -> None:
    made = Server(SECRET, lambda header: (header, b""), "127.0.0.1")
    made._socket = Accepting(made._socket, errno.EMFILE, errno.ECONNABORTED)  # type: ignore
    made.start()
    assert client(made).request({"ask": 1})[0] == {"ask": 1}
    made.close()


def is_closed(sock: socket.socket) -> bool:
    """Whether the server closes the connection, after its nonce."""
    with suppress(ConnectionResetError):
        while sock.recv(16):
            pass
    return True


def threads() -> int:
    return sum(thread.name == "sites" for thread in threading.enumerate())


def test_idle_connections_hold_a_bounded_number_of_threads_and_do_not_shut_others_out(
    server,
) -> None:
    assert client(server).request({"ask": 1})[0] == {"got": 1}
    before = threads()
    with ExitStack() as stack:
        address = "127.0.0.1", server.port
        connections = [
            stack.enter_context(socket.create_connection(address, 5))
            for _ in range(transport.MOST_UNVERIFIED + 20)
        ]
        assert all(is_closed(sock) for sock in connections[:20])
        wait_for(lambda: threads() <= before + transport.MOST_UNVERIFIED)
        assert client(server).request({"ask": 2})[0] == {"got": 2}


def test_idle_connections_are_dropped_and_a_client_connects_again(server, monkeypatch) -> None:
    monkeypatch.setattr(transport, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(transport, "IDLE_SECONDS", 0.2)
    asking = client(server)
    assert asking.request({"ask": 1})[0] == {"got": 1}
    with socket.create_connection(("127.0.0.1", server.port), 5) as idle:
        assert is_closed(idle)
    wait_for(lambda: not server._peers and not server._unverified)
    assert asking.request({"ask": 2})[0] == {"got": 2}


def test_a_header_that_is_not_finite_is_refused(server) -> None:
    with pytest.raises(SiteUnreachable):
        client(server).request({"ask": 1, "tokens": math.inf})
    assert client(server).request({"ask": 2})[0] == {"got": 2}


def test_a_server_listens_on_its_address_alone(server) -> None:
    assert server.host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 5)


def test_an_address_of_another_host_or_a_port_in_use_is_refused_in_one_line(server) -> None:
    for host, port in (("192.0.2.1", 0), ("127.0.0.1", server.port), ("no..name", 0)):
        with pytest.raises(UserError, match=rf"sites.addresses: {host}:{port}: .*sites.listen"):
            Server(SECRET, lambda header: (header, b""), host, port)


def test_a_short_or_missing_secret_is_refused_in_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match=r"sites.secret: .*missing: No such file"):
        read_secret(str(tmp_path / "missing"))
    (tmp_path / "short").write_text("short\n")
    with pytest.raises(UserError, match="5 bytes, need 16"):
        read_secret(str(tmp_path / "short"))
