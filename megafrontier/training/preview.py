"""How many ranks a run has, on what, and what each of them holds and computes, in words."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from megafrontier.common.errors import UserError
from megafrontier.config import Config, ModelConfig
from megafrontier.data.sampling.loader import micro_batches
from megafrontier.model.families import family_for
from megafrontier.parallel.levels import Levels
from megafrontier.partition.placement import error_levels
from megafrontier.partition.wires.wire import Wire
from megafrontier.training.memory import buffer_gib, check_memory, state_gib
from megafrontier.training.plan import RunPlan, resolve_plan

MANY_PEERS = 512
RCCL_DEVICES = ("MI250X", "AMD")
"""What is in the names of devices that RCCL drives."""


def summarize(config: Config, plan: RunPlan) -> str:
    """One line: levels, placement, state and micro-batches of a rank. Raises UserError where the
    batch does not divide."""
    levels, place = plan.levels, plan.placement
    names = ("none", *levels.names)
    sizes = " x ".join(f"{n} {s}" for n, s in zip(levels.names, levels.sizes, strict=True))
    shards = f"weights {names[place.weights]}"
    if place.backward_weights != place.weights:
        shards += f" (in backward {names[place.backward_weights]})"
    shards += f", gradients {names[place.gradients]}, optimizer {names[place.optimizer]}"
    train = config.train
    number = micro_batches(train.global_batch, train.micro_batch, levels.ranks)
    return (
        f"{sizes} = {levels.ranks} ranks; {shards}; per rank: "
        f"{state_gib(config, plan):.3g} GiB of state, "
        f"{buffer_gib(config, plan):.3g} of buffers, {number} micro-batches of "
        f"{train.micro_batch} sequences"
    )


def describe_wires(config: Config, plan: RunPlan) -> str:
    """One line: the format of weights and gradients on each level that they cross, and overlap."""
    levels, place = plan.levels, plan.placement.on(plan.levels)
    crossed = [level for level, size in enumerate(levels.sizes) if size > 1]

    def formats(wires: Sequence[Wire], of: Iterable[int]) -> str:
        return ", ".join(f"{levels.names[i]} {wires[i].name}" for i in of) or "not sent"

    reduce = plan.wires.reduce
    gathered = formats(plan.wires.gather, (i for i in crossed if i < place.optimizer))
    line = f"wires: weights {gathered}; gradients {formats(reduce, crossed)}"
    if any(reduce[i].rotates for i in crossed):
        line += ", rotated"
    fed = error_levels(place, levels, plan.wires) if plan.error_feedback else []
    if fed:
        line += f", error feedback over {', '.join(levels.names[i] for i in fed)}"
    return f"{line}; overlap {config.partition.overlap}"


def risky(config: Config, device: str) -> Iterator[str]:
    """A warning of a policy that may hang on a device."""
    if config.partition.overlap == "full" and any(name in device for name in RCCL_DEVICES):
        yield (
            "warning: partition.overlap: full, but RCCL does not start several communicators in "
            "one order on all devices, and on MI250X they have hung (ROCm/rccl#2191); safe has one "
            "at a time"
        )


def crowded(levels: Levels) -> Iterator[str]:
    """A warning for each level of so many peers that messages are many and small."""
    for name, size in zip(levels.names, levels.sizes, strict=True):
        if size > MANY_PEERS:
            yield (
                f"warning: machine.levels.{name}: {size} peers, and a message of each unit for "
                "each; with a level between (machine=frontier-large) they are fewer and larger"
            )


def unexportable(model: ModelConfig) -> Iterator[str]:
    """A warning of a model that no Hugging Face family can express."""
    try:
        family_for(model)
    except UserError as error:
        yield f"warning: {error}"


def preview_run(config: Config, ranks: int) -> list[str]:
    """What will be said of so many ranks. Raises UserError where they cannot train this."""
    plan = resolve_plan(config, ranks)
    check_memory(config, plan)
    return [
        summarize(config, plan),
        describe_wires(config, plan),
        *crowded(plan.levels),
        *unexportable(config.model),
        *risky(config, plan.machine.device.name),
    ]


def describe_ranks(config: Config, plan: RunPlan, found: torch.device) -> Iterator[str]:
    """`summarize` with the device it is on, and the wires, after warnings: where that is not what
    the machine file names, and of what may go slowly or hang."""
    device = plan.machine.device
    if device.is_stood_in_for_by(found.type):
        yield (
            f"warning: machine.device.name: {device.name}, but torch finds no accelerator; "
            "computing on the CPU"
        )
    yield from crowded(plan.levels)
    yield from unexportable(config.model)
    name = "CPU" if found.type == "cpu" else torch.cuda.get_device_name(found)
    if found.type != "cpu":
        yield from risky(config, f"{device.name} {name}")
    yield f"{summarize(config, plan)}; on {name}"
    if plan.levels.ranks > 1:
        yield describe_wires(config, plan)
