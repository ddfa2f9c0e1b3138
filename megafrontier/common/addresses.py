"""IP addresses as numbers, as messages between ranks carry them, and the one of this process."""

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

ADDRESS_WORDS = 4
_IPV4 = bytes(10) + b"\xff\xff"
"""Before an IPv4 address that is written as an IPv6 one."""
_SIOCGIFADDR = 0x8915


def address_words(host: str) -> list[int]:
    """An address as four words of 32 bits, which a float64 holds exactly."""
    address = ip_address(host)
    packed = address.packed if address.version == 6 else _IPV4 + address.packed
    return list(struct.unpack(">4I", packed))


def address_of(words: Sequence[float]) -> str:
    """The inverse of `address_words`."""
    address = IPv6Address(struct.pack(">4I", *(int(word) for word in words)))
    return str(address.ipv4_mapped or address)


def own_address(rendezvous: str, environment: Mapping[str, str]) -> str:
    """The address at which other ranks reach this one: that of the interface that their collectives
    use, or of the one to `rendezvous` (`tcp://HOST:PORT`; empty: none)."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        interface = environment.get(name, "").lstrip("=").split(",")[0]
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(found, _SIOCGIFADDR, request)[20:24])
    to = urlsplit(rendezvous)
    with suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(
            to.hostname, to.port, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind) as found:
                found.connect(where)  # sends nothing
                return str(found.getsockname()[0])
    return "127.0.0.1"
