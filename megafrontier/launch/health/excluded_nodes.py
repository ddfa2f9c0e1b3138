"""Excluded nodes: RUN/bad-nodes.txt, the hosts on which the run cannot go on, one a line.

slurm/train.sbatch starts the run again without them. A user may add or delete lines.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from megafrontier.common.errors import FatalError, NodesUnfit, RanksAbsent, RanksRefused, RunFailed
from megafrontier.parallel.env import Identity, planned_hosts

if TYPE_CHECKING:  # torch takes seconds to import, and slurm/train.sbatch waits for this module
    from megafrontier.launch.health.liveness import Missing

FILE_NAME = "bad-nodes.txt"


def read(directory: Path) -> set[str]:
    """The hosts in the file of run directory `directory`; none if it cannot be read."""
    with suppress(OSError):
        return set((directory / FILE_NAME).read_text(encoding="utf-8").split())
    return set()


def add(directory: Path, hosts: Iterable[str]) -> None:
    """Append the hosts that are not in the file yet. Raises OSError."""
    new = sorted({*hosts} - read(directory))
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / FILE_NAME).open("a", encoding="utf-8") as file:
        file.writelines(f"{host}\n" for host in new)


def exclude(directory: Path, ranks: "Missing", identity: Identity) -> str:
    """Exclude the hosts of `ranks`, or this rank's own host if `ranks` are most of all ranks.
    Returns the text to append to the error. Raises OSError."""
    hosts = {host for _, host in ranks}
    if 2 * len(ranks) > identity.world_size:
        hosts = {identity.host}
    add(directory, hosts)
    return f"; listed in {directory / FILE_NAME}: {', '.join(sorted(hosts))}"


def exclude_refused(error: RanksRefused, directory: Path, identity: Identity) -> FatalError:
    """Exclude the hosts of a few ranks of a Slurm job that cannot start. Returns the error to
    raise: NodesUnfit, or `error` if most hosts cannot start, because then no node is at fault."""
    if identity.source != "slurm" or not error.are_few:
        return error
    refusing = [(rank, host) for rank, host, *_ in error.refusals]
    # The first able rank writes, too: rank 0 may refuse, and not even know the directory.
    able = next(rank for rank in count() if rank not in dict(refusing))
    listed = ""
    if identity.rank in (0, able):
        with suppress(OSError):  # slurm/train.sbatch sees whether the list has a node of the job
            listed = exclude(directory, refusing, identity)
    return NodesUnfit(f"{error}{listed}")


def exclude_absent(
    error: RanksAbsent, directory: Path, identity: Identity, environment: Mapping[str, str]
) -> FatalError:
    """Exclude the hosts of ranks that did not come, if Slurm tells on which hosts they should be.
    Returns the error to raise: NodesUnfit, RunFailed if most ranks did not come, or `error`."""
    from megafrontier.launch.health.liveness import describe

    if 2 * len(error.ranks) > identity.world_size:
        return RunFailed(str(error))
    if identity.source != "slurm":
        return error
    if identity.rank:
        return NodesUnfit(error.what)  # Only rank 0 asks Slurm for the hosts, and prints.
    hosts = planned_hosts(environment, identity.world_size)
    if not hosts:
        return error
    absent = [(rank, hosts[rank]) for rank in error.ranks]
    try:
        listed = exclude(directory, absent, identity)
    except OSError:  # another start would get the same nodes
        return error
    return NodesUnfit(f"{describe(absent)}: {error.what}{listed}")
