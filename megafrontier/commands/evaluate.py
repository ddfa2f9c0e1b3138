"""The command `evaluate`: the loss of a finished checkpoint on its validation data."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megafrontier.checkpoint.folder import find, of_newest
from megafrontier.checkpoint.load import load_checkpoint
from megafrontier.commands.convert import device_name, saved_config
from megafrontier.common.errors import UserError
from megafrontier.config import (
    Config,
    PartitionConfig,
    config_to_dict,
    load_config,
    load_machine,
)
from megafrontier.data.sampling.samples import Batch
from megafrontier.data.tokenizers.tokenizer import Tokenizer, cached_tokenizer
from megafrontier.launch.context import RunContext, open_context
from megafrontier.launch.health.preflight import check_present
from megafrontier.launch.main import launch, load_or_refuse
from megafrontier.parallel.env import identify
from megafrontier.parallel.fault_injection import fault_point
from megafrontier.parallel.world import World
from megafrontier.training.callbacks.evaluate import (
    Evaluation,
    evaluate,
    no_bytes,
    no_targets_message,
    warn_validation_repeats,
)
from megafrontier.training.preview import check_training
from megafrontier.training.resume.compatibility import rotary_changes
from megafrontier.training.resume.resume import fill_shards, share_shards
from megafrontier.training.trainer import build_model, open_loader


@dataclass(frozen=True)
class Target:
    """What to evaluate: the newest checkpoint that `path` stands for, with this configuration, in
    the folder of its run."""

    path: Path
    config: Config
    directory: Path


def find_target(path: Path, overrides: Sequence[str], unused: Sequence[str]) -> Target:
    """A YAML config stands for its run's newest checkpoint, evaluated as the file says; a
    checkpoint (or a run) is evaluated as it was trained. Raises UserError when there is none, for
    nothing to evaluate on, and for overrides of `unused` keys and sections."""
    _refuse_unused(overrides, unused)
    if path.is_file():
        config = load_config(path, overrides)
        path = Path(config.run.directory)
    else:
        config = of_newest(path, partial(_kept_config, overrides=overrides))
    directory = _run_of(path)
    if config.evaluate.batches == 0:
        raise UserError("evaluate.batches: 0, need at least 1")
    data = config.data
    if not (data.valid or data.train):
        need = "need a corpus to evaluate on: 'data.valid=[{path: …}]'"
        raise UserError(f"data.valid: empty, {need}")
    return Target(path, config, directory)


def _kept_config(checkpoint: Path, overrides: Sequence[str]) -> Config:
    """Its config, with the tokenizer in memory: its files may go before they are needed."""
    config = saved_config(checkpoint, overrides)
    cached_tokenizer(config.tokenizer)
    return config


def _run_of(path: Path) -> Path:
    """A checkpoint's run, wherever that has been moved: the config may name an older place."""
    folder = find(path)[-1].resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


def evaluate_command(
    path: Path, overrides: Sequence[str], nproc: int | None, show: Callable[[str], Any]
) -> int:
    """Loss, perplexity and bits per byte on the validation data, over one or more ranks.

    Local ranks are one level, all states sharded over it: the result does not depend on the
    placement, and the machine that a checkpoint was trained on need not be at hand. Of it only
    `device.name: cpu` is kept.
    """
    is_local = nproc is not None or identify(os.environ).world_size == 1
    unused = ["train.compile", "optimizer", "schedule", "checkpoint"]
    unused += ["machine", "partition"] if is_local else []
    unused += [] if path.is_file() else ["run.name", "run.directory"]
    target = load_or_refuse(lambda: find_target(path, overrides, unused), nproc)
    config = target.config
    config.train.compile = False  # a few batches would not repay it
    if is_local:
        config.machine = {"levels": {"world": {}}, "device": {"name": device_name(config)}}
        config.partition = PartitionConfig(strategy="zero3")

    def body() -> int:
        need = f"a smaller train.micro_batch ({config.train.micro_batch}), or more ranks"
        with open_context(config, target.directory) as context:
            _agree_on(config, context.world)
            with context.explain_out_of_memory(need):
                checkpoint, found = _evaluate(target, context, show)
            if context.world.rank == 0:
                show(describe(checkpoint, found))
        return 0

    def check(ranks: int) -> None:
        if not is_local:
            check_present(load_machine(config.machine).device, identify(os.environ), False)
        check_training(config, ranks, parts=("valid",))

    return launch(config, body, nproc, check)


def _agree_on(config: Config, world: World) -> None:
    """Raises UserError on all ranks where some have found another configuration: the run may have
    been resumed with it meanwhile. The tokenizer lies in each checkpoint anew."""
    mine = json.dumps(config_to_dict(replace(config, tokenizer="")), sort_keys=True, default=str)
    first = world.broadcast_from_rank_0(lambda: mine)
    line = f"{config.run.name}: ranks have found checkpoints of different configurations"
    world.raise_first(None if mine == first else UserError(f"{line}; need the path of one"))


def _refuse_unused(overrides: Sequence[str], unused: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0]
        if key != "machine.device.name" and any(f"{key}.".startswith(f"{n}.") for n in unused):
            raise UserError(f"{key}: not used by evaluate here, leave it out")


def _evaluate(
    target: Target, context: RunContext, show: Callable[[str], Any]
) -> tuple[Path, Evaluation]:
    """The checkpoint that is the newest now, and what it comes to."""
    config, hierarchy, world = target.config, context.hierarchy, context.world
    model, engine = build_model(config, context.plan, hierarchy)
    weights = {"weight": [unit.master for unit in engine.units]}
    load = partial(fill_shards, model=config.model, engine=engine, states=weights)
    load_it = partial(load_checkpoint, load=load, world=world)
    checkpoint = of_newest(target.path, load_it, world.broadcast_from_rank_0)
    share_shards(engine, weights)
    engine.restore(has_published=False)
    loader = world.run_on_all(lambda: open_loader(config, "valid", hierarchy))
    if loader is None:
        raise UserError("data.split: keeps nothing for validation; need data.valid or a part")
    if world.rank == 0:
        # A config may lack what was given to the training on the command line.
        changes = rotary_changes(config.model, checkpoint.manifest)
        for line in changes + warn_validation_repeats(loader, config.evaluate.batches):
            show(line)
    tokenizer = cached_tokenizer(config.tokenizer)
    count_bytes = partial(text_bytes, tokenizer) if tokenizer.min_vocab_size else no_bytes
    try:
        fault_point("evaluate")
        beat = context.watchdog.beat
        found = evaluate(model, loader, hierarchy, config.evaluate.batches, count_bytes, beat)
        assert found is not None  # nothing breaks it off
        if found.tokens == 0:
            need = "need documents of 2 tokens or more"
            raise UserError(f"{no_targets_message(config.evaluate.batches)}; {need}")
        return checkpoint.path, found
    finally:
        loader.close()


def text_bytes(tokenizer: Tokenizer, batch: Batch) -> int:
    """Bytes of UTF-8 that a batch's targets stand for."""
    rows = zip(batch.tokens[:, :1].tolist(), batch.targets.tolist(), strict=True)
    return sum(_bytes_after(tokenizer, before, row) for before, row in rows)


def _bytes_after(tokenizer: Tokenizer, before: list[int], row: list[int]) -> int:
    """Bytes of a row's targets, decoded behind the token `before` them: Llama's tokenizers leave
    out a space that comes first."""
    # The end of a document is no text, though some tokenizers decode it to their name for it.
    before, row = ([i for i in ids if i >= 0 and i != tokenizer.eod] for ids in (before, row))
    return _bytes_of(tokenizer.decode(before + row)) - _bytes_of(tokenizer.decode(before))


def _bytes_of(row: str) -> int:
    """Of a character that a row's end cuts each side decodes to U+FFFD: three bytes for one or
    two, which are counted as one."""
    whole = row.strip("\ufffd")
    return len(whole.encode()) + len(row) - len(whole)


def describe(checkpoint: Path, found: Evaluation) -> str:
    """One line: nats per token, perplexity, and bits per byte of UTF-8 text, where there is any."""
    line = f"{checkpoint}: loss {found.loss:.4f}  perplexity {math.exp(min(found.loss, 700)):.2f}"
    if found.utf8_bytes == 0:
        return f"{line}  ({found.tokens} tokens)"
    bits = found.loss_sum / math.log(2) / found.utf8_bytes
    sizes = f"{found.tokens} tokens, {found.utf8_bytes} bytes"
    return f"{line}  bits per byte {bits:.4f}  ({sizes})"
