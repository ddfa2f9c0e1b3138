"""RUN/bad-nodes.txt: hosts on which the run cannot go on, one a line, for whoever starts it again
to leave out. slurm/train.sbatch does, and a person may add or strike out some."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from megafrontier.common.errors import FatalError, NodesUnfit, RanksAbsent, RanksRefused, RunFailed
from megafrontier.launch.health.liveness import Missing, describe
from megafrontier.parallel.env import Identity, planned_hosts

NAME = "bad-nodes.txt"


def listed(directory: Path) -> set[str]:
    """The hosts there, none where there is no list."""
    with suppress(OSError):
        return set((directory / NAME).read_text(encoding="utf-8").split())
    return set()


def add(directory: Path, hosts: Iterable[str]) -> None:
    """Append those that are not there. Raises OSError where the list cannot be written."""
    found = sorted({*hosts} - listed(directory))
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / NAME).open("a", encoding="utf-8") as file:
        file.writelines(f"{host}\n" for host in found)


def list_hosts(
    directory: Path, ranks: Missing, identity: Identity, by: Collection[int] = (0,)
) -> str | None:
    """On the ranks in `by`: append the hosts of `ranks` to the list, or this rank's own host where
    `ranks` are most of all. Returns the text to report, None where the list cannot be written, ""
    on the other ranks."""
    if identity.rank not in by:
        return ""
    hosts = {host for _, host in ranks}
    if 2 * len(ranks) > identity.world_size:
        hosts = {identity.host}
    try:
        add(directory, hosts)
    except OSError:  # its own way to the storage may be cut
        return None
    return f"; listed in {directory / NAME}: {', '.join(sorted(hosts))}"


def of_refused(error: RanksRefused, directory: Path, identity: Identity) -> FatalError:
    """The same error; where a few ranks of a Slurm job cannot start, one that names their hosts,
    which are listed: what most ranks refuse is no matter of nodes."""
    if identity.source != "slurm" or not error.are_few:
        return error
    refusing = [(r.rank, r.host) for r in error.refusals]
    # Rank 0 may be one of them and not even know the directory: then another lists them, too.
    able = next(rank for rank in count() if rank not in dict(refusing))
    said = list_hosts(directory, refusing, identity, {0, able})
    return error if said is None else NodesUnfit(f"{error}{said}")


def of_absent(
    error: RanksAbsent, directory: Path, identity: Identity, environment: Mapping[str, str]
) -> FatalError:
    """The same error; where Slurm can tell on which hosts the absent ranks were to run, one that
    names these, which then are listed. That most ranks do not come is no matter of nodes."""
    if 2 * len(error.ranks) > identity.world_size:
        return RunFailed(str(error))
    if identity.source != "slurm":
        return error
    if identity.rank:
        return NodesUnfit(error.what)  # silent; only rank 0 asks Slurm for the hosts
    hosts = planned_hosts(environment, identity.world_size)
    if not hosts:
        return error
    missing = [(rank, hosts[rank]) for rank in error.ranks]
    said = list_hosts(directory, missing, identity)
    if said is None:
        return error
    return NodesUnfit(f"{describe(missing)}: {error.what}{said}")
