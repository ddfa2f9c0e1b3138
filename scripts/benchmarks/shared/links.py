"""Nodes in one machine: network namespaces with one slow NIC each, from Debian's iproute2.

Each namespace has a NIC `hsn0`, shaped both ways by token buckets, on a common bridge; what its
processes say to each other goes over its own `lo`, unshaped. Needs root.
"""

import itertools
import os
import re
import shutil
import string
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from megafrontier.parallel.hierarchy import Levels

NIC, SUBNET = "hsn0", "10.77.0.0/24"
MTU = 9000
HEADER_BYTES = 66
"""Ethernet, IP and TCP with time stamps: what each packet carries besides its payload."""
TOOLS = ("ip", "tc", "unshare")
# Small bursts, so that a link that was idle has saved up little; deep queues, because a
# high-performance network loses no packets, and a loss would cost TCP a fifth of a second.
BURST_SECONDS, LEAST_BURST_BYTES, QUEUE_BYTES = 1e-3, 16_384, 64_000_000
# What TCP does against losses, and its slow start after every pause, are not the slow network's:
# a long queue looks to it like a loss, and it would send again what is still under way.
SETTINGS = (
    "net.ipv6.conf.all.disable_ipv6=1",
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_early_retrans=0",
)
PATIENCE = "rto_min 5s"
_OURS = re.compile(r"^(mf(\d+)[a-z])n\d+")
_NUMBERS = itertools.count()


class Unable(Exception):
    """Why no links can be made here, in one line."""


@dataclass(frozen=True)
class Links:
    """The namespaces of this process; node i has address 10.77.0.(i + 1)."""

    namespaces: tuple[str, ...]
    bridge: str

    def address(self, node: int) -> str:
        """The node's IP address on the slow network."""
        return SUBNET.replace("0/24", str(node + 1))

    def inside(self, node: int) -> list[str]:
        """The start of a command that is to run on the node, which has a host name of its own."""
        name = self.namespaces[node]
        script = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, name]

    def shape(self, bytes_per_second: float, nodes: Sequence[int] | None = None) -> None:
        """Set the rate of the NICs of `nodes` (default: all), out of the node and into it."""
        for node in range(len(self.namespaces)) if nodes is None else nodes:
            name = self.namespaces[node]
            _shape(["-n", name], NIC, bytes_per_second)
            _shape([], _outer(name), bytes_per_second)

    def shape_levels(self, sizes: Sequence[int], rates: Sequence[float]) -> None:
        """Shape what each node sends to each other one by the level between them.

        sizes: of the levels, the innermost first; their product is the number of nodes. rates: of
        the levels, in bytes a second.
        """
        levels = Levels(("",) * len(sizes), tuple(sizes))
        for node, name in enumerate(self.namespaces):
            _run("tc", "-n", name, *f"qdisc replace dev {NIC} root handle 1: htb".split())
            for level, rate in enumerate(rates, 1):
                _shape_class(name, level, rate)
            for peer in range(len(self.namespaces)):
                if peer != node:
                    level = 1 + levels.level_between(node, peer)
                    match = f"u32 match ip dst {self.address(peer)}/32 flowid 1:{level}"
                    where = f"filter add dev {NIC} parent 1: protocol ip {match}"
                    _run("tc", "-n", name, *where.split())

    def cut(self, node: int) -> None:
        """Let nothing through the node's NIC."""
        _run("ip", "link", "set", _outer(self.namespaces[node]), "down")

    def mend(self, node: int) -> None:
        """Undo `cut`."""
        _run("ip", "link", "set", _outer(self.namespaces[node]), "up")

    def _up(self) -> None:
        _run("ip", "link", "add", self.bridge, "mtu", str(MTU), "type", "bridge")
        _run("ip", "link", "set", self.bridge, "up")
        for node, name in enumerate(self.namespaces):
            outer = _outer(name)
            _run("ip", "netns", "add", name)
            _run("ip", "netns", "exec", name, "sysctl", "-q", "-w", *SETTINGS)
            ends = f"{outer} mtu {MTU} type veth peer name {NIC} mtu {MTU} netns {name}"
            _run("ip", "link", "add", *ends.split())
            _run("ip", "link", "set", outer, "master", self.bridge, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", NIC)
            _run("ip", "-n", name, "link", "set", NIC, "up")
            _run("ip", "-n", name, "route", "change", SUBNET, "dev", NIC, *PATIENCE.split())


def _outer(namespace: str) -> str:
    """The end on the bridge of a namespace's NIC."""
    tag, _, node = namespace.rpartition("n")
    return f"{tag}v{node}"


@contextmanager
def links(nodes: int) -> Iterator[Links]:
    """So many nodes, gone with all that runs on them when the context ends.

    Also removes what a killed run left. Raises Unable without root or the tools.
    """
    _check_able()
    _remove_orphans()
    # One process may have several sets of links at a time.
    tag = f"mf{os.getpid()}{string.ascii_lowercase[next(_NUMBERS) % 26]}"
    made = Links(tuple(f"{tag}n{node}" for node in range(nodes)), tag)
    try:
        made._up()
        yield made
    finally:
        _remove(made.namespaces, made.bridge)


def _check_able() -> None:
    if os.geteuid() != 0:
        raise Unable("needs root, to make network namespaces")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unable(f"needs {', '.join(missing)}: apt-get install iproute2 util-linux")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _shape_class(namespace: str, level: int, bytes_per_second: float) -> None:
    """Make class `level` of the NIC's scheduler, with a rate and a queue of its own."""
    burst = _burst_bytes(bytes_per_second)
    rate = f"htb rate {round(bytes_per_second * 8)}bit burst {burst} cburst {burst}"
    for command in (
        f"class add dev {NIC} parent 1: classid 1:{level} {rate}",
        f"qdisc add dev {NIC} parent 1:{level} bfifo limit {QUEUE_BYTES}",
    ):
        _run("tc", "-n", namespace, *command.split())


def _burst_bytes(bytes_per_second: float) -> int:
    return max(LEAST_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))


def _shape(where: Sequence[str], device: str, bytes_per_second: float) -> None:
    burst = _burst_bytes(bytes_per_second)
    bucket = f"tbf rate {round(bytes_per_second * 8)}bit burst {burst} limit {QUEUE_BYTES}"
    _run("tc", *where, "qdisc", "replace", "dev", device, "root", *bucket.split())


def _remove_orphans() -> None:
    """What runs that were killed outright left behind: their names tell who they were."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]
    matches = [match for match in map(_OURS.match, names) if match]
    for tag in {match[1] for match in matches if not os.path.exists(f"/proc/{match[2]}")}:
        _remove([name for name in names if name.startswith(f"{tag}n")], tag)


def _remove(namespaces: Sequence[str], bridge: str) -> None:
    for name in namespaces:
        with suppress(Unable):
            for pid in _run("ip", "netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
        # With the namespace its NIC goes only when the kernel comes to it: too late for the next to
        # take the name.
        for what in (("link", "del", _outer(name)), ("netns", "del", name)):
            with suppress(Unable):
                _run("ip", *what)
    with suppress(Unable):
        _run("ip", "link", "del", bridge)


def sent() -> tuple[int, int]:
    """(bytes with all headers, packets) that have left the NIC of this process's namespace."""
    with open("/proc/self/net/dev") as file:
        for line in file:
            device, _, counters = line.partition(":")
            if device.strip() == NIC:
                found = counters.split()
                return int(found[8]), int(found[9])
    return 0, 0


def machine_cpu_seconds() -> float:
    """User and system time of all processes; interrupts, which networks cause, are left out."""
    with open("/proc/stat") as file:
        user, nice, system, *_ = (int(x) for x in file.readline().split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
