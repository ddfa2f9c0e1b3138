"""Resume from the newest checkpoint that is whole."""

import json
from collections.abc import Callable
from pathlib import Path

from megafrontier.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable
from megafrontier.checkpoint.folder import candidates
from megafrontier.checkpoint.load import Checkpoint, open_checkpoint
from megafrontier.common.errors import PeersLost, StorageFailed, UserError
from megafrontier.parallel.world import World


def open_newest(
    root: Path,
    load: Callable[[Checkpoint], None],
    world: World,
    warn: Callable[[str], None],
) -> Checkpoint | None:
    """Load the newest whole checkpoint in `root`. All ranks call it and get the same one; None
    where there is no checkpoint at all.

    `load` takes the rank's part out of an open checkpoint. It must make no collective call, for
    another rank may be failing, and may be called again with an older checkpoint after one that
    turned out to be damaged half-way, so it must overwrite all that it sets. Each damaged one is
    named in a call of `warn`, on rank 0.

    Raises UserError on all ranks when there are checkpoints and none is whole (to start over in
    silence would waste what can perhaps be saved), or when one does not fit the model or was
    written by a later version: then an older one is not what is wanted. Raises StorageFailed on all
    ranks where the storage fails one of them.
    """
    refused = []
    for name in _names(root, world):
        checkpoint, problem = _attempt(root / name, load, world)
        if checkpoint is not None:
            return checkpoint
        refused.append(problem)
        if world.rank == 0:
            warn(f"checkpoint refused, trying the one before: {problem}")
    if refused:
        raise UserError(
            f"{root}: none of {len(refused)} checkpoints is whole: {'; '.join(refused)}; to start "
            "over, move them away or give another run.name"
        )
    return None


def _names(root: Path, world: World) -> list[str]:
    """The candidates, by one rank's listing for all: file systems do not show all nodes the same at
    every moment."""

    def look() -> str:
        try:
            return json.dumps([path.name for path in candidates(root)])
        except OSError as error:
            raise CheckpointUnreadable(f"{root}: {error.strerror}") from error

    return list(json.loads(world.broadcast_from_rank_0(look)))


def load_checkpoint(path: Path, load: Callable[[Checkpoint], None], world: World) -> Checkpoint:
    """Load the checkpoint at `path`, `load` as in `open_newest`. Raises UserError on all ranks
    alike when any of them cannot (CheckpointCorrupt where it is damaged)."""
    checkpoint, problem = _attempt(path, load, world)
    if checkpoint is None:
        raise CheckpointCorrupt(problem)
    return checkpoint


def _attempt(
    path: Path, load: Callable[[Checkpoint], None], world: World
) -> tuple[Checkpoint | None, str]:
    """The checkpoint, or None and why it is damaged; every other failure is raised by all."""
    checkpoint: Checkpoint | None = None

    def open_share() -> None:
        nonlocal checkpoint
        checkpoint = open_checkpoint(path, world.rank, world.size)

    def load_share() -> None:
        assert checkpoint is not None
        load(checkpoint)
        checkpoint.close()

    problem = _agree(open_share, world) or _agree(load_share, world)
    return (None, problem) if problem else (checkpoint, "")


def _agree(act: Callable[[], None], world: World) -> str | None:
    """Act on every rank. Returns the first rank's word of damage, raises any other failure; that of
    the storage on all ranks alike, for to take an older checkpoint would give up a whole one. Of a
    rank that breaks (a device, its memory) the others know that it is lost."""
    corrupt: str | None = None
    failure: Exception | None = None

    def attempt() -> None:
        nonlocal corrupt, failure
        try:
            act()
        except CheckpointCorrupt as error:
            corrupt = str(error)
        except OSError as error:
            line = f"{error.filename or 'storage'}: {error.strerror}"
            raise CheckpointUnreadable(line) from error
        except (UserError, StorageFailed):
            raise
        except Exception as error:
            failure = error

    world.run_on_all(attempt)
    broken = world.first_error(None if failure is None else f"rank {world.rank}: {failure!r}")
    if failure is not None:
        raise failure
    if broken is not None:
        raise PeersLost(broken)
    return world.first_error(corrupt)
