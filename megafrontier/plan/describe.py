"""What a run logs before its first step: warnings, and a summary of its ranks."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

import torch

from megafrontier.comm.wires.registry import DTYPES, missing_kernels
from megafrontier.comm.wires.wire import Wire, WorkWires
from megafrontier.common.errors import UserError
from megafrontier.config import Config, OptimizerConfig
from megafrontier.families import family_for
from megafrontier.model.attention.kinds import kinds_of
from megafrontier.model.flops import parameter_count
from megafrontier.model.gpt import GPT
from megafrontier.model.kernels.float8 import MULTIPLE
from megafrontier.model.linear import linear_layers
from megafrontier.model.moe.experts import EXPERT_AXES, expert_sizes
from megafrontier.model.moe.products import describe_product
from megafrontier.model.scaling import describe_scaling
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.world import World
from megafrontier.partition.placement import Placement
from megafrontier.partition.rules import StateRules
from megafrontier.pipeline.balance import describe_pipeline, stage_costs
from megafrontier.plan.assemble import computed_with, reason_not_compiled, reason_not_float8
from megafrontier.plan.footprint import buffer_gib, host_gib, state_gib
from megafrontier.plan.resolve import RunPlan, micro_batches_of, optimizer_groups

_ROW = re.compile(r"(?!warning)([a-z][a-z0-9 ]{0,15}:) (.+)")
MANY_PEERS = 512
RCCL_DEVICES = ("MI250X", "AMD")
"""Parts of the names of devices that use RCCL."""


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
    steps, warmup = config.train.steps, config.schedule.warmup_steps
    if config.schedule.warmup(steps) < warmup:
        yield (
            f"warning: schedule.warmup_steps: {warmup}, but train.steps: {steps}; the warm-up is "
            f"shortened to {config.schedule.warmup(steps)} steps"
        )
    if config.partition.overlap == "full" and uses_rccl(name):
        yield (
            "warning: partition.overlap: full, but RCCL may start the kernels of several "
            "communicators in another order on each device, which has hung on MI250X "
            "(ROCm/rccl#2191); safe keeps one collective in flight"
        )
    yield from _warn_of_levels(plan)
    yield from _summarize(config, plan, name)
    if plan.division.ranks > 1:
        yield _describe_pipeline(config, plan)
    if plan.levels.ranks > 1:
        yield _describe_wires(config, plan)
    if config.model.scaling is not None:
        yield describe_scaling(config.model)
    if (
        config.optimizer.groups
        or config.optimizer.name != OptimizerConfig.name
        or config.model.scaling
    ):
        yield from optimizer_groups(config).describe()


def aligned(lines: Iterable[str]) -> list[str]:
    """The lines as a table: in all of the form `name: text`, the texts begin in one column.
    Warnings stay as they are."""
    lines = list(lines)
    rows = [(line, _ROW.match(line)) for line in lines]
    width = max((len(match[1]) for _, match in rows if match), default=0) + 2
    return [line if match is None else f"{match[1]:{width}}{match[2]}" for line, match in rows]


def uses_rccl(name: str) -> bool:
    """Whether a device of this name has RCCL for its collectives."""
    return any(part in name for part in RCCL_DEVICES)


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


def _warn_of_levels(plan: RunPlan) -> Iterator[str]:
    """A warning if the levels have shrunk because the ranks are few."""
    given = {name: level.size for name, level in plan.machine.levels.items() if level.size}
    used = _sizes(plan.levels)
    if any(used[name] != size for name, size in given.items()):
        yield (
            f"warning: machine.levels: {_joined(given)}, but {_count_ranks(plan)}; the levels "
            f"are shrunk to {_joined(used)}"
        )


def _count_ranks(plan: RunPlan) -> str:
    return "1 rank" if plan.levels.ranks == 1 else f"{plan.levels.ranks} ranks"


def _sizes(levels: Levels) -> dict[str, int]:
    return dict(zip(levels.names, levels.sizes, strict=True))


def _joined(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _summarize(config: Config, plan: RunPlan, device: str) -> Iterator[str]:
    """Lines about ranks, model, placement, the state of a rank, batch and data.

    Raises UserError if the batch does not divide.
    """
    levels, model, train = plan.levels, config.model, config.train
    splits = [f"{name} {size}" for name, size in asdict(plan.shape.splits).items() if size > 1]
    number = micro_batches_of(config, plan)
    yield f"layout: {_joined(_sizes(levels))} = {_count_ranks(plan)}, on {device}"
    count = parameter_count(model)
    numel = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    yield f"model: {numel} parameters, {model.layers} blocks, {model.hidden} wide"
    if splits:
        yield f"splits: {', '.join(splits)}"
    shards = _describe_placement(plan.default.placement, levels)
    if plan.experts.placement != plan.default.placement:
        shards += f"; of experts: {_describe_placement(plan.experts.placement, levels)}"
    yield f"sharded: {shards}"
    on_host = host_gib(config, plan)
    host = f", {on_host:.3g} GiB in host memory" if on_host else ""
    yield (
        f"a rank has: {state_gib(config, plan):.3g} GiB of state{host}, "
        f"{buffer_gib(config, plan):.3g} GiB of buffers"
    )
    is_padded = train.global_batch % (train.micro_batch * plan.shape.over(("data",)).ranks)
    yield (
        f"batch: {train.global_batch} sequences of {model.sequence_length} tokens; a rank has "
        f"{number} micro-batches of {train.micro_batch}{', some padding' if is_padded else ''}"
    )
    first, *more = [corpus.path for corpus in config.data.train] or ["none"]
    yield f"data: {first}{f' and {len(more)} more corpora' if more else ''}"


def _describe_placement(placement: Placement, levels: Levels) -> str:
    shards, *rest = describe_depths(placement, levels, whole=True)
    if not placement.on(levels).has_copy:
        shards += " (cast from the masters)"
    return ", ".join([shards, *rest])


def describe_depths(placement: Placement, levels: Levels, whole: bool = False) -> list[str]:
    """Through which level each state is sharded. Without `whole`, not that of the optimizer if it
    is sharded over all ranks."""
    names = ("none", *levels.names)
    weights = f"weights {names[placement.weights]}"
    if placement.backward_weights != placement.weights:
        weights += f" (in backward {names[placement.backward_weights]})"
    found = [weights, f"gradients {names[placement.gradients]}"]
    if whole or placement.optimizer < len(levels.names):
        found.append(f"optimizer {names[placement.optimizer]}")
    return found


def _describe_wires(config: Config, plan: RunPlan) -> str:
    """One line: the formats of all that crosses levels, and overlap."""
    parts = []
    if plan.data_levels.ranks > 1:
        parts.append(_describe_formats(plan.default, plan.data_levels))
    if plan.experts.wires != plan.default.wires:
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
            if name == "tokens" and plan.joined:
                names = ", ".join(levels.names[level] for level in plan.joined)
                parts[-1] += f" ({names} with the next level)"
    return f"wires: {'; '.join(parts)}; overlap {config.partition.overlap}"


def _describe_formats(state: StateRules, levels: Levels) -> str:
    placement, wires = state.placement.on(levels), state.wires
    crossed = [level for level, size in enumerate(levels.sizes) if size > 1]

    def formats(found: Sequence[Wire], of: Iterable[int]) -> str:
        return ", ".join(f"{levels.names[i]} {found[i].name}" for i in of) or "not sent"

    reduce = wires.reduce
    gathered = formats(wires.gather, (i for i in crossed if i < placement.optimizer))
    line = f"weights {gathered}; gradients {formats(reduce, crossed)}"
    if any(reduce[i].codec.rotates for i in crossed):
        line += ", rotated"
    if feedback := state.feedback_levels(levels):
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


def describe_kernels(config: Config, world: World, plan: RunPlan, model: GPT) -> Iterator[str]:
    """One line about the kernels, after warnings if they are not the requested ones. `model`: this
    rank's part."""
    wires = (plan.default.wires, plan.experts.wires)
    codecs = {wire.codec for own in wires for wire in (*own.gather, *own.reduce)}
    missing = world.first_error(missing_kernels(world.device.type, codecs))
    if missing is not None:
        yield f"warning: partition.wires: {missing}; encoded by plain torch, which takes longer"
    reason = reason_not_compiled(config, world)
    if reason is not None:
        yield f"warning: train.compile: {reason}; the blocks run uncompiled"
    if config.train.cuda_graphs and world.device.type == "cpu":
        yield "warning: train.cuda_graphs: true, but a CPU has none; blocks run as before"
    dtype = DTYPES[config.train.precision]
    computed = computed_with(config, world, plan.shape.splits.context > 1)
    kinds = kinds_of(config.model).values()
    attention = ", ".join(kind.kernel(config.model, computed) for kind in kinds)
    is_compiled = config.train.compile and reason is None
    yield f"attention: {attention}"
    yield f"blocks: {'compiled' if is_compiled else 'not compiled'}"
    if config.train.linear_precision is not None:
        yield _describe_float8(reason_not_float8(world), model)
    if config.model.moe is not None:
        sizes = expert_sizes(config.model, config.model.moe)
        yield f"experts: {describe_product(world.device, dtype, sizes)}"


def _describe_float8(reason: str | None, model: GPT) -> str:
    if reason is not None:
        return f"warning: train.linear_precision: fp8: {reason}; linear layers multiply in bf16"
    layers = linear_layers(model.trained_blocks())
    used = [layer for layer in layers if layer.float8 is not None]
    others = len(layers) - len(used)
    rest = f" ({others} in bf16, with sizes that are no multiples of {MULTIPLE})" if others else ""
    return f"linear layers: {len(used)} in fp8{rest}; MFU is of the 16-bit peak"
