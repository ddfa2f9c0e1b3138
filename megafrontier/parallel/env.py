"""Who am I: this process's rank, as Slurm, torchrun, the local parent or nobody tells it."""

import hashlib
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megafrontier.common.errors import UserError

DEFAULT_PORT = 3442


@dataclass(frozen=True)
class Identity:
    """One process's place among all.

    `rendezvous` is the address at which the ranks meet, in the form
    `torch.distributed.init_process_group` takes; empty for a process alone.
    """

    rank: int
    world_size: int
    local_rank: int
    source: Literal["slurm", "torchrun", "local", "alone"]
    rendezvous: str = ""
    host: str = ""
    start: str = ""
    """What all ranks of one start share, and those of another run do not; empty if unknown."""
    restarts: int = 0
    """How often torchrun has started the ranks of this host anew, in one store."""
    is_counted: bool = True
    """Whether that is how often it has started all ranks: its agents count each for itself."""

    @property
    def has_launcher(self) -> bool:
        """Whether Slurm or torchrun started it, each rank by itself, not a parent or a person."""
        return self.source in ("slurm", "torchrun")

    @property
    def host_number(self) -> int:
        """48 bits that stand for the host's name: a float64 carries them to the other ranks."""
        return int.from_bytes(hashlib.sha256(self.host.encode()).digest()[:6], "big")


def identify(environment: Mapping[str, str]) -> Identity:
    """Read the identity from environment variables.

    A local parent wins over Slurm (`--nproc` inside an allocation), and torchrun over Slurm
    (torchrun started by srun). Other launchers set what torchrun does. Raises UserError when what
    is set does not fit together.
    """
    if "MEGAFRONTIER_LOCAL" in environment:
        found = _from_local(environment)
    elif "TORCHELASTIC_RUN_ID" in environment or "LOCAL_WORLD_SIZE" in environment:
        found = _from_torchrun(environment)
    elif "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        found = _from_slurm(environment)
        if found.world_size == 1:  # of a shell perhaps, in which another launcher starts ranks
            found = _from_shell(environment) or found
    elif "RANK" in environment and "WORLD_SIZE" in environment:  # of another launcher, torch's way
        found = _from_torchrun(environment)
    else:
        _refuse_mpi(environment)
        found = Identity(0, 1, 0, "alone", host=socket.gethostname())
    if not 0 <= found.rank < found.world_size:
        raise UserError(
            f"{found.source}: rank {found.rank} of {found.world_size}, need one below that"
        )
    return found


def _from_shell(environment: Mapping[str, str]) -> Identity | None:
    """What other variables than Slurm's say of several ranks. Raises UserError as `_refuse_mpi`."""
    _refuse_mpi(environment)
    is_one = environment.get("WORLD_SIZE", "1") == "1"
    return None if is_one or "RANK" not in environment else _from_torchrun(environment)


def _refuse_mpi(environment: Mapping[str, str]) -> None:
    """Raises UserError for one of several processes of mpirun: each would train by itself."""
    for name in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"):
        size = environment.get(name, "1")
        if size != "1":
            raise UserError(
                f"{name}: {size}, of mpirun; need the ranks started by srun or torchrun"
            )


def _from_local(environment: Mapping[str, str]) -> Identity:
    rank, size = (int(part) for part in environment["MEGAFRONTIER_LOCAL"].split("/"))
    store = f"file://{environment['MEGAFRONTIER_STORE']}"
    return Identity(rank, size, rank, "local", store, socket.gethostname())


def _from_torchrun(environment: Mapping[str, str]) -> Identity:
    if not environment.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR: not set, need the address of rank 0's node")
    _port(environment)
    return Identity(
        _number(environment, "RANK"),
        _number(environment, "WORLD_SIZE"),
        _number(environment, "LOCAL_RANK"),
        "torchrun",
        "env://",
        socket.gethostname(),
        environment.get("TORCHELASTIC_RUN_ID", ""),
        _number({"TORCHELASTIC_RESTART_COUNT": "0", **environment}, "TORCHELASTIC_RESTART_COUNT"),
        environment.get("GROUP_WORLD_SIZE", "1") == "1",
    )


def _from_slurm(environment: Mapping[str, str]) -> Identity:
    master = environment.get("MASTER_ADDR") or _first_node(environment)
    if not master:
        raise UserError("MASTER_ADDR: not set, need the address of the job's first node")
    host = master.strip("[]")
    port = _port({"MASTER_PORT": str(DEFAULT_PORT), **environment})
    # SLURM_NTASKS is the whole job's where srun was not told its own number of tasks.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return Identity(
        _number(environment, "SLURM_PROCID"),
        _number(environment, size),
        _number(environment, "SLURM_LOCALID"),
        "slurm",
        f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
        environment.get("SLURMD_NODENAME") or socket.gethostname(),
        _slurm_start(environment),
    )


def _first_node(environment: Mapping[str, str]) -> str:
    """Where rank 0 of a step is; empty if Slurm does not say. It gives the address of the node that
    has called srun, which may be a login node, or one of a job's other nodes."""
    caller = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    first = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    # A heterogeneous job's part has its own list, and a user's host file an order of its own.
    is_other = environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    if not first or is_other or "SLURM_HET_SIZE" in environment:
        return caller
    try:
        addresses = {row[4][0] for row in socket.getaddrinfo(first, None)}
    except OSError:  # a name of Slurm's alone
        return caller
    return caller if caller in addresses else first


def _first_host(nodes: str) -> str:
    """Of a list as Slurm writes it: `a1` of `a[1-2,5],b7`. Every rank asks, so without scontrol."""
    found = re.match(r"(?:[^,[]|\[[^]]*\])*", nodes)
    return re.sub(r"\[(\w*)[^]]*\]", r"\1", found[0]) if found else ""


def _slurm_start(environment: Mapping[str, str]) -> str:
    """The step, and of a requeued job its start. Parts of a heterogeneous one have their own id."""
    job = environment.get("SLURM_HET_JOB_ID") or environment.get("SLURM_JOB_ID", "")
    start = environment.get("SLURM_RESTART_COUNT", "0")
    return f"job {job}.{environment['SLURM_STEP_ID']}, start {start}"


def planned_hosts(environment: Mapping[str, str], size: int) -> list[str]:
    """The host of each rank as Slurm lays out a step, the same number in a row on each; nothing
    where it does so otherwise, or cannot say."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if not nodes or not environment.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return []
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    hosts = said.stdout.split()
    if not hosts or size % len(hosts):
        return []
    return [host for host in hosts for _ in range(size // len(hosts))]


def _port(environment: Mapping[str, str]) -> int:
    port = _number(environment, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT: {port}, need one from 1 to {2**16 - 1}")
    return port


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"{name}: {value!r}, need a whole number from the launcher")
    return int(value)
