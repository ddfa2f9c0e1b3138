"""What must hold before a run starts, as far as it follows from the config and its data."""

import os
from collections.abc import Sequence

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.common.errors import UserError, need
from megafrontier.config import Config
from megafrontier.data.sampling.loader import CorpusPart, open_loader, open_named_loaders
from megafrontier.data.sampling.samples import OpenCorpora
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer
from megafrontier.plan.footprint import GIB, buffer_gib, host_gib, state_gib
from megafrontier.plan.reserve import Reserve, usable_gib
from megafrontier.plan.resolve import RunPlan, micro_batches_of, optimizer_groups, resolve_plan


def check_layout(config: Config, ranks: int) -> RunPlan:
    """Check all that follows from the config and the number of ranks alone: splits, placement,
    wires, batch and optimizer groups. Returns the plan. Reads no files of the run. Raises
    UserError."""
    plan = resolve_plan(config, ranks)
    micro_batches_of(config, plan)
    optimizer_groups(config)  # refuses groups that do not fit
    return plan


def check_data(config: Config, plan: RunPlan, parts: Sequence[CorpusPart]) -> None:
    """Check the tokenizer, and the corpora of `parts` by one sample each. Raises UserError."""
    check_vocabulary(config)
    size = plan.shape.over(("data",)).ranks
    opened: OpenCorpora = {}
    loaders = [open_loader(config, part, 0, size, opened=opened) for part in parts]
    if "valid" in parts:
        loaders += open_named_loaders(config, 0, size, opened=opened).values()
    for loader in loaders:
        if loader is not None:
            loader.samples.batch(0, 1)  # one sample shows most wrong tokenizers


def check_vocabulary(config: Config) -> None:
    """Raises UserError if the tokenizer encodes text to ids that the model does not have."""
    least, given = cached_tokenizer(config.tokenizer).min_vocab_size, config.model.vocab_size
    fits = f"need at least {least} for tokenizer {config.tokenizer}"
    need(given >= least, "model.vocab_size", given, fits)


def check_memory(config: Config, plan: RunPlan) -> None:
    """Raises UserError if state, buffers and block inputs of a rank need more memory than the
    reserve leaves of the machine file's device."""
    memory, usable = plan.machine.device.memory_gib, usable_gib(plan)
    train, model = config.train, config.model
    # Backward needs the inputs of all blocks whatever else is recomputed.
    number = micro_batches_of(config, plan)
    blocks = plan.division.blocks_in_flight(number)
    elements = blocks * train.micro_batch * model.sequence_length * model.hidden
    elements //= plan.shape.splits.tensor * plan.shape.splits.context
    is_offloaded = "offload" in config.checkpointing
    inputs = 0.0 if is_offloaded else elements * DTYPES[train.precision].itemsize / GIB
    # The last forward of a step, and the end of its backward.
    forward = state_gib(config, plan, in_first_forward=number == 1), inputs
    # Offloaded gradients of a single micro-batch leave the device as soon as they are complete.
    leaves = plan.is_offloaded and number == 1
    state, inputs = max(forward, (state_gib(config, plan, leaves), 0.0), key=sum)
    buffers = buffer_gib(config, plan)
    required = state + buffers + inputs
    if usable is not None and required > usable:
        raise UserError(
            f"machine.device.memory_gib: {memory:g}, need at least "
            f"{required + Reserve.of(plan).gib:.3g} on {plan.levels.ranks} ranks: state "
            f"{state:.3g}, buffers {buffers:.3g}, inputs of the blocks {inputs:.3g}; "
            f"{Reserve.of(plan)}; take {memory_advice(config)}"
        )


def memory_advice(config: Config) -> str:
    """What to change if a training step needs more memory than there is."""
    train, modes = config.train, " and ".join(dict.fromkeys(config.checkpointing))
    return (
        f"a smaller train.micro_batch ({train.micro_batch}), more "
        f"train.activation_checkpointing ({modes}), weights and gradients "
        "sharded further (partition.weights, partition.gradients), or more ranks"
    )


def check_host_memory(config: Config, plan: RunPlan, ranks: int | None = None) -> None:
    """Raises UserError if a rank needs more memory than the machine file states, or than each of
    `ranks` on this host has. `ranks`: None on another host."""
    memory = plan.machine.device.host_memory_gib
    if memory is None:
        if ranks is None:
            return
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / ranks
    required = host_gib(config, plan, memory)
    if required > memory:
        raise UserError(
            f"machine.device.host_memory_gib: {memory:.3g} for each rank, need {required:.3g} "
            "(partition.offload, checkpoint.local, evaluate.average); take more ranks, or an "
            "optimizer sharded further"
        )
