"""A real Slurm on one machine: each slurmd on a node of its own, joined by a network of ours.

The nodes are network namespaces with a host name each; one more is the login node, where slurmctld
runs and jobs are submitted. All state lies in one folder. Needs root and Debian's slurm-wlm, munge
and iproute2.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.benchmarks.shared.cluster import interrupted_by_signals
from scripts.benchmarks.shared.links import NIC, Links, links

ROOT = Path(__file__).resolve().parent.parent.parent

TOOLS = ("slurmctld", "slurmd", "sbatch", "munged")
FAST = 1e9
"""Bytes a second of the nodes' links: more than they can use."""
NOWHERE = "02:00:00:00:00:00"
"""A link address that no node has."""
FIRST_PORT = 6817
NODE_GONE_SECONDS = 20

# Frontier's nodes as far as a scheduler sees them, on whatever machine this is.
NODE = (
    "Boards=1 SocketsPerBoard=1 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=512000 "
    "Gres=gpu:8 Feature=nvme State=UNKNOWN"
)
CONFIG = """
ClusterName=test
SlurmctldHost={login}({login_address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=1
JobRequeue=1
KillWait=15
MessageTimeout=10
SlurmdTimeout={gone}
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=30 State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be booted here, in one line; None when it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces and Slurm's daemons"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge iproute2"
    return None


class Cluster:
    """A running Slurm. `nodes` are the names that Slurm and the nodes themselves go by."""

    def __init__(self, folder: Path, network: Links) -> None:
        self.folder, self.network = folder, network
        self.config = folder / "slurm.conf"
        *self.nodes, self.login = network.namespaces
        self._daemons: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """What a command says on the login node. Fails the test when the command fails."""
        done = subprocess.run(
            [*self._on(self.login), *command],
            env=self._environment() | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=180,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def show(self, what: str, name: str) -> dict[str, str]:
        """The fields of `scontrol show`."""
        text = self.run("scontrol", "--oneliner", "show", what, name)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def cut(self, node: str) -> None:
        """Pull the node's network cable."""
        self._cable(node, "down")

    def mend(self, node: str) -> None:
        """Plug it in again."""
        self._cable(node, "up")

    def part(self, node: str, other: str) -> None:
        """Let what the one sends to the other be lost on its way, and nothing else."""
        address = self.network.address(self.network.namespaces.index(other))
        _neighbours(node, "replace", address, "lladdr", NOWHERE, "nud", "permanent")

    def clear(self) -> None:
        """No jobs, and every node as it was at the start, whatever a test did to it."""
        self.network.shape(FAST)
        for node in self.nodes:
            self.mend(node)
            _neighbours(node, "flush", "nud", "permanent")
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        self.run("scancel", "--user=root")
        wait_until(self._all_idle, 60, "all nodes to be idle")

    def _cable(self, node: str, state: str) -> None:
        outer = f"{self.network.bridge}v{self.network.namespaces.index(node)}"
        subprocess.run(["ip", "link", "set", outer, state], check=True)

    def start(self) -> None:
        """Start the daemons; returns when all nodes are there to be used."""
        self._write_files()
        self._daemon(*self._on(self.login), "munged", "-F", "-f", "-S", "munge.sock",
                     "--key-file=munge.key",
                     "--log-file=munged.log", "--pid-file=munged.pid",
                     "--seed-file=munge.seed")  # fmt: skip
        wait_until((self.folder / "munge.sock").exists, 10, "munged")
        self._daemon(*self._on(self.login), "slurmctld", "-D", "-c")
        for node in self.nodes:
            self._daemon(*self._on(node), "slurmd", "-D", "-N", node)
        wait_until(self._all_idle, 30, "slurmctld and its nodes")

    def stop(self) -> None:
        """End what `start` started; what runs on the nodes ends with their namespaces."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()

    def _daemon(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self._environment(), cwd=self.folder, stdout=log, stderr=log
                )
            )

    def _environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PYTEST"))}
        return inherited | {"SLURM_CONF": str(self.config)}

    def _on(self, node: str) -> list[str]:
        """The start of a command that runs on a node: not `ip netns exec`, which hides the control
        groups that slurmd looks for. The node's own disk is a folder."""
        disk = self.folder / "disks" / node
        script = (
            f"mount --bind {self.folder}/hosts /etc/hosts && "
            f"mount --bind {disk} {self.folder}/disk && "
            f'hostname {node} && exec "$@"'
        )
        namespace = f"--net=/run/netns/{node}"
        return ["nsenter", namespace, "unshare", "--uts", "--mount", "sh", "-c", script, "sh"]

    def _write_files(self) -> None:
        for name in ("state", "spool", "disk", *(f"disks/{n}" for n in self.network.namespaces)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        addresses = {n: self.network.address(i) for i, n in enumerate(self.network.namespaces)}
        lines = [f"{address} {name}" for name, address in addresses.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        nodes = [
            f"NodeName={n} NodeAddr={addresses[n]} Port={FIRST_PORT + 1} {NODE}" for n in self.nodes
        ]
        self.config.write_text(
            CONFIG.format(
                folder=self.folder,
                login=self.login,
                login_address=addresses[self.login],
                port=FIRST_PORT,
                gone=NODE_GONE_SECONDS,
                nodes="\n".join(nodes),
            )
        )
        self._make_devices()

    def _make_devices(self) -> None:
        """Slurm wants a character device for each GPU; /dev/null by another name is one."""
        for number in range(8):
            os.mknod(self.folder / f"gpu{number}", 0o020666, os.makedev(1, 3))
        text = f"Name=gpu File={self.folder}/gpu[0-7]\n"
        (self.folder / "gres.conf").write_text(text)

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
        return states == ["idle"] * len(self.nodes)


@contextmanager
def boot(folder: Path, nodes: int) -> Iterator[Cluster]:
    """A cluster of so many nodes, gone with all that runs on it when the context ends."""
    with interrupted_by_signals(), links(nodes + 1) as network:
        network.shape(FAST)
        cluster = Cluster(folder, network)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _neighbours(node: str, *what: str) -> None:
    """Change what a node knows of the others' link addresses."""
    subprocess.run(["ip", "-n", node, "neigh", *what, "dev", NIC], check=True)


def wait_until(
    ready: Callable[[], object], seconds: float, what: str, interval: float = 0.1
) -> None:
    """Return when `ready` does not say no any more. Fails the test after so many seconds."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(interval)
