"""Is the storage fit for the run: can every host write and see the run directory, is there room?"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from tempfile import mkstemp

from megafrontier.checkpoint.folder import clean_partials, list_checkpoints, step_of
from megafrontier.common.errors import (
    StorageFailed,
    UserError,
    as_fatal_error,
    as_run_directory_error,
)
from megafrontier.config import Config
from megafrontier.model.flops import parameter_count
from megafrontier.parallel.env import Identity
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition.wires.registry import DTYPES
from megafrontier.training.callbacks.save import checkpoint_root
from megafrontier.training.plan import GIB, RunPlan

STORAGE = "run.directory"
SEEN_SECONDS = 10.0
"""How long a file written on one host may take to be seen on another."""
Problem = UserError | StorageFailed
"""What is wrong on a rank."""


def clear_room(config: Config, hierarchy: Hierarchy) -> None:
    """A save that was killed holds the room of the next. It may take long to delete."""
    if hierarchy.world.rank == 0:
        with suppress(OSError):
            clean_partials(checkpoint_root(config))
    hierarchy.world.barrier()  # not with the short patience that the pre-flight has with a node


def check_storage(directory: Path, identity: Identity) -> Problem | None:
    """Whether this host can write to the run directory; one rank a host tries."""
    return _write_trial(directory, identity.rank) if identity.local_rank == 0 else None


def _write_trial(directory: Path, rank: int) -> Problem | None:
    """Why nothing can be written into a folder, if so."""
    trial = directory / f".preflight-{rank}"
    try:
        with trial.open("wb") as file:
            file.write(b"trial")
            os.fsync(file.fileno())
        trial.unlink()
    except OSError as error:
        return as_run_directory_error(error, directory)
    return None


def check_shared(directory: Path, identity: Identity, hierarchy: Hierarchy) -> Problem | None:
    """Whether this host sees what rank 0 writes into the run directory; one rank a host looks."""
    name = ""
    # The exchanges stay outside: who waits in one is not at the storage, but waits for who is.
    with hierarchy.world.status.doing(STORAGE):
        if hierarchy.world.rank == 0:
            with suppress(OSError):  # which has been told already
                fd, path = mkstemp(prefix=".preflight-", dir=directory)  # that no host looked for
                os.close(fd)
                name = Path(path).name
    name = hierarchy.world.broadcast_from_rank_0(lambda: name)
    with hierarchy.world.status.doing(STORAGE):
        looks = identity.local_rank == 0 and name != ""
        problem = _look_for(directory / name) if looks else None
    hierarchy.world.barrier()  # all have looked
    if hierarchy.world.rank == 0 and name:
        with suppress(OSError):
            (directory / name).unlink()
    return problem


def _look_for(path: Path) -> Problem | None:
    """Why a file cannot be seen within SEEN_SECONDS."""
    deadline = time.monotonic() + SEEN_SECONDS
    where = f"run.directory: {path.parent}"
    while time.monotonic() < deadline:
        try:
            path.stat()
            return None
        except OSError as error:
            failed = as_fatal_error(error, f"{where}: {error.strerror}")
            if isinstance(failed, StorageFailed):
                return failed
        time.sleep(0.1)
    return UserError(f"{where}: not the folder that rank 0 sees, need one that hosts share")


def checkpoint_bytes(config: Config, plan: RunPlan) -> int:
    """Bytes of one checkpoint: fp32 masters and two moments, and what low-bit wires add."""
    deltas = DTYPES[config.train.precision].itemsize if plan.wires.have_deltas else 0
    return parameter_count(config.model) * (12 + deltas + (2 if plan.error_feedback else 0))


def check_checkpoints(config: Config, plan: RunPlan, hierarchy: Hierarchy) -> None:
    """Raises UserError without room for the checkpoints to keep that are not there yet, and for the
    next one beside them until the oldest goes; of as many as are saved. Raises it or StorageFailed
    where their folder is there and cannot be written."""
    if hierarchy.world.rank:
        return
    root = checkpoint_root(config)
    with hierarchy.world.status.doing(STORAGE):
        own = list_checkpoints(root)
        count = max(1, min(config.checkpoint.keep + 1 - len(own), _saves_to_come(config, own)))
        is_there = root.exists()  # it may be another's, or a link elsewhere
        where = root if is_there else Path(config.run.directory)
        free = _free_gib(where)
        problem = _write_trial(root, hierarchy.world.rank) if is_there else None
    need = count * checkpoint_bytes(config, plan) / GIB
    if free < need:
        raise UserError(
            f"run.directory: {where}: {free:.3g} GiB free, need {need:.3g} for "
            f"{count} checkpoints (checkpoint.keep {config.checkpoint.keep})"
        )
    if problem is not None:
        raise problem


def _saves_to_come(config: Config, own: Sequence[Path]) -> int:
    """At most: where the run goes on from another of its checkpoints there are more."""
    done = (step_of(own[-1]) or 0) if own else 0
    steps = max(1, (config.train.stop_at or config.train.steps) - done)
    return ceil(steps / (config.checkpoint.every or steps))


def _free_gib(directory: Path) -> float:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize / GIB
