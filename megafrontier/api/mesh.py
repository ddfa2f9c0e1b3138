"""From a script's process to one rank of a mesh, and how it ends."""

import atexit
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from megafrontier.common.errors import INTERRUPTED, FatalError, UserError, print_error
from megafrontier.config import load_machine
from megafrontier.launch.device import choose_device, prepare_allocator
from megafrontier.launch.health.timeouts import SCRIPT_SPEAKER, Timeouts
from megafrontier.launch.local import flush_output
from megafrontier.launch.rendezvous import check_placement, join, refuse
from megafrontier.parallel.env import Identity, identify
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Mesh, MeshShape, Splits


class _Joined(NamedTuple):
    process: int
    arguments: tuple[Any, ...]
    mesh: Mesh
    leave: ExitStack


_joined: _Joined | None = None


def init_mesh(
    machine: str | Mapping[str, Any] = "laptop",
    *,
    tensor: int | str = 1,
    context: int | str = 1,
    expert: int | str = 1,
    pipeline: int | str = 1,
    exit_on_error: bool = False,
) -> Mesh:
    """Join the ranks that Slurm, torchrun or another launcher has started, and make a mesh of them.
    A process without a launcher is the only rank.

    machine: the name of a machine file (`frontier`), its path, or its content
        (`{"levels": {"node": {"size": 8}, "world": {}}}`): the levels, fastest link first. They
        shrink if the ranks are fewer than their sizes hold.
    tensor, context, expert, pipeline: the splits, each a number of ranks or a level's name.
    exit_on_error: for a script that is nothing but a rank: replace `sys.excepthook`, so that from
        now on a UserError ends the process with one line and exit code 2, and any other uncaught
        exception ends it at once, without Python's cleanup.

    The mesh has `rank`, `device`, `levels`, and `data_rank` of `data_size`, which tell a rank its
    part of each batch. The process group is destroyed at exit, by `atexit`.

    By default no hook, signal handler or setting of torch is touched (but torch itself puts
    `[rank0]: ` before tracebacks), and the process is never ended: exceptions are the caller's.
    Memory that is freed stays with the process, by the C library's `mallopt`, or by torch's
    expandable segments on NVIDIA GPUs, where NCCL_LAUNCH_ORDER_IMPLICIT is set, too, if it is not.

    Raises UserError for an unknown machine, levels that do not hold the ranks or cut through a
    host, and splits that do not fit; and on a second call with other arguments.
    """
    global _joined
    identity = identify(os.environ)
    splits = {"tensor": tensor, "context": context, "expert": expert, "pipeline": pipeline}
    arguments = machine, splits
    if _joined is not None and _joined.process == os.getpid():
        if _joined.arguments != arguments:
            raise UserError(
                "init_mesh: called with other arguments before, need one mesh a process"
            )
        return _joined.mesh
    leave = ExitStack()
    try:
        mesh = leave.enter_context(_join(identity, machine, splits))
    finally:  # also if that failed; not before, because torch wraps the hook when it joins
        if exit_on_error:
            _end_script_on_error(identity)
    _joined = _Joined(os.getpid(), arguments, mesh, leave)
    atexit.register(leave_mesh)
    return mesh


def _join(
    identity: Identity, machine: str | Mapping[str, Any], splits: Mapping[str, int | str]
) -> AbstractContextManager[Mesh]:
    """`join` on a machine. All ranks raise the error of one that cannot."""
    timeouts = Timeouts.of(identity.world_size)
    try:
        described = load_machine(machine if isinstance(machine, str) else dict(machine))
        levels = Levels.resolve(described.levels, identity.world_size)
        shape = MeshShape(levels, Splits.resolve(levels, splits, prefix=""))
        check_placement(identity, described.device.ranks_per_host)
    except FatalError as error:
        if identity.world_size > 1:  # perhaps only on this node
            refuse(identity, error, timeouts)
        raise
    device = choose_device(identity, described.device.name)
    prepare_allocator(device)
    return join(identity, shape, device, timeouts)


def leave_mesh() -> None:
    """Leave the ranks in order. Called at the end of the process; all ranks must come to it, unless
    an uncaught exception has ended this one: then the others may not be there."""
    global _joined
    joined, _joined = _joined, None
    if joined is None or joined.process != os.getpid():
        return
    error = getattr(sys, "last_value", None)  # set by the interpreter, at a prompt too
    if error is None or hasattr(sys, "ps1"):
        joined.leave.close()
    else:
        joined.leave.__exit__(type(error), error, error.__traceback__)


def _end_script_on_error(identity: Identity) -> None:
    """End this process at once after an uncaught exception, with the exit code of a FatalError.

    On accelerators, Python would first wait until the rank's groups have been given up.
    """
    if hasattr(sys, "ps1"):  # at a prompt, an error does not end the process
        return
    show, process = sys.excepthook, os.getpid()

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, FatalError):
            code = error.code
            _print_fatal(identity, error)
        else:
            show(kind, error, trace)
        if os.getpid() == process:
            flush_output()
            os._exit(code)

    sys.excepthook = end


def _print_fatal(identity: Identity, error: FatalError) -> None:
    """Print the line of an error that most likely all ranks raise: on rank 0, and if the launcher
    does not end the others by then, on these too."""
    program = Path(sys.argv[0]).name
    if identity.rank == 0 or error.is_rank_local:
        print_error(f"{program}: {error}")
    else:
        time.sleep(SCRIPT_SPEAKER)
        print_error(f"{program}: rank {identity.rank}: {error}")
