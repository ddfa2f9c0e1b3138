"""How the ranks meet, connect to each other, and leave."""

import atexit
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import groupby
from math import prod
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs

from megafrontier.common.errors import (
    FatalError,
    PeersLost,
    RankError,
    RanksAbsent,
    UserError,
    is_collective,
)
from megafrontier.launch.health.links import connect, explain_unconnected, measure
from megafrontier.launch.health.liveness import (
    STARTED_AGAIN,
    Alarm,
    LivenessCheck,
    call_with_timeout,
)
from megafrontier.launch.health.timeouts import GIVE_UP_GROUPS, RETURN_SECONDS, Timeouts
from megafrontier.parallel.env import (
    REPLACED,
    ROUND,
    STORE,
    Identity,
    identify,
    starts_in_old_tasks,
)
from megafrontier.parallel.fault_injection import fault_point
from megafrontier.parallel.groups import make_groups
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import AXES, Mesh, MeshShape
from megafrontier.parallel.sockets import CONNECTIONS
from megafrontier.parallel.world import World

ALL_PEERS = "connections to all"
"""The operation in which gloo connects each rank to every other. NCCL and RCCL connect later."""
STORE_SOCKETS = 3
"""Connections of a rank to the store: that of `join`, and two of the watchdog, whose threads wait
for an alarm and raise one."""
_OTHER_FILES = 256
"""Open files of the store's owner that have nothing to do with the number of ranks."""


@contextmanager
def join(
    identity: Identity,
    shape: MeshShape,
    device: torch.device,
    timeouts: Timeouts | None = None,
    on_met: Callable[[LivenessCheck | None], None] = lambda liveness: None,
    on_failure: Callable[[Exception], None] = lambda error: None,
) -> Iterator[Mesh]:
    """Meet the other ranks, make a mesh of them, and leave in order after the body.

    Uses gloo on CPUs, and NCCL or RCCL (torch calls both `nccl`) on GPUs. `on_met` is called when
    the ranks have met (None: a single process), before anything else that needs them. `on_failure`
    is called if this rank then fails with an error that is not raised on all ranks alike.

    Raises UserError if the hosts do not fit the levels, RanksRefused if ranks say that they cannot
    start, RanksAbsent if ranks do not arrive in time, PeersLost if rank 0 does not, and Unconnected
    if a rank does not reach a peer.
    """
    if shape.levels.ranks != identity.world_size:
        raise UserError(
            f"machine.levels: hold {shape.levels.ranks} ranks, but {identity.world_size} were "
            "started"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams, events and graphs belong to the current device
        _order_launches()
    if identity.world_size == 1:
        on_met(None)
        yield Mesh.single(shape.levels, device)
        return
    timeouts = timeouts or Timeouts.of(identity.world_size)
    if starts_in_old_tasks(os.environ):
        timeouts = replace(timeouts, arrive=min(timeouts.arrive, RETURN_SECONDS))
    liveness = _meet(identity, timeouts)
    timeout = timedelta(seconds=timeouts.collective)
    liveness.store.set_timeout(timeout)
    on_met(liveness)
    if device.type != "cuda":
        _wait_for_gloo_at_exit()
    try:
        mesh = _connect(liveness, shape, device, timeout)
        fault_point("check hosts")
        mine = torch.tensor([identity.host_number], dtype=torch.float64, device=device)
        # Every rank checks all hosts, so that all raise alike.
        check_hosts(shape.levels, mesh.world.gather(mine).flatten().tolist())
        yield mesh
        mesh.arbiter.drain()  # a stream may not outlive the process groups
    except BaseException as error:
        if isinstance(error, Exception) and not is_collective(error):
            on_failure(error)
        if dist.is_initialized():
            give_up(device)
        raise
    if device.type == "cuda":  # it waits for the others, and no watchdog runs any more
        call_with_timeout(GIVE_UP_GROUPS, dist.destroy_process_group)
    else:
        dist.destroy_process_group()


def _order_launches() -> None:
    """Have NCCL (2.26 and later) start collectives of several groups in the order of the host's
    launches, which is the same on all ranks, so that no two ranks wait for each other.

    RCCL of ROCm 7 crashes with SIGSEGV in its first collective if asked for that
    (ROCm/rocm-systems#3175).
    """
    if torch.version.hip is None:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@cache
def _wait_for_gloo_at_exit() -> None:
    """Delay the end of the interpreter a little. gloo's threads release tensors a moment after a
    collective, and abort the process if the interpreter is gone by then. Called before the ranks
    connect, because what is registered first runs last: after a script's `leave_mesh`."""
    atexit.register(time.sleep, 0.1)


def _connect(
    liveness: LivenessCheck, shape: MeshShape, device: torch.device, timeout: timedelta
) -> Mesh:
    """Open all connections that this rank is going to use."""
    rank, status = liveness.identity.rank, liveness.status
    unconnected = explain_unconnected(f"rank {rank}: {ALL_PEERS}")
    with unconnected, status.doing(ALL_PEERS), CONNECTIONS.opening():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("world", liveness.store),
            rank=rank,
            world_size=shape.levels.ranks,
            timeout=timeout,
        )
    with explain_unconnected(f"rank {rank}: groups of the levels"):
        peers = shape.peers(rank, AXES)
        control = make_groups(peers, device, timeout, has_small_messages=True)
        mesh = Mesh(shape, World(rank, shape.levels.ranks, device, control, status), timeout)
        linked = mesh.linked()
    # Exchanges between two ranks before any other collective: if a collective waited for a dead
    # link, no rank could say which link it is.
    for level in range(len(shape.levels.sizes)):
        connect(linked, level)
        for hierarchy in linked:
            measure(hierarchy, level, size_bytes=1)
    return mesh


def give_up(device: torch.device) -> None:
    """Leave the groups without the other ranks, which may be gone.

    NCCL's and RCCL's orderly end waits for every collective that has begun, and so for good if it
    needs a rank that is gone.
    """
    if device.type != "cuda":
        dist.destroy_process_group()
    else:  # torch has no public name for it
        # It may take as long as a collective's timeout for each group, and fail if they are broken.
        # The error that led here must still be reported.
        call_with_timeout(GIVE_UP_GROUPS, dist.distributed_c10d._abort_process_group)


def refuse(identity: Identity, error: FatalError, timeouts: Timeouts) -> NoReturn:
    """Tell the other ranks why this one cannot start: a file may exist on one node only.

    Raises RanksRefused, as all ranks then do, or `error` if the ranks do not meet.
    """
    try:
        _open_store(identity, timeouts).meet(timeouts.arrive, error)
    except RuntimeError:  # the store's
        own = RankError(f"rank {identity.rank} on {identity.host}: {error}")
        own.is_rank_local = identity.local_rank == 0  # print one line a host, not one a rank
        raise own from error
    raise AssertionError("met in spite of a refusal")


def _meet(identity: Identity, timeouts: Timeouts) -> LivenessCheck:
    """Meet all ranks. Raises RanksAbsent or PeersLost if they do not arrive in time."""
    fault_point("meet")
    try:
        liveness = _open_store(identity, timeouts)
        absent = liveness.meet(timeouts.arrive)
    except RuntimeError as error:  # the store's
        raise _store_error(identity, error) from error
    if absent:
        what = f"did not come to {identity.rendezvous} within {timeouts.arrive:g} s"
        raise RanksAbsent(absent, what)
    return liveness


def _store_error(identity: Identity, error: RuntimeError) -> PeersLost:
    """Rank 0 could not open the store, or the others could not reach it."""
    reason = str(error).splitlines()[0]
    if identity.rank == 0:
        if "EADDRINUSE" in reason:  # torch's line is long, and does not say what to do
            reason = "another process waits there, need another MASTER_PORT or its end"
        return PeersLost(f"rank 0: cannot wait at {identity.rendezvous}: {reason}")
    lost = PeersLost(f"rank 0: no answer at {identity.rendezvous}: {reason}")
    # Rank 0 cannot print it. Two ranks a host do, because one of them may be lost, too.
    lost.is_rank_local = identity.local_rank < 2
    return lost


def _open_store(identity: Identity, timeouts: Timeouts) -> LivenessCheck:
    """Open the store if this is rank 0, else connect to it. Raises RuntimeError if it does not
    answer in time."""
    address, rank = urlsplit(identity.rendezvous), identity.rank
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_owner = rank == 0 and not is_torchruns and STORE not in os.environ
    socket = os.environ.pop("MEGAFRONTIER_SOCKET", None)  # of the parent of local ranks
    if rank == 0:
        _allow_sockets(_store_owner(), identity, each=1)  # enough to meet, and to refuse
    connect = partial(
        TCPStore,
        str(address.hostname),
        address.port or 0,
        is_master=is_owner,
        timeout=timedelta(seconds=timeouts.arrive),
        wait_for_workers=False,  # torch could not say which ranks are absent
        multi_tenant=True,
        master_listen_fd=None if socket is None else int(socket),
    )
    # torch itself tries several times for as long, and `srun --wait` kills a rank that has not
    # given up by then.
    with CONNECTIONS.opening():
        store = connect() if is_owner else call_with_timeout(timeouts.arrive, connect)
    if store is None:
        raise RuntimeError(f"no store within {timeouts.arrive:g} s")
    # The prefix keeps another run with the same address apart, and the starts of torchrun, which
    # keeps its store, with all keys, when it starts the ranks again.
    if reason := os.environ.pop(REPLACED, ""):
        _tell_old_start(store, identity, reason)
    start = store.add(f"{identity.start}/starts/{rank}", 1)
    return LivenessCheck(PrefixStore(f"{identity.start}/{start}", store), identity, timeouts)


def _tell_old_start(store: TCPStore, identity: Identity, reason: str) -> None:
    """Have the other ranks leave the start before this one at once. Otherwise they would find out
    by themselves, and wait for an answer of this rank's earlier process."""
    earlier = str(int(os.environ[ROUND]) - 1)
    start = identify({**os.environ, ROUND: earlier}).start
    old = LivenessCheck(PrefixStore(f"{start}/1", store), identity)
    old.raise_alarm(Alarm(identity.rank, reason, STARTED_AGAIN))


def check_sockets(identity: Identity) -> None:
    """Let the owner of the store open as many files as the system allows. Raises UserError on rank
    0 if these are too few for all ranks: some would not get a connection, minutes later."""
    if identity.rank == 0 and identity.world_size > 1:
        _allow_sockets(_store_owner(), identity, STORE_SOCKETS)


def _store_owner() -> int:
    """The process that owns the store: torchrun, or rank 0 itself. A process of this package that
    has nothing but the store has the limit of rank 0, and raises its own."""
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.getppid() if is_torchruns else os.getpid()


def allow_sockets(process: int) -> int:
    """Raise the limit of a process to the hard one, and return that. The usual soft limit is enough
    for 31 nodes."""
    _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _allow_sockets(process: int, identity: Identity, each: int) -> None:
    """Raise the limit of a process to the hard one. Raises UserError if that is too low for `each`
    connections of all ranks."""
    hard = allow_sockets(process)
    required = each * identity.world_size + _OTHER_FILES
    if hard not in (resource.RLIM_INFINITY, -1) and hard < required:
        raise UserError(
            f"ulimit -Hn: {hard} open files on {identity.host}, need {STORE_SOCKETS} for each "
            f"rank, {STORE_SOCKETS * identity.world_size + _OTHER_FILES} for "
            f"{identity.world_size} ranks"
        )


def check_hosts(levels: Levels, hosts: list[Any]) -> None:
    """Raise UserError if a level's group lies partly within a host: up to some level all peers must
    share a host, beyond it no two may. `hosts`: of all ranks, in rank order."""
    sizes, in_a_row = levels.sizes, [len([*ranks]) for _, ranks in groupby(hosts)]
    is_even = len({*in_a_row}) == 1 and len({*hosts}) == len(in_a_row)
    if not is_even or in_a_row[0] not in (prod(sizes[:depth]) for depth in range(len(sizes) + 1)):
        steps = " × ".join(f"{n} {s}" for n, s in zip(levels.names, sizes, strict=True))
        raise UserError(
            f"machine.levels: {steps}, but hosts have {', '.join(map(str, in_a_row[:8]))} ranks in "
            "a row; need the same number of consecutive ranks on every host, and sizes that "
            "multiply to it up to a host's edge (machine=nvlink8-cluster, say)"
        )


def check_placement(identity: Identity, expected: int | None) -> None:
    """Raise UserError if a launcher's rank is not one of `expected` consecutive ranks a host
    (`machine.device.ranks_per_host`)."""
    rank, local_rank = identity.rank, identity.local_rank
    if expected is None or not identity.has_launcher:
        return
    if local_rank >= expected or rank % expected != local_rank:
        raise UserError(
            f"machine.device.ranks_per_host: rank {rank} is local rank {local_rank} on "
            f"{identity.host}, need {expected} consecutive ranks a host"
        )
