"""Excluded nodes: RUN/bad-nodes.txt, the hosts on which the run cannot go on, one a line.

slurm/train.sbatch starts the run again without them. A user may add or delete lines.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from megafrontier.common.errors import FatalError, NodesUnfit, RanksAbsent, RanksRefused, RunFailed
from megafrontier.launch.health.liveness import Missing, describe
from megafrontier.parallel.env import Identity, planned_hosts

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


def exclude(
    directory: Path, ranks: Missing, identity: Identity, writers: Collection[int] = (0,)
) -> str | None:
    """Exclude the hosts of `ranks`, or this rank's own host if `ranks` are most of all ranks.

    Only the ranks in `writers` write. Returns the text to append to the error, "" on the other
    ranks, None if the file cannot be written: this rank may be the one without the storage.
    """
    if identity.rank not in writers:
        return ""
    hosts = {host for _, host in ranks}
    if 2 * len(ranks) > identity.world_size:
        hosts = {identity.host}
    try:
        add(directory, hosts)
    except OSError:
        return None
    return f"; listed in {directory / FILE_NAME}: {', '.join(sorted(hosts))}"


def exclude_refused(error: RanksRefused, directory: Path, identity: Identity) -> FatalError:
    """Exclude the hosts of a few ranks of a Slurm job that cannot start. Returns the error to
    raise: NodesUnfit, or `error` if most ranks cannot start, because then no node is at fault."""
    if identity.source != "slurm" or not error.are_few:
        return error
    refusing = [(refusal.rank, refusal.host) for refusal in error.refusals]
    # The first able rank writes, too: rank 0 may refuse, and not even know the directory.
    able = next(rank for rank in count() if rank not in dict(refusing))
    listed = exclude(directory, refusing, identity, {0, able})
    return error if listed is None else NodesUnfit(f"{error}{listed}")


def exclude_absent(
    error: RanksAbsent, directory: Path, identity: Identity, environment: Mapping[str, str]
) -> FatalError:
    """Exclude the hosts of ranks that did not come, if Slurm tells on which hosts they should be.
    Returns the error to raise: NodesUnfit, RunFailed if most ranks did not come, or `error`."""
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
    listed = exclude(directory, absent, identity)
    return error if listed is None else NodesUnfit(f"{describe(absent)}: {error.what}{listed}")
