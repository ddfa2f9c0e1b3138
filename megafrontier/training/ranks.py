"""How many ranks a run has, on what, and what each of them holds and computes, in words."""

from collections.abc import Iterator

import torch

from megafrontier.cluster.levels import Levels
from megafrontier.config import Config
from megafrontier.data.loader import micro_batches
from megafrontier.training.arrangement import Arrangement, arrange
from megafrontier.training.memory import check_memory, state_gib

MANY_PEERS = 512


def summarize(config: Config, arrangement: Arrangement) -> str:
    """One line: levels, placement, state and micro-batches of a rank. Raises UserError where the
    batch does not divide."""
    levels, place = arrangement.levels, arrangement.placement
    names = ("none", *levels.names)
    sizes = " x ".join(f"{n} {s}" for n, s in zip(levels.names, levels.sizes, strict=True))
    shards = f"weights {names[place.weights]}"
    if place.backward_weights != place.weights:
        shards += f" (in backward {names[place.backward_weights]})"
    shards += f", gradients {names[place.gradients]}, optimizer {names[place.optimizer]}"
    train = config.train
    number = micro_batches(train.global_batch, train.micro_batch, levels.ranks)
    return (
        f"{sizes} = {levels.ranks} ranks; {shards}; a rank: state "
        f"{state_gib(config, arrangement):.3g} GiB, {number} x {train.micro_batch} sequences a step"
    )


def crowded(levels: Levels) -> Iterator[str]:
    """A warning for each level of so many peers that messages are many and small."""
    for name, size in zip(levels.names, levels.sizes, strict=True):
        if size > MANY_PEERS:
            yield (
                f"warning: machine.levels.{name}: {size} peers, and a message of each unit for "
                "each; with a level between (machine=frontier-large) they are fewer and larger"
            )


def foresee(config: Config, ranks: int) -> list[str]:
    """What will be said of so many ranks. Raises UserError where they cannot train this."""
    arrangement = arrange(config, ranks)
    check_memory(config, arrangement)
    return [summarize(config, arrangement), *crowded(arrangement.levels)]


def describe_ranks(config: Config, arrangement: Arrangement, found: torch.device) -> Iterator[str]:
    """`summarize` with the device it is on, after a warning where that is not what the machine
    file names."""
    device = arrangement.machine.device
    if found.type == "cpu" and device.is_accelerator:
        yield (
            f"warning: machine.device.name: {device.name}, but torch finds no accelerator; "
            "computing on the processors"
        )
    yield from crowded(arrangement.levels)
    name = "processors" if found.type == "cpu" else torch.cuda.get_device_name(found)
    yield f"{summarize(config, arrangement)}; on {name}"
