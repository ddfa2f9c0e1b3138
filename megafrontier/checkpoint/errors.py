"""What can go wrong with a checkpoint, as the training loop needs to tell it apart."""

from pathlib import Path

from megafrontier.common.errors import FatalError, StorageFailed, UserError


class CheckpointCorrupt(UserError):
    """A checkpoint is not whole: a file is missing, cut short, changed, or of something else."""


class CheckpointUnreadable(StorageFailed):
    """The storage does not let a checkpoint be read; it may well be whole."""


def not_read(path: Path, error: OSError) -> FatalError:
    """Why a checkpoint's file could not be read: its own fault, the user's, or the storage's."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return CheckpointCorrupt(f"{path}: missing: {error.strerror}")
    problem = f"{path}: cannot read: {error.strerror}"
    is_input = isinstance(error, PermissionError)  # another start would not be let in either
    return UserError(problem) if is_input else CheckpointUnreadable(problem)


class CheckpointWriteError(UserError):
    """A checkpoint could not be written. Raised on all ranks alike, after which training may go
    on: nothing was published and the older checkpoints are as they were.

    `is_storages` tells whether the fault is the storage's own, which may be well in a while, and
    not one that needs a person, as a full disk does.
    """

    def __init__(self, message: str, is_storages: bool) -> None:
        super().__init__(message)
        self.is_storages = is_storages
