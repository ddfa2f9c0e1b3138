"""What happens before a run starts: checks, warnings, and a summary of its ranks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec

import torch

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.comm.wires.wire import Wire, WorkWires
from megafrontier.common.errors import UserError, need
from megafrontier.config import Config, OptimizerConfig
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer
from megafrontier.evaluation.tasks import check_tasks
from megafrontier.families import family_for
from megafrontier.model.moe.experts import EXPERT_AXES
from megafrontier.model.scaling import describe_scaling
from megafrontier.optim.adamw import find_apex
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import DATA_PARALLEL
from megafrontier.partition.placement import Placement, error_levels
from megafrontier.pipeline.balance import describe_pipeline, stage_costs
from megafrontier.training.callbacks.base import Callback, load_class
from megafrontier.training.host_memory import host_gib
from megafrontier.training.plan import (
    RunPlan,
    StatePlan,
    buffer_gib,
    micro_batches_of,
    optimizer_groups,
    resolve_plan,
    state_gib,
)
from megafrontier.training.traffic import tensor_traffic
from megafrontier.training.trainer import PARTS, CorpusPart, open_loader, open_named_loaders

MANY_PEERS = 512
RCCL_DEVICES = ("MI250X", "AMD")
"""Parts of the names of devices that use RCCL."""


def check_training(config: Config, ranks: int, parts: Sequence[CorpusPart] = PARTS) -> RunPlan:
    """Check layout, vocabulary, corpora of `parts`, and for training packages. Returns the plan.

    Reads files but computes nothing, so that ranks may be forked afterwards. Raises UserError.
    """
    plan = check_layout(config, ranks)
    check_data(config, plan, parts)
    if "train" in parts:
        check_packages(config)
    return plan


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
    loaders = [open_loader(config, part, 0, size) for part in parts]
    if "valid" in parts:
        loaders += open_named_loaders(config, 0, size).values()
    for loader in loaders:
        if loader is not None:
            loader.samples.batch(0, 1)  # one sample shows most wrong tokenizers


def check_packages(config: Config) -> None:
    """Check that the packages, tasks and callbacks that the config names are there, and that
    callbacks fit. Raises UserError."""
    log = config.log
    wandb = "" if log.wandb == "disabled" else log.wandb
    chosen = {"wandb": wandb, "tensorboard": "true" * log.tensorboard, "mlflow": log.mlflow}
    for package, value in chosen.items():
        if value and find_spec(package) is None:
            fits = f"needs a package: pip install megafrontier[{package}]"
            raise UserError(f"log.{package}: {value}, {fits}")
    check_tasks(config)
    if config.optimizer.fused == "apex":
        find_apex()
    for name in log.callbacks:
        changes = load_class(name).after_optimizer is not Callback.after_optimizer
        is_offloaded = config.partition.offload.optimizer != "none"
        if changes and (is_offloaded or config.partition.overlap_update):
            key = "offload.optimizer=none" if is_offloaded else "overlap_update=false"
            fits = f"may change masters after a step, need partition.{key}"
            raise UserError(f"log.callbacks: {name}, {fits}")


def check_vocabulary(config: Config) -> None:
    """Raises UserError if the tokenizer encodes text to ids that the model does not have."""
    least, given = cached_tokenizer(config.tokenizer).min_vocab_size, config.model.vocab_size
    fits = f"need at least {least} for tokenizer {config.tokenizer}"
    need(given >= least, "model.vocab_size", given, fits)


def describe_run(
    config: Config, plan: RunPlan, device: torch.device | None = None
) -> Iterator[str]:
    """What a run will log about its ranks: warnings, a summary, and the wires if there are several
    ranks.

    device: what the ranks compute on; default: what the machine file names.
    """
    stated = plan.machine.device
    name = stated.name
    if device is not None:
        name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        if stated.is_stood_in_for_by(device.type):
            yield (
                f"warning: machine.device.name: {stated.name}, but torch finds no accelerator; "
                "computing on the CPU"
            )
    is_gpu = device is not None and device.type != "cpu"
    if plan.is_offloaded and is_gpu and torch.get_num_threads() == 1:
        yield (
            "warning: OMP_NUM_THREADS: 1, but partition.offload updates masters on the host; need "
            "the cores of a rank"
        )
    yield from _warn_of_sizes(config, plan)
    if config.partition.overlap == "full" and any(part in name for part in RCCL_DEVICES):
        yield (
            "warning: partition.overlap: full, but RCCL may start the kernels of several "
            "communicators in another order on each device, which has hung on MI250X "
            "(ROCm/rccl#2191); safe keeps one collective in flight"
        )
    yield f"{_summarize(config, plan)}; on {name}"
    if plan.division.ranks > 1:
        yield _describe_pipeline(config, plan)
    if plan.levels.ranks > 1:
        yield _describe_wires(config, plan)
    splits = plan.shape.splits
    if splits.tensor > 1 and splits.pipeline == 1 and config.model.moe is None:
        yield _describe_tensor_traffic(config, plan)
    if config.model.scaling is not None:
        yield describe_scaling(config.model)
    if (
        config.optimizer.groups
        or config.optimizer.name != OptimizerConfig.name
        or config.model.scaling
    ):
        yield from optimizer_groups(config).describe()


def _warn_of_sizes(config: Config, plan: RunPlan) -> Iterator[str]:
    """Warnings about messages that are many and small, and a model that cannot be exported."""
    levels = plan.data_levels
    for level, size in zip(levels.names, levels.sizes, strict=True):
        if size > MANY_PEERS:
            yield (
                f"warning: machine.levels.{level}: {size} peers, so each unit is sent in {size} "
                "messages; a level in between (machine=frontier-large) makes them fewer and larger"
            )
    try:
        family_for(config.model)
    except UserError as error:
        yield f"warning: {error}"


def _describe_pipeline(config: Config, plan: RunPlan) -> str:
    """One line: the stages of a pipeline and its bubble, or a warning of too few micro-batches."""
    division, number = plan.division, micro_batches_of(config, plan)
    costs = stage_costs(config.model, division.layers)
    numbers = division.schedule, division.ranks, division.stages_per_rank, number
    return f"{describe_pipeline(*numbers, costs)}; blocks {', '.join(map(str, division.layers))}"


def _summarize(config: Config, plan: RunPlan) -> str:
    """One line: levels, placement, and the state and micro-batches of a rank.

    Raises UserError if the batch does not divide.
    """
    levels = plan.levels
    sizes = " x ".join(f"{n} {s}" for n, s in zip(levels.names, levels.sizes, strict=True))
    shards = _describe_placement(plan.placement, levels)
    if plan.experts.placement != plan.placement:
        shards += f"; of experts: {_describe_placement(plan.experts.placement, levels)}"
    splits = (f"{name} {size}" for name, size in asdict(plan.shape.splits).items() if size > 1)
    shards = ", ".join([*splits, shards])
    number = micro_batches_of(config, plan)
    on_host = host_gib(config, plan)
    host = f"{on_host:.3g} in host memory, " if on_host else ""
    return (
        f"{sizes} = {levels.ranks} ranks; {shards}; per rank: "
        f"{state_gib(config, plan):.3g} GiB of state, {host}"
        f"{buffer_gib(config, plan):.3g} of buffers, {number} micro-batches of "
        f"{config.train.micro_batch} sequences"
    )


def _describe_placement(placement: Placement, levels: Levels) -> str:
    names = ("none", *levels.names)
    shards = f"weights {names[placement.weights]}"
    if placement.backward_weights != placement.weights:
        shards += f" (in backward {names[placement.backward_weights]})"
    if not placement.on(levels).has_copy:
        shards += " (cast from the masters)"
    return (
        f"{shards}, gradients {names[placement.gradients]}, optimizer {names[placement.optimizer]}"
    )


def _describe_tensor_traffic(config: Config, plan: RunPlan) -> str:
    """One line: what a rank sends to those that share its matrices."""
    levels = plan.shape.over(("tensor",))
    by_level = zip(levels.names, levels.sizes, tensor_traffic(config, plan), strict=True)
    parts = (f"{name} {count / 1e9:.3g} GB" for name, size, count in by_level if size > 1)
    return f"tensor parallelism: each rank sends {', '.join(parts)} in a micro-batch"


def _describe_wires(config: Config, plan: RunPlan) -> str:
    """One line: the formats of all that crosses levels, and overlap."""
    parts = []
    if plan.data_levels.ranks > 1:
        parts.append(_describe_formats(plan.of(DATA_PARALLEL), plan.data_levels))
    if plan.experts.wires != plan.wires:
        levels = plan.shape.over(EXPERT_AXES)
        parts.append(f"of experts: {_describe_formats(plan.experts, levels)}")
    for name, wires, axes in (
        ("activations", plan.activations, ("tensor", "context", "pipeline")),
        ("tokens", plan.tokens, ("expert",)),
    ):
        levels = plan.shape.over(axes)
        if levels.ranks > 1:
            parts.append(f"{name} {_formats_of_work(config, wires, levels)}")
            if name == "activations" and config.partition.wires.activations == "auto":
                parts[-1] += " (auto)"
    return f"wires: {'; '.join(parts)}; overlap {config.partition.overlap}"


def _describe_formats(state: StatePlan, levels: Levels) -> str:
    placement, wires = state.placement.on(levels), state.wires
    crossed = [level for level, size in enumerate(levels.sizes) if size > 1]

    def formats(found: Sequence[Wire], of: Iterable[int]) -> str:
        return ", ".join(f"{levels.names[i]} {found[i].name}" for i in of) or "not sent"

    reduce = wires.reduce
    gathered = formats(wires.gather, (i for i in crossed if i < placement.optimizer))
    line = f"weights {gathered}; gradients {formats(reduce, crossed)}"
    if any(reduce[i].codec.rotates for i in crossed):
        line += ", rotated"
    feedback = error_levels(placement, levels, wires) if state.error_feedback else []
    if feedback:
        line += f", error feedback over {', '.join(levels.names[i] for i in feedback)}"
    return line


def _formats_of_work(config: Config, wires: WorkWires, levels: Levels) -> str:
    """The formats on the `levels` of splits, which have size 1 where no split crosses."""
    dtype = DTYPES[config.train.precision]
    return ", ".join(
        f"{name} {wires.codec(level, dtype).name}"
        for level, (name, size) in enumerate(zip(levels.names, levels.sizes, strict=True))
        if size > 1
    )
