"""How ranks meet, connect to each other, and leave."""

import atexit
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from math import prod
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megafrontier.common.errors import (
    FatalError,
    PeersLost,
    RankError,
    RanksAbsent,
    UserError,
    is_collective,
)
from megafrontier.launch.health.links import connect, measure, reaching
from megafrontier.launch.health.liveness import LivenessCheck, within
from megafrontier.parallel.env import Identity
from megafrontier.parallel.groups import make_groups
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.parallel.world import World

ALL_PEERS = "connections to all"
"""Where gloo connects each rank to every other; NCCL and RCCL connect later."""
SOCKETS = 3
"""Connections of each rank to the store at rank 0: its own, and two of its watch."""
ABORT_SECONDS = 20.0
"""How long a rank waits for its groups to be given up."""
SPARE_FILES = 512
"""What a rank may have open beside: the corpus, checkpoints, connections to peers."""


@contextmanager
def join(
    identity: Identity,
    levels: Levels,
    device: torch.device,
    timeout_seconds: float = 1800,
    meeting_seconds: float = 600,
    met: Callable[[LivenessCheck | None], None] = lambda roll: None,
    failed: Callable[[Exception], None] = lambda error: None,
) -> Iterator[Hierarchy]:
    """Meet the other ranks, make a group for each level, and leave in order at the end.

    `met` is called with the roll of the ranks that have met, None for one alone, before anything
    else that needs them; `failed` where this rank then fails by itself.

    Raises UserError when the host names contradict the levels, RanksRefused when ranks say that
    they cannot start, RanksAbsent when they do not come in `meeting_seconds`, PeersLost when rank 0
    does not, and Unconnected. `timeout_seconds` is that of every collective. Works with gloo on a
    CPU, and with NCCL or RCCL (both are torch's `nccl`) on a GPU.
    """
    if levels.ranks != identity.world_size:
        raise UserError(
            f"machine.levels: hold {levels.ranks} ranks, but {identity.world_size} were started"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams, events and graphs are of the current one
        _order_launches()
    if identity.world_size == 1:
        met(None)
        yield Hierarchy.single(levels, device)
        return
    timeout = timedelta(seconds=timeout_seconds)
    roll = _meet(identity, meeting_seconds)
    roll.store.set_timeout(timeout)
    met(roll)
    try:
        hierarchy = _connect(roll, levels, device, timeout)
        _check_hosts(hierarchy, identity)
        yield hierarchy
        hierarchy.arbiter.drain()  # a lane may not outlive the process groups
    except BaseException as error:
        if isinstance(error, Exception) and not is_collective(error):
            failed(error)
        if dist.is_initialized():
            give_up(device)
        raise
    if device.type == "cuda":  # it waits for the others, and nobody watches any more
        within(ABORT_SECONDS, dist.destroy_process_group)
    else:
        dist.destroy_process_group()
        _let_gloo_end()


def _order_launches() -> None:
    """Where collectives of several groups are under way at once, NCCL (2.26 on) then starts them in
    the order in which the host gives them, the same on all ranks: no waiting in a circle. RCCL, of
    ROCm 7 at least, ends at its first collective by SIGSEGV when it is asked for that
    (ROCm/rocm-systems#3175)."""
    if torch.version.hip is None:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@cache
def _let_gloo_end() -> None:
    """An interpreter that ends right after a collective would abort: gloo's threads let go of its
    tensors a moment later, and need the interpreter for that."""
    atexit.register(time.sleep, 0.1)


def _connect(
    roll: LivenessCheck, levels: Levels, device: torch.device, timeout: timedelta
) -> Hierarchy:
    """Reach all that this rank is going to talk to."""
    rank = roll.identity.rank
    with reaching(f"rank {rank}: {ALL_PEERS}"), roll.status.doing(ALL_PEERS):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("world", roll.store),
            rank=rank,
            world_size=levels.ranks,
            timeout=timeout,
        )
    with reaching(f"rank {rank}: groups of the levels"):
        peers = [levels.peers(rank, level) for level in range(len(levels.sizes))]
        groups = make_groups(peers, device, timeout)
        control = make_groups(peers, device, timeout, has_small_messages=True)
    world = World(rank, levels.ranks, device, control, roll.status)
    hierarchy = Hierarchy(levels, rank, groups, world)
    # Neighbours at each level before other collectives: where these waited for a link that is dead,
    # nobody could say which it is.
    for level in range(len(levels.sizes)):
        connect(hierarchy, level)
        measure(hierarchy, level, size_bytes=1)
    return hierarchy


def give_up(device: torch.device) -> None:
    """Leave the groups without the others, who may be gone. NCCL's and RCCL's own way out waits
    for every collective that has begun, and so for ever for those of ranks that are."""
    if device.type != "cuda":
        dist.destroy_process_group()
    elif hasattr(dist.distributed_c10d, "_abort_process_group"):  # torch has no public name for it
        # It may wait as long as a collective may take, for each group, and fail where they are
        # broken; the error that led here is to be told.
        within(ABORT_SECONDS, dist.distributed_c10d._abort_process_group)


def refuse(
    identity: Identity, error: FatalError, meeting_seconds: float, is_hosts: bool
) -> NoReturn:
    """Come where all ranks meet, to say why this one cannot start: a file may be on one node and
    not on another (`is_hosts`: one rank a host looks). Raises RanksRefused, as all then do, or
    where they do not meet `error`."""
    try:
        _roll(identity, meeting_seconds).meet(meeting_seconds, error, is_hosts)
    except RuntimeError:  # torch's, of the store
        own = RankError(f"rank {identity.rank} on {identity.host}: {error}")
        own.is_rank_local = identity.local_rank == 0  # as many as there are hosts, not ranks
        raise own from error
    raise AssertionError("met in spite of a refusal")


def _roll(identity: Identity, seconds: float) -> LivenessCheck:
    _allow_sockets(SOCKETS * identity.world_size, identity.rank == 0)
    # Told the number of ranks, torch's store would wait for so many, and could not say for whom.
    file = identity.rendezvous.removeprefix("file://")
    if file != identity.rendezvous:  # any name, of which an address would take # and ? for its own
        return LivenessCheck(dist.FileStore(file, -1), identity)  # type: ignore[attr-defined]
    store = _store_at(f"{identity.rendezvous}?rank={identity.rank}&world_size=-1", seconds)
    _check_owner(store, identity)
    # torchrun keeps its store, with all that was said before.
    start = identity.restarts if identity.is_counted else store.add(f"starts/{identity.rank}", 1)
    return LivenessCheck(PrefixStore(f"start {start}", store), identity)


def _store_at(place: str, seconds: float) -> Store:
    """torch's store there. Raises RuntimeError when it does not answer for so long: torch itself
    tries twice, each time as long, and `srun --wait` ends who has not given up by then."""

    def connect_there() -> Store | RuntimeError:
        try:
            return next(rendezvous(place, timeout=timedelta(seconds=seconds)))[0]
        except RuntimeError as error:
            return error

    found = within(seconds, connect_there)
    if found is None:
        raise RuntimeError(f"no store within {seconds:g} s")
    if isinstance(found, RuntimeError):
        raise found
    return found


def _check_owner(store: Store, identity: Identity) -> None:
    """Raises PeersLost in the store of another run, whose rank 0 was first at this address: who
    went on would be taken for a rank of it, and end it where it fails."""
    mine = f"run ({identity.start or 'without a name'})"
    if identity.rank == 0:
        store.compare_set("owner", "", mine)
    owner = store.get("owner").decode()  # which rank 0 sets before anything else
    if owner != mine:
        raise PeersLost(
            f"rank {identity.rank}: at {_address(identity)} meets another {owner}; need another "
            "MASTER_PORT, or that run's end"
        )


def _address(identity: Identity) -> str:
    """Where the ranks meet, as people write it."""
    if identity.rendezvous != "env://":
        return identity.rendezvous
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _allow_sockets(count: int, is_first: bool) -> None:
    """Raise the limit of open files for so many more where the store is: in rank 0, or in the
    torchrun that has started it. Raises UserError where the hard limit is below; on all ranks,
    whose limits are alike, or the others would wait for rank 0 in vain."""
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    process = os.getppid() if is_torchruns and is_first else os.getpid()
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    need = count + SPARE_FILES
    if hard != resource.RLIM_INFINITY and need > hard:
        raise UserError(
            f"ulimit -n: at most {hard} open files where rank 0 runs, need {need} for the ranks' "
            "connections"
        )
    if is_first and soft != resource.RLIM_INFINITY and need > soft:
        resource.prlimit(process, resource.RLIMIT_NOFILE, (need, hard))


def _meet(identity: Identity, seconds: float) -> LivenessCheck:
    """The roll of all ranks, which are there. Raises RanksAbsent or PeersLost when they are not."""
    try:
        roll = _roll(identity, seconds)
        absent = roll.meet(seconds)
    except RuntimeError as error:  # torch's, of the store
        raise _unmet(identity, error) from error
    if absent:
        raise RanksAbsent(absent, f"did not come to {identity.rendezvous} within {seconds:g} s")
    return roll


def _unmet(identity: Identity, error: RuntimeError) -> PeersLost:
    """Rank 0 could not open the store, or the others could not reach it there."""
    why = str(error).splitlines()[0]
    if identity.rank == 0:
        if "EADDRINUSE" in why:  # its own line is long, and says nothing of what to do
            why = "another process waits there, need another MASTER_PORT or its end"
        return PeersLost(f"rank 0: cannot wait at {identity.rendezvous}: {why}")
    lost = PeersLost(f"rank 0: no answer at {identity.rendezvous}: {why}")
    # It is not there to say so. Two a host do: one of them may be lost too.
    lost.is_rank_local = identity.local_rank < 2
    return lost


def _check_hosts(hierarchy: Hierarchy, identity: Identity) -> None:
    """Refuse levels that hosts cut through: up to some level all peers share a host, beyond it no
    two do. Every rank looks at all hosts, so that all refuse alike."""
    mine = torch.tensor([identity.host_number], dtype=torch.float64, device=hierarchy.device)
    hosts = hierarchy.world.gather(mine).flatten().tolist()
    held = next((i for i, other in enumerate(hosts) if other != hosts[0]), len(hosts))
    firsts = hosts[::held]
    if hosts != [first for first in firsts for _ in range(held)] or len({*firsts}) < len(firsts):
        raise UserError(
            f"machine.levels: {len(hosts)} ranks, of which the first host has {held} in a row and "
            "others another number; need the same number of consecutive ranks on every host"
        )
    sizes = hierarchy.levels.sizes
    fits = [prod(sizes[:depth]) for depth in range(len(sizes) + 1)]
    if held not in fits:
        steps = " × ".join(f"{n} {s}" for n, s in zip(hierarchy.levels.names, sizes, strict=True))
        raise UserError(
            f"machine.levels: {steps}, but every host has {held} ranks, which cuts through a "
            f"level; need sizes that multiply to {held} up to a host's edge, or another machine "
            "(machine=nvlink8-cluster, say)"
        )


def misplaced(identity: Identity, expected: int | None) -> str | None:
    """What is wrong with the ranks that a launcher put on this rank's host, where the machine file
    has `expected` of them. Local ranks are an arrangement made on purpose and are not checked."""
    if expected is None or not identity.has_launcher:
        return None
    if identity.local_rank < expected and identity.rank % expected == identity.local_rank:
        return None
    return (
        f"machine.device.ranks_per_host: rank {identity.rank} is local rank "
        f"{identity.local_rank} on {identity.host}, need {expected} consecutive ranks a host"
    )


def check_ranks_per_host(world: World, identity: Identity, expected: int | None) -> None:
    """Refuse, on every rank alike, a launch whose ranks on a host are not the machine file's: a
    rank that saw it alone would leave the others waiting. Raises UserError."""
    error = world.first_error(misplaced(identity, expected))
    if error is not None:
        raise UserError(error)
