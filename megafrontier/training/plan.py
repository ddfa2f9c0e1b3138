"""What a configuration means on a given number of ranks: levels, placement, wires and memory."""

from dataclasses import dataclass, fields, replace

from megafrontier.common.errors import UserError
from megafrontier.config import Config, MachineConfig, load_machine
from megafrontier.model.flops import parameter_count, unit_parameters
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition import Placement, Wires
from megafrontier.partition.memory import MessageBuffers, unit_buffer_bytes
from megafrontier.partition.placement import node_depth, state_bytes
from megafrontier.partition.presets import choose_wires, has_error_feedback
from megafrontier.partition.wires.registry import DTYPES

GIB = 2**30


@dataclass(frozen=True)
class RunPlan:
    """The machine's levels for a number of ranks, the placement on them, the wire formats of each
    level, and whether gradient messages carry error feedback."""

    machine: MachineConfig
    levels: Levels
    placement: Placement
    wires: Wires
    error_feedback: bool


def resolve_plan(config: Config, ranks: int) -> RunPlan:
    """The plan of a run on `ranks` ranks.

    Raises UserError if the machine cannot hold the ranks or the placement does not fit.
    """
    machine = load_machine(config.machine)
    levels = Levels.resolve(machine.levels, ranks)
    placement = Placement.from_config(config.partition, levels)
    precision = config.train.precision
    wires = choose_wires(config.partition.wires, placement, levels, precision)
    error_feedback = has_error_feedback(config.partition, wires, placement, levels)
    return RunPlan(machine, levels, placement, wires, error_feedback)


def state_gib(config: Config, plan: RunPlan) -> float:
    """GiB that each rank holds from step to step, by formula: weights, gradients, optimizer state
    and quantization errors.

    Buffers (`buffer_gib`), activations and the allocator's overhead come on top.
    """
    numel = parameter_count(config.model)
    itemsize = DTYPES[config.train.precision].itemsize
    feedback_wires = plan.wires if plan.error_feedback else None
    found = state_bytes(numel, plan.placement, plan.levels, itemsize, feedback_wires)
    return sum(found.values()) / GIB


def buffer_gib(config: Config, plan: RunPlan) -> float:
    """GiB of the buffers that a rank's units share, by formula: unsharded weights, unreduced
    gradients, and messages."""
    numels, root = unit_parameters(config.model)
    dtype, overlap = DTYPES[config.train.precision], config.partition.overlap
    prefetch = None if overlap == "none" else config.partition.prefetch
    levels, placement = plan.levels, plan.placement.on(plan.levels)
    messages = MessageBuffers(placement, levels, plan.wires, dtype, overlap, prefetch or 0)
    units = unit_buffer_bytes(numels, root, placement, dtype.itemsize, prefetch)
    return (units + messages.held_bytes([root, *numels])) / GIB


def _block_inputs_gib(config: Config) -> float:
    """GiB of the inputs of all blocks, which backward needs whatever else is recomputed."""
    if config.train.activation_checkpointing == "offload":
        return 0.0
    model, itemsize = config.model, DTYPES[config.train.precision].itemsize
    tokens = config.train.micro_batch * model.sequence_length
    return model.layers * tokens * model.hidden * itemsize / GIB


def _required_gib(config: Config, plan: RunPlan) -> tuple[float, float, float]:
    """State, buffers, block inputs."""
    return state_gib(config, plan), buffer_gib(config, plan), _block_inputs_gib(config)


def check_memory(config: Config, plan: RunPlan) -> None:
    """Raises UserError if a rank is known to need more memory than the machine file's device
    has."""
    device = plan.machine.device
    if device.memory_gib is None:
        return
    state, buffers, inputs = required = _required_gib(config, plan)
    if sum(required) > device.memory_gib:
        raise UserError(
            f"machine.device.memory_gib: {device.memory_gib:g}, need at least "
            f"{sum(required):.3g} on {plan.levels.ranks} ranks: state {state:.3g}, buffers "
            f"{buffers:.3g}, inputs of the blocks {inputs:.3g}; take "
            f"{_remedies(config, plan, device.memory_gib)}"
        )


def _remedies(config: Config, plan: RunPlan, memory_gib: float) -> str:
    """The changes that would make the model fit: more nodes, other placements, offloading."""
    levels = plan.levels
    many_nodes = replace(levels, sizes=(*levels.sizes[:-1], levels.sizes[-1] << 20))
    node, world = node_depth(levels), len(levels.names)
    offloading = replace(config.train, activation_checkpointing="offload")

    def placed(*depths: int) -> RunPlan:
        return replace(plan, placement=Placement(*depths))

    candidates = {
        _shard_over_node(config, levels): (config, placed(node, node, node, world)),
        _shard_over_world(config): (config, placed(world, world, world, world)),
        "train.activation_checkpointing=offload": (replace(config, train=offloading), plan),
    }
    if list(plan.machine.levels.values())[-1].size is None:
        candidates = {"more nodes": (config, replace(plan, levels=many_nodes))} | candidates
    fitting = [
        remedy
        for remedy, candidate in candidates.items()
        if sum(_required_gib(*candidate)) < memory_gib
    ]
    return ", or ".join(fitting) or "a smaller model or train.micro_batch"


def _shard_over_node(config: Config, levels: Levels) -> str:
    """An override that shards weights and gradients over the node, optimizer state over all."""
    node = levels.names[node_depth(levels) - 1]
    backward = "" if config.partition.backward_weights is None else "backward_weights: null, "
    return (
        f"partition={{strategy: null, weights: {node}, {backward}gradients: {node}, "
        f"optimizer: {levels.names[-1]}}}"
    )


def _shard_over_world(config: Config) -> str:
    """An override that shards everything over all ranks. It has to unset a placement that the
    configuration spells out."""
    if config.partition.weights is None:
        return "partition.strategy=zero3"
    nulls = ", ".join(f"{state.name}: null" for state in fields(Placement))
    return f"partition={{strategy: zero3, {nulls}}}"
