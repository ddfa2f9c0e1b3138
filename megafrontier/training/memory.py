"""A device's memory: what a run's state takes of it, and the end of a run that wants more."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megafrontier.config import Config
from megafrontier.errors import RunFailed, UserError
from megafrontier.model.flops import parameter_count
from megafrontier.partition.placement import state_bytes
from megafrontier.partition.wires import DTYPES
from megafrontier.training.arrangement import Arrangement

GIB = 2**30


class OutOfMemory(RunFailed):
    """A rank's device has no more; another start would meet the same."""

    is_one_ranks = True


def state_gib(config: Config, arrangement: Arrangement) -> float:
    """GiB that each rank holds from step to step, by the formulas: weights, gradients, optimizer
    state, errors. What comes on top are gathered units, activations and torch's own."""
    numel = parameter_count(config.model)
    itemsize = DTYPES[config.train.precision].itemsize
    fed_back = arrangement.wires if arrangement.error_feedback else None
    found = state_bytes(numel, arrangement.placement, arrangement.levels, itemsize, fed_back)
    return sum(found.values()) / GIB


def check_memory(config: Config, arrangement: Arrangement) -> None:
    """Raises UserError where the state alone is more than the machine file's device holds."""
    device = arrangement.machine.device
    need = state_gib(config, arrangement)
    if device.is_accelerator and device.memory_gib is not None and need > device.memory_gib:
        raise UserError(
            f"machine.device.memory_gib: {device.memory_gib:g}, need {need:.3g} for a rank's "
            f"weights, gradients and optimizer state on {arrangement.levels.ranks} ranks; take "
            "more nodes, or shard further"
        )


@contextmanager
def out_of_memory_told(where: str, need: str) -> Iterator[None]:
    """Raises OutOfMemory, which says where and what can be done, in place of torch's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{where}: {str(error).splitlines()[0]} Need {need}") from error


def room_for_training(config: Config) -> str:
    """What to change where a training step has no room."""
    train = config.train
    return (
        f"a smaller train.micro_batch ({train.micro_batch}), train.activation_checkpointing "
        f"({train.activation_checkpointing}) of more, or more ranks"
    )
