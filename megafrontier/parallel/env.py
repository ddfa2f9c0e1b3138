"""This process's rank and host, from the environment that Slurm, torchrun or our parent sets."""

import hashlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megafrontier.common.errors import UserError

_DEFAULT_PORT = 3442
RESTARTS = "MEGAFRONTIER_RESTARTS"
"""How often slurm/train.sbatch, in one start of its job, or the parent of local ranks has started
the ranks again."""
COMMAND = "MEGAFRONTIER_COMMAND"
"""A name of the command that is the parent of local ranks, if no job or torchrun has one."""
ROUND = "MEGAFRONTIER_ROUND"
"""How often the ranks have started again in the tasks of one step of a Slurm job."""
REPLACED = "MEGAFRONTIER_REPLACED"
"""What has ended the earlier process of a rank that starts again in its task."""
STORE = "MEGAFRONTIER_STORE"
"""Set if not rank 0 but another process has the store at which the ranks meet."""
LAUNCHED = "MEGAFRONTIER_LAUNCHED"
"""When slurm/train.sbatch or the parent of local ranks started the ranks, in seconds since 1970."""


@dataclass(frozen=True)
class Identity:
    """One process among all ranks.

    `rendezvous` is the address of the store at which the ranks meet, `tcp://HOST:PORT`; empty for a
    single process.
    """

    rank: int
    world_size: int
    local_rank: int
    source: Literal["slurm", "torchrun", "local", "alone"]
    rendezvous: str = ""
    host: str = ""
    start: str = ""
    """A name that all ranks of one start share, and no other run has; empty if unknown."""

    @property
    def has_launcher(self) -> bool:
        """Whether Slurm or torchrun started each rank, not a parent of ours or a person."""
        return self.source in ("slurm", "torchrun")

    @property
    def host_number(self) -> int:
        """48 bits of a hash of the host's name, which a float64 holds exactly."""
        return int.from_bytes(hashlib.sha256(self.host.encode()).digest()[:6], "big")


def identify(environment: Mapping[str, str]) -> Identity:
    """Read the identity from environment variables. Raises UserError if they are inconsistent.

    Our own parent takes precedence over Slurm (`--nproc` inside an allocation), and torchrun over
    Slurm (srun starts torchrun). Other launchers set the variables of torchrun.
    """
    if "MEGAFRONTIER_LOCAL" in environment:
        found = _from_local(environment)
    elif "TORCHELASTIC_RUN_ID" in environment or "LOCAL_WORLD_SIZE" in environment:
        found = _from_torchrun(environment)
    elif "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        found = _from_slurm(environment)
        if found.world_size == 1:  # perhaps a shell in which another launcher starts ranks
            _refuse_mpi(environment)
            if environment.get("WORLD_SIZE", "1") != "1" and "RANK" in environment:
                found = _from_torchrun(environment)
    elif "RANK" in environment and "WORLD_SIZE" in environment:
        found = _from_torchrun(environment)
    else:
        _refuse_mpi(environment)
        found = Identity(0, 1, 0, "alone", host=socket.gethostname())
    if not 0 <= found.rank < found.world_size:
        raise UserError(
            f"{found.source}: rank {found.rank} of {found.world_size}, need one below that"
        )
    return found


def _from_local(environment: Mapping[str, str]) -> Identity:
    rank, size = (int(part) for part in environment["MEGAFRONTIER_LOCAL"].split("/"))
    address = f"tcp://127.0.0.1:{environment['MEGAFRONTIER_PORT']}"
    start = environment.get(RESTARTS, "")
    return Identity(rank, size, rank, "local", address, socket.gethostname(), start)


def _refuse_mpi(environment: Mapping[str, str]) -> None:
    """Raises UserError for one of several processes of mpirun: each would train alone."""
    for name in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"):
        size = environment.get(name, "1")
        if size != "1":
            raise UserError(
                f"{name}: {size}, of mpirun; need the ranks started by srun or torchrun"
            )


def _from_torchrun(environment: Mapping[str, str]) -> Identity:
    if not environment.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR: not set, need the address of rank 0's node")
    return Identity(
        _number(environment, "RANK"),
        _number(environment, "WORLD_SIZE"),
        _number(environment, "LOCAL_RANK"),
        "torchrun",
        _address(environment["MASTER_ADDR"], _port(environment)),
        socket.gethostname(),
        environment.get("TORCHELASTIC_RUN_ID", ""),
    )


def _from_slurm(environment: Mapping[str, str]) -> Identity:
    master = environment.get("MASTER_ADDR") or _first_node(environment)
    if not master:
        raise UserError("MASTER_ADDR: not set, need the address of the job's first node")
    port = _port({"MASTER_PORT": str(_DEFAULT_PORT), **environment})
    # SLURM_NTASKS counts the whole job if srun was called without a number of tasks.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return Identity(
        _number(environment, "SLURM_PROCID"),
        _number(environment, size),
        _number(environment, "SLURM_LOCALID"),
        "slurm",
        _address(master, port),
        environment.get("SLURMD_NODENAME") or socket.gethostname(),
        _slurm_start(environment),
    )


def _first_node(environment: Mapping[str, str]) -> str:
    """The address of the node of a step's rank 0; empty if Slurm does not tell.

    Slurm tells the address of the node on which srun was called. That may be a login node, or
    another node of the job.
    """
    caller = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    first = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    # Each part of a heterogeneous job has its own list, and a host file its own order.
    is_other = environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    if not first or is_other or "SLURM_HET_SIZE" in environment:
        return caller
    try:
        addresses = {row[4][0] for row in socket.getaddrinfo(first, None)}
    except OSError:  # only Slurm knows this name
        return caller
    return caller if caller in addresses else first


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `a1` of `a[1-2,5],b7`. Parsed here, because thousands of
    ranks would call scontrol."""
    found = re.match(r"(?:[^,[]|\[[^]]*\])*", nodes)
    return re.sub(r"\[(\w*)[^]]*\]", r"\1", found[0]) if found else ""


def _slurm_start(environment: Mapping[str, str]) -> str:
    """The name of this start of a job step. The parts of a heterogeneous job have different job
    ids, and a requeued job keeps its id."""
    job = environment.get("SLURM_HET_JOB_ID") or environment.get("SLURM_JOB_ID", "")
    start = environment.get("SLURM_RESTART_COUNT", "0")
    again = f", round {environment[ROUND]}" if starts_in_old_tasks(environment) else ""
    return f"job {job}.{environment['SLURM_STEP_ID']}, start {start}{again}"


def starts_in_old_tasks(environment: Mapping[str, str]) -> bool:
    """Whether the ranks start again in the tasks of one step of a Slurm job."""
    return environment.get(ROUND, "0") != "0"


def tasks_per_node(environment: Mapping[str, str]) -> int:
    """The tasks on the first node of a Slurm step: 8 of `8(x4)`."""
    found = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(found[0]) if found else 1


@dataclass(frozen=True)
class Launch:
    """The Slurm job, torchrun command or command with `--nproc` that a start of the ranks belongs
    to. `restarts`: how often Slurm, torchrun and megafrontier itself have restarted it, the latter
    in new tasks and in the same ones. Of two starts of one launch, the later one has the larger
    list."""

    job: str
    restarts: list[int]

    @classmethod
    def current(cls, environment: Mapping[str, str]) -> "Launch | None":
        """The launch of this process; None without any."""
        jobs = (environment.get(n) for n in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", COMMAND))
        counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", RESTARTS, ROUND)
        restarts = [int(environment.get(name) or 0) for name in counts]
        job = next((job for job in jobs if job is not None), None)
        return None if job is None else cls(job, restarts)


def own_cores(environment: Mapping[str, str]) -> int:
    """Cores that this rank may keep busy: those that the launcher has bound it to, or its part of
    the host's if ranks share them."""
    local = environment.get("MEGAFRONTIER_LOCAL", "/1").rpartition("/")[2]
    sharing = int(environment.get("LOCAL_WORLD_SIZE", local))
    cores = len(os.sched_getaffinity(0))
    is_bound = cores < (os.cpu_count() or cores)
    return cores if is_bound else max(1, cores // sharing)


def planned_hosts(environment: Mapping[str, str], size: int) -> list[str]:
    """The host of each of `size` ranks, if Slurm places the same number in a row on each host.
    Empty if it places them otherwise, or does not tell."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if not nodes or not environment.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return []
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    hosts = answer.stdout.split()
    if not hosts or size % len(hosts):
        return []
    return [host for host in hosts for _ in range(size // len(hosts))]


def _address(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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
