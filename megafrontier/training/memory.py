"""A device's memory: what a run's state takes of it, and the end of a run that wants more."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import torch

from megafrontier.common.errors import RunFailed, UserError
from megafrontier.config import Config
from megafrontier.model.flops import parameter_count, unit_parameters
from megafrontier.parallel.levels import Levels
from megafrontier.partition.memory import MessageBuffers, unit_buffer_bytes
from megafrontier.partition.placement import Placement, node_depth, state_bytes
from megafrontier.partition.wires.wire import DTYPES
from megafrontier.training.plan import RunPlan

GIB = 2**30
_SAID_WITHOUT_TYPE = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED")
"""By allocators whose errors have no type of their own: a CPU's; a driver's, of page-locked memory
and of NCCL's or RCCL's buffers; cuBLAS's and its like."""


class OutOfMemory(RunFailed):
    """A rank's device has no more; another start would meet the same."""

    is_rank_local = True


def state_gib(config: Config, plan: RunPlan) -> float:
    """GiB that each rank holds from step to step, by the formulas: weights, gradients, optimizer
    state, errors. Buffers (`buffer_gib`), activations and the allocator's overhead come on top."""
    numel = parameter_count(config.model)
    itemsize = DTYPES[config.train.precision].itemsize
    feedback_wires = plan.wires if plan.error_feedback else None
    found = state_bytes(numel, plan.placement, plan.levels, itemsize, feedback_wires)
    return sum(found.values()) / GIB


def buffer_gib(config: Config, plan: RunPlan) -> float:
    """GiB of the buffers that a rank's units take turns in, by the formulas: whole weights,
    gradients on their way, and messages."""
    numels, root = unit_parameters(config.model)
    dtype, overlap = DTYPES[config.train.precision], config.partition.overlap
    prefetch = None if overlap == "none" else config.partition.prefetch
    levels, placement = plan.levels, plan.placement.on(plan.levels)
    messages = MessageBuffers(placement, levels, plan.wires, dtype, overlap, prefetch or 0)
    units = unit_buffer_bytes(numels, root, placement, dtype.itemsize, prefetch)
    return (units + messages.held_bytes([root, *numels])) / GIB


def _inputs_gib(config: Config) -> float:
    """GiB of the inputs of all blocks, which stay for backward whatever else is recomputed."""
    if config.train.activation_checkpointing == "offload":
        return 0.0
    model, itemsize = config.model, DTYPES[config.train.precision].itemsize
    tokens = config.train.micro_batch * model.sequence_length
    return model.layers * tokens * model.hidden * itemsize / GIB


def _parts_gib(config: Config, plan: RunPlan) -> tuple[float, float, float]:
    """State, buffers, blocks' inputs."""
    return state_gib(config, plan), buffer_gib(config, plan), _inputs_gib(config)


def check_memory(config: Config, plan: RunPlan) -> None:
    """Raises UserError where what a rank is known to need is more than the machine file's device
    holds."""
    device = plan.machine.device
    if device.memory_gib is None:
        return
    state, buffers, inputs = parts = _parts_gib(config, plan)
    if sum(parts) > device.memory_gib:
        raise UserError(
            f"machine.device.memory_gib: {device.memory_gib:g}, need {sum(parts):.3g} at least on "
            f"{plan.levels.ranks} ranks: state {state:.3g}, buffers {buffers:.3g}, inputs "
            f"of the blocks {inputs:.3g}; take {_remedies(config, plan, device.memory_gib)}"
        )


def _remedies(config: Config, plan: RunPlan, memory_gib: float) -> str:
    """What would fit, of what keeps the model: nodes without end, other placements, offloading."""
    levels = plan.levels
    endless = replace(levels, sizes=(*levels.sizes[:-1], levels.sizes[-1] << 20))
    node, world = node_depth(levels), len(levels.names)
    offloading = replace(config.train, activation_checkpointing="offload")

    def placed(*depths: int) -> RunPlan:
        return replace(plan, placement=Placement(*depths))

    ways = {
        _over_the_node(config, levels): (config, placed(node, node, node, world)),
        _over_everything(config): (config, placed(world, world, world, world)),
        "train.activation_checkpointing=offload": (replace(config, train=offloading), plan),
    }
    if list(plan.machine.levels.values())[-1].size is None:
        ways = {"more nodes": (config, replace(plan, levels=endless))} | ways
    found = [way for way, tried in ways.items() if sum(_parts_gib(*tried)) < memory_gib]
    return ", or ".join(found) or "a smaller model or train.micro_batch"


def _over_the_node(config: Config, levels: Levels) -> str:
    """An override: weights and gradients over the node, optimizer state over everything."""
    node = levels.names[node_depth(levels) - 1]
    second = "" if config.partition.backward_weights is None else "backward_weights: null, "
    return (
        f"partition={{strategy: null, weights: {node}, {second}gradients: {node}, "
        f"optimizer: {levels.names[-1]}}}"
    )


def _over_everything(config: Config) -> str:
    """An override: all of it. A placement that the config spells out has to go."""
    if config.partition.weights is None:
        return "partition.strategy=zero3"
    nulls = ", ".join(f"{place.name}: null" for place in fields(Placement))
    return f"partition={{strategy: zero3, {nulls}}}"


@contextmanager
def out_of_memory_told(where: str, need: str) -> Iterator[None]:
    """Raises OutOfMemory, which says where and what can be done, in place of torch's error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = _line_of(error)
        if said is None:
            raise
        raise OutOfMemory(f"{where}: {said.rstrip('.')}. Need {need}") from error


def _line_of(error: MemoryError | RuntimeError) -> str | None:
    """What an error says of memory that is out; None of another one."""
    lines = str(error).splitlines()
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return lines[0] if lines else "out of memory"
    return next((line for line in lines if any(said in line for said in _SAID_WITHOUT_TYPE)), None)


def room_for_training(config: Config) -> str:
    """What to change where a training step has no room."""
    train = config.train
    return (
        f"a smaller train.micro_batch ({train.micro_batch}), train.activation_checkpointing "
        f"({train.activation_checkpointing}) of more, weights and gradients sharded further "
        "(partition.weights, partition.gradients), or more ranks"
    )
