"""Sites answer only those who have the secret, and notice every change of a message."""

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from megafrontier.common.errors import UserError
from megafrontier.sites.transport import (
    Channel,
    Client,
    Header,
    Server,
    SiteUnreachable,
    read_secret,
)

SECRET = b"sixteen bytes or more"


@pytest.fixture
def server():
    def answer(header: Header, payload: bytes) -> tuple[Header, bytes]:
        return {"got": header["ask"]}, payload * 2

    made = Server(SECRET, answer)
    made.start()
    yield made
    made.close()


def client(server: Server, secret: bytes = SECRET) -> Client:
    return Client(("127.0.0.1", server.port), secret, 5.0)


def test_requests_are_answered_in_order_with_large_payloads(server) -> None:
    asking = client(server)
    assert asking.request({"ask": 1}, b"ab") == ({"got": 1}, b"abab")
    payload = bytes(500_000)
    assert asking.request({"ask": 2}, payload)[1] == payload * 2


def test_another_secret_gets_no_answer(server) -> None:
    with pytest.raises(SiteUnreachable):
        client(server, b"another secret of some").request({"ask": 1})
    assert client(server).request({"ask": 1})[0] == {"got": 1}


def test_a_changed_and_a_repeated_frame_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:
        raw = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
        receiver = pool.submit(Channel, other, SECRET, False)
        sender = Channel(raw, SECRET, is_client=True)
        sender.send({"ask": 1}, b"payload")
        assert receiver.result().receive() == ({"ask": 1}, b"payload")
        kept = Recorder()
        sender._socket = kept  # type: ignore[assignment]
        sender.send({"ask": 2}, b"payload")
        raw.sendall(kept.data[:-1] + b"?")
        with pytest.raises(ConnectionError, match="secret"):
            receiver.result().receive()
        raw.sendall(kept.data)
        assert receiver.result().receive()[0] == {"ask": 2}
        raw.sendall(kept.data)
        with pytest.raises(ConnectionError, match="secret"):
            receiver.result().receive()
        raw.close()
        other.close()


class Recorder:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.data = b""

    def sendall(self, data: bytes) -> None:
        self.data += data


def test_a_frame_too_long_for_a_stranger_is_refused(server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(bytes(16) + struct.pack("<IQ", 1 << 30, 0) + bytes(32))
        stranger.settimeout(5)
        assert len(stranger.recv(16)) == 16
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "closed without reading a gigabyte"


def test_a_short_or_missing_secret_is_refused_in_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match=r"sites.secret: .*missing: No such file"):
        read_secret(str(tmp_path / "missing"))
    (tmp_path / "short").write_text("short\n")
    with pytest.raises(UserError, match="5 bytes, need 16"):
        read_secret(str(tmp_path / "short"))
