"""What a configuration means on a given number of ranks, checked before any of them starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from megafrontier.common.errors import UserError
from megafrontier.config import Config, MachineConfig, load_machine
from megafrontier.data.tokenizers.tokenizer import kept_tokenizer
from megafrontier.optim.adamw import find_apex
from megafrontier.parallel.levels import Levels
from megafrontier.partition import Placement, Wires
from megafrontier.partition.presets import choose_wires, has_error_feedback
from megafrontier.training.batches import PARTS, Part, make_loader, open_part
from megafrontier.training.logging.sinks import missing_package


@dataclass(frozen=True)
class RunPlan:
    """A machine's levels for this many ranks, the placement on them, and their wires, whose
    gradients may carry error feedback."""

    machine: MachineConfig
    levels: Levels
    placement: Placement
    wires: Wires
    error_feedback: bool


def resolve_plan(config: Config, ranks: int) -> RunPlan:
    """Raises UserError when the machine cannot hold the ranks or the placement does not fit."""
    machine = load_machine(config.machine)
    levels = Levels.resolve(machine.levels, ranks)
    placement = Placement.from_config(config.partition, levels)
    precision = config.train.precision
    wires = choose_wires(config.partition.wires, placement, levels, precision)
    feeds_back = has_error_feedback(config.partition, wires, placement, levels)
    return RunPlan(machine, levels, placement, wires, feeds_back)


def check_training(config: Config, ranks: int, parts: Sequence[Part] = PARTS) -> RunPlan:
    """Refuse what would fail later: placement, batch, vocabulary, corpora of `parts`, packages.
    Returns what `resolve_plan` does.

    Reads files but computes nothing, so that ranks may be forked after it. Raises UserError.
    """
    plan = resolve_plan(config, ranks)
    check_vocabulary(config)
    for part in parts:
        samples = open_part(config, part)
        if samples is not None:
            make_loader(config, samples, part, 0, ranks)
            samples.batch(0, 1)  # one is enough to tell most wrong tokenizers
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


def check_vocabulary(config: Config) -> None:
    """Raises UserError when the tokenizer makes ids of texts that the model does not know."""
    need = kept_tokenizer(config.tokenizer).needed_ids
    if config.model.vocab_size < need:
        raise UserError(
            f"model.vocab_size: {config.model.vocab_size}, need at least {need} for tokenizer "
            f"{config.tokenizer}"
        )


def describe_vocabulary(config: Config) -> Iterator[str]:
    """A warning of special tokens that the model does not know, as when `<pad>` was added to a
    Hugging Face tokenizer and not to its model: they are nothing to learn from."""
    tokenizer = kept_tokenizer(config.tokenizer)
    known, ids = config.model.vocab_size, tokenizer.vocab_size
    if tokenizer.needed_ids and known < ids:
        yield (
            f"warning: model.vocab_size: {known}, but the tokenizer has {ids} ids; data that holds "
            f"a special token from {known} on will be refused"
        )
