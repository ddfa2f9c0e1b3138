"""What happens before a run starts: checks, warnings, and a summary of its ranks."""

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec

import torch

from megafrontier.common.errors import UserError
from megafrontier.config import Config, ModelConfig
from megafrontier.data.sampling.loader import micro_batches
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer
from megafrontier.model.families import family_for
from megafrontier.optim.adamw import find_apex
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition.placement import error_levels
from megafrontier.partition.wires.wire import Wire
from megafrontier.training.callbacks.base import load_class
from megafrontier.training.logging.sinks import missing_package
from megafrontier.training.plan import RunPlan, buffer_gib, check_memory, resolve_plan, state_gib
from megafrontier.training.trainer import PARTS, Part, make_loader, open_part

MANY_PEERS = 512
RCCL_DEVICES = ("MI250X", "AMD")
"""Parts of the names of devices that use RCCL."""


def check_training(config: Config, ranks: int, parts: Sequence[Part] = PARTS) -> RunPlan:
    """Refuse what would fail later: placement, batch, vocabulary, corpora of `parts`, packages.

    Returns the plan. Reads files but computes nothing, so that ranks may be forked afterwards.
    Raises UserError.
    """
    plan = resolve_plan(config, ranks)
    check_vocabulary(config)
    for part in parts:
        samples = open_part(config, part)
        if samples is not None:
            make_loader(config, samples, part, 0, ranks)
            samples.batch(0, 1)  # one sample shows most wrong tokenizers
    if "train" in parts:
        _check_packages(config)
    return plan


def _check_packages(config: Config) -> None:
    log = config.log
    if log.wandb != "disabled" and find_spec("wandb") is None:
        raise UserError(missing_package("log.wandb", log.wandb, "wandb"))
    if log.tensorboard and find_spec("tensorboard") is None:
        raise UserError(missing_package("log.tensorboard", "true", "tensorboard"))
    if config.optimizer.fused == "apex":
        find_apex()
    for name in log.callbacks:
        load_class(name)


def check_vocabulary(config: Config) -> None:
    """Raises UserError if the tokenizer encodes text to ids that the model does not have."""
    need = cached_tokenizer(config.tokenizer).min_vocab_size
    if config.model.vocab_size < need:
        raise UserError(
            f"model.vocab_size: {config.model.vocab_size}, need at least {need} for tokenizer "
            f"{config.tokenizer}"
        )


def warn_vocabulary(config: Config) -> Iterator[str]:
    """A warning if the tokenizer has special tokens that the model does not have.

    That happens if `<pad>`, for example, was added to a Hugging Face tokenizer and not to its
    model. There is nothing to learn about such tokens, so the run may go on without them.
    """
    tokenizer = cached_tokenizer(config.tokenizer)
    known, ids = config.model.vocab_size, tokenizer.vocab_size
    if tokenizer.min_vocab_size and known < ids:
        yield (
            f"warning: model.vocab_size: {known}, but the tokenizer has {ids} ids; data that holds "
            f"a special token from {known} on will be refused"
        )


def warn_overlap_policy(config: Config, device: str) -> Iterator[str]:
    """A warning about an overlap policy that may hang on a device."""
    if config.partition.overlap == "full" and any(name in device for name in RCCL_DEVICES):
        yield (
            "warning: partition.overlap: full, but RCCL may start the kernels of several "
            "communicators in another order on each device, which has hung on MI250X "
            "(ROCm/rccl#2191); safe keeps one collective in flight"
        )


def warn_many_peers(levels: Levels) -> Iterator[str]:
    """A warning for each level with so many peers that messages are many and small."""
    for name, size in zip(levels.names, levels.sizes, strict=True):
        if size > MANY_PEERS:
            yield (
                f"warning: machine.levels.{name}: {size} peers, so each unit is sent in {size} "
                "messages; a level in between (machine=frontier-large) makes them fewer and larger"
            )


def warn_not_exportable(model: ModelConfig) -> Iterator[str]:
    """A warning about a model that no Hugging Face family can express."""
    try:
        family_for(model)
    except UserError as error:
        yield f"warning: {error}"


def summarize(config: Config, plan: RunPlan) -> str:
    """One line: levels, placement, and the state and micro-batches of a rank.

    Raises UserError if the batch does not divide.
    """
    levels, placement = plan.levels, plan.placement
    names = ("none", *levels.names)
    sizes = " x ".join(f"{n} {s}" for n, s in zip(levels.names, levels.sizes, strict=True))
    shards = f"weights {names[placement.weights]}"
    if placement.backward_weights != placement.weights:
        shards += f" (in backward {names[placement.backward_weights]})"
    shards += f", gradients {names[placement.gradients]}, optimizer {names[placement.optimizer]}"
    train = config.train
    number = micro_batches(train.global_batch, train.micro_batch, levels.ranks)
    return (
        f"{sizes} = {levels.ranks} ranks; {shards}; per rank: "
        f"{state_gib(config, plan):.3g} GiB of state, "
        f"{buffer_gib(config, plan):.3g} of buffers, {number} micro-batches of "
        f"{train.micro_batch} sequences"
    )


def describe_wires(config: Config, plan: RunPlan) -> str:
    """One line: the formats of weights and gradients on each level that they cross, and overlap."""
    levels, placement = plan.levels, plan.placement.on(plan.levels)
    crossed = [level for level, size in enumerate(levels.sizes) if size > 1]

    def formats(wires: Sequence[Wire], of: Iterable[int]) -> str:
        return ", ".join(f"{levels.names[i]} {wires[i].name}" for i in of) or "not sent"

    reduce = plan.wires.reduce
    gathered = formats(plan.wires.gather, (i for i in crossed if i < placement.optimizer))
    line = f"wires: weights {gathered}; gradients {formats(reduce, crossed)}"
    if any(reduce[i].codec.rotates for i in crossed):
        line += ", rotated"
    feedback = error_levels(placement, levels, plan.wires) if plan.error_feedback else []
    if feedback:
        line += f", error feedback over {', '.join(levels.names[i] for i in feedback)}"
    return f"{line}; overlap {config.partition.overlap}"


def preview_run(config: Config, ranks: int) -> list[str]:
    """The lines that a run on `ranks` ranks will log. Raises UserError if they cannot train it."""
    plan = resolve_plan(config, ranks)
    check_memory(config, plan)
    return [
        summarize(config, plan),
        describe_wires(config, plan),
        *warn_many_peers(plan.levels),
        *warn_not_exportable(config.model),
        *warn_overlap_policy(config, plan.machine.device.name),
    ]


def describe_ranks(config: Config, plan: RunPlan, found: torch.device) -> Iterator[str]:
    """`summarize` with the device that was found, and the wires, after warnings: if the device is
    not the machine file's, and about what may be slow or hang."""
    device = plan.machine.device
    if device.is_stood_in_for_by(found.type):
        yield (
            f"warning: machine.device.name: {device.name}, but torch finds no accelerator; "
            "computing on the CPU"
        )
    yield from warn_many_peers(plan.levels)
    yield from warn_not_exportable(config.model)
    name = "CPU" if found.type == "cpu" else torch.cuda.get_device_name(found)
    if found.type != "cpu":
        yield from warn_overlap_policy(config, f"{device.name} {name}")
    yield f"{summarize(config, plan)}; on {name}"
    if plan.levels.ranks > 1:
        yield describe_wires(config, plan)
