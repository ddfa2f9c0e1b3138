"""What can go wrong with a checkpoint, as the training loop needs to tell it apart."""

from megafrontier.errors import UserError


class CheckpointCorrupt(UserError):
    """A checkpoint is not whole: a file is missing, cut short, changed, or of something else."""


class CheckpointWriteError(UserError):
    """A checkpoint could not be written. Raised on all ranks alike, after which training may go
    on: nothing was published and the older checkpoints are as they were."""
