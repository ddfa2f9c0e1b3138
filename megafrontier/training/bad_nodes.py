"""RUN/bad-nodes.txt: hosts on which the run cannot go on, one a line, for whoever starts it again
to leave out. slurm/train.sbatch does, and a person may add or strike out some."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from megafrontier.cluster.identity import Identity, planned_hosts
from megafrontier.cluster.rollcall import Missing, describe
from megafrontier.errors import Ending, NodesUnfit, RanksAbsent, RunFailed

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


def list_missing(directory: Path, missing: Missing, identity: Identity) -> str:
    """On rank 0: list the hosts that do not answer it, or its own where most ranks do not. Returns
    what to say of it; nothing on the other ranks, which are silent."""
    if identity.rank:
        return ""
    hosts = {host for _, host in missing}
    if 2 * len(missing) > identity.world_size:
        hosts = {identity.host}
    with suppress(OSError):  # its own way to the storage may be cut
        add(directory, hosts)
    return f"; listed in {directory / NAME}: {', '.join(sorted(hosts))}"


def of_absent(
    error: RanksAbsent, directory: Path, identity: Identity, environment: Mapping[str, str]
) -> Ending:
    """The same error; where Slurm can tell on which hosts the absent ranks were to run, one that
    names these, which then are listed. That most ranks do not come is no matter of nodes."""
    if 2 * len(error.ranks) > identity.world_size:
        return RunFailed(str(error))
    hosts = planned_hosts(environment, identity.world_size) if identity.source == "slurm" else []
    if not hosts:
        return error
    missing = [(rank, hosts[rank]) for rank in error.ranks]
    said = list_missing(directory, missing, identity)
    return NodesUnfit(f"{describe(missing)}: {error.what}{said}")
