"""The command `evaluate`: the loss of a finished checkpoint on its validation data, or tasks."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

from megafrontier.checkpoint.load import Checkpoint, load_checkpoint
from megafrontier.checkpoint.states import fill_shards, persistent_buffers, restore_engine
from megafrontier.commands.checkpoints import check_state, device_name, saved_config
from megafrontier.common.checkpoints import of_newest
from megafrontier.common.errors import UserError, need
from megafrontier.config import (
    Config,
    ParallelConfig,
    PartitionConfig,
    load_config,
    load_machine,
)
from megafrontier.data.sampling.loader import open_loader, open_named_loaders
from megafrontier.data.sampling.samples import Batch, OpenCorpora
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer
from megafrontier.evaluation.tasks import Results, check_tasks, evaluate_tasks
from megafrontier.launch.context import RunContext, open_context
from megafrontier.launch.health.preflight import check_rank
from megafrontier.launch.main import launch, load_or_refuse
from megafrontier.parallel.env import identify
from megafrontier.pipeline.work import Runner
from megafrontier.plan.assemble import build_model, make_runner
from megafrontier.plan.refuse import check_data, check_layout
from megafrontier.plan.resolve import resolve_plan
from megafrontier.training.callbacks.evaluate import Evaluation, evaluate
from megafrontier.training.logging.sinks import add_line
from megafrontier.training.resume.compatibility import check_model, rotary_changes


def _find_target(
    path: Path, overrides: Sequence[str], unused: Sequence[str], with_tasks: bool
) -> tuple[Path, Config]:
    """A checkpoint, or a run whose newest one is meant, and the config to evaluate it with.

    A YAML config means its run, evaluated with the settings of the file. A checkpoint or a run is
    evaluated with the settings it was trained with. Raises UserError if there is no checkpoint or
    no data to evaluate on, and for overrides of `unused` keys or sections.
    """
    _refuse_unused(overrides, unused)
    if path.is_file():
        config = load_config(path, overrides)
        path = Path(config.run.directory)
    else:
        config = of_newest(path, partial(saved_config, overrides=overrides))
    if with_tasks:
        return path, config
    if config.evaluate.batches == 0:
        raise UserError("evaluate.batches: 0, need at least 1")
    if not (config.data.valid or config.data.train):
        need = "need a corpus to evaluate on: 'data.valid=[{path: …}]'"
        raise UserError(f"data.valid: empty, {need}")
    return path, config


def evaluate_command(
    path: Path,
    overrides: Sequence[str],
    nproc: int | None,
    show: Callable[[str], Any],
    with_tasks: bool = False,
    state: str = "weight",
) -> int:
    """Loss, perplexity and bits per byte on the validation data, over one or more ranks; or, with
    `with_tasks`, the results of `evaluate.tasks`, which also go to the sinks of the run.

    Local ranks are laid out by `_choose_layout`. The machine file of the training may be missing
    here. `state`: as for `check_state`.
    """
    is_local = nproc is not None or identify(os.environ).world_size == 1
    unused = ["train.compile", "optimizer", "schedule", "checkpoint"]
    unused += ["machine", "partition"] if is_local else []
    unused += [] if path.is_file() else ["run.name", "run.directory"]
    path, config = load_or_refuse(lambda: _find_target(path, overrides, unused, with_tasks), nproc)
    config.train.compile = False  # compiling takes longer than a few batches
    config.train.linear_precision = None  # which is for training
    if is_local:
        is_asked = any(override.startswith("parallel") for override in overrides)
        for line in _choose_layout(config, max(nproc or 1, 1), is_asked):
            show(line)

    def body() -> int:
        need = f"a smaller train.micro_batch ({config.train.micro_batch}), or more ranks"
        with open_context(config, Path(config.run.directory)) as context:
            with context.explain_out_of_memory(need):
                checkpoint, runner = _load(path, context, show, state)
                if with_tasks:
                    lines = _evaluate_tasks(checkpoint, runner, context, keep=state == "weight")
                else:
                    lines = _evaluate(checkpoint, runner, context)
            for line in lines if context.world.rank == 0 else ():
                show(line)
        return 0

    def check(ranks: int) -> None:
        plan = check_layout(config, ranks)
        if not is_local:
            identity = identify(os.environ)
            check_rank(load_machine(config.machine).device, identity, False)
            if identity.local_rank:  # one rank a host looks for files
                return
        check_data(config, plan, () if with_tasks else ("valid",))
        if with_tasks:
            check_tasks(config)

    return launch(config, body, nproc, check)


def _choose_layout(config: Config, ranks: int, is_asked: bool) -> list[str]:
    """Let `ranks` local ranks evaluate: with the splits of the run on its levels, or else on one
    level, or without splits. Returns a line that says which, if the run has splits.

    All states are sharded, because the result does not depend on the placement. `is_asked`: the
    splits were given on the command line. Raises UserError if these do not fit, or none.
    """
    device, splits = {"name": device_name(config)}, config.parallel
    choices = [(levels, splits, "the splits of the run") for levels in _levels(config)]
    choices += [] if is_asked else [({"world": {}}, ParallelConfig(), "no splits")]
    config.partition = PartitionConfig(strategy="zero3")
    batch, micro_batch, refused = config.train.global_batch, config.train.micro_batch, None
    for levels, config.parallel, name in choices:
        config.machine = {"levels": levels, "device": device}
        try:
            data = resolve_plan(config, ranks).shape.over(("data",)).ranks
            fits = f"need a multiple of the {data} data-parallel ranks"
            divides = batch % data == 0
            need(divides or config.train.elastic, "train.global_batch", batch, fits)
        except UserError as error:
            refused = error
            continue
        config.train.micro_batch = gcd(micro_batch, batch // data) if divides else micro_batch
        reason = "" if refused is None else f", because its own do not fit {ranks} ranks"
        is_split = splits != ParallelConfig()
        return [f"layout: {name}, levels {' × '.join(levels)}{reason}"] if is_split else []
    assert refused is not None
    raise refused


def _levels(config: Config) -> list[dict[str, Any]]:
    """The levels of the run's machine, if it is known here, and one level."""
    try:
        machine = load_machine(config.machine)
    except UserError:
        return [{"world": {}}]
    own = {name: {"size": level.size} for name, level in machine.levels.items()}
    return [own, {"world": {}}]


def _refuse_unused(overrides: Sequence[str], unused: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0]
        if key != "machine.device.name" and any(f"{key}.".startswith(f"{n}.") for n in unused):
            raise UserError(f"{key}: not used by evaluate here, leave it out")


def _load(
    path: Path, context: RunContext, show: Callable[[str], Any], state: str
) -> tuple[Checkpoint, Runner]:
    """The newest checkpoint, and its model."""
    config, mesh, world = context.config, context.mesh, context.world
    plan = context.plan
    model, engine = build_model(config, plan, mesh, has_values=False)
    runner = make_runner(config, plan, mesh, model, engine)
    weights = {state: [unit.master for unit in engine.units]}
    buffers = persistent_buffers(model)

    def load(checkpoint: Checkpoint) -> None:
        check_state(checkpoint, state)
        check_model(config.model, checkpoint)
        fill_shards(checkpoint, engine, weights, buffers)

    load_it = partial(load_checkpoint, load=load, world=world)
    checkpoint = of_newest(path, load_it, world.broadcast_from_rank_0)
    restore_engine(engine, weights, buffers)
    if world.rank == 0:
        # A config file may lack overrides that were given to the training.
        for line in rotary_changes(config, checkpoint.manifest):
            show(line)
    return checkpoint, runner


def _evaluate(checkpoint: Checkpoint, runner: Runner, context: RunContext) -> list[str]:
    """The evaluation of a checkpoint, in lines: all corpora, then those of each name."""
    config, mesh, world = context.config, context.mesh, context.world
    place = mesh.data_rank, mesh.data_size, mesh.device
    opened: OpenCorpora = {}
    loader, named = world.run_on_all(
        lambda: (
            open_loader(config, "valid", *place, opened),
            open_named_loaders(config, *place, opened),
        )
    )
    if loader is None:
        raise UserError("data.split: keeps nothing for validation; need data.valid or a part")
    tokenizer = cached_tokenizer(config.tokenizer)
    count_bytes = partial(text_bytes, tokenizer) if tokenizer.min_vocab_size else None
    try:
        lines, beat = [], context.watchdog.beat
        for name, of in {str(checkpoint.path): loader, **named}.items():
            found = evaluate(runner, of, mesh, config.evaluate.batches, count_bytes, beat)
            assert found is not None  # nothing interrupts it here
            lines.append(describe(name, found))
        return lines
    finally:
        for one in (loader, *named.values()):
            one.close()


def _evaluate_tasks(
    checkpoint: Checkpoint, runner: Runner, context: RunContext, keep: bool
) -> list[str]:
    """The results of tasks in lines. With `keep` rank 0 adds them to the metrics of the run, which
    are of its weights and not of their average, and to the other sinks of the run."""
    found = evaluate_tasks(context.config, runner, context.mesh, context.watchdog.beat)
    if found is None:
        return []
    run = checkpoint.path.absolute().parents[1]
    if keep and (run / "metrics.jsonl").is_file():
        add_line(run, {"step": checkpoint.manifest.step, "tasks": found}, context.config.log)
    return [f"{checkpoint.path}:", *describe_tasks(found)]


def describe_tasks(found: Results) -> list[str]:
    """Lines of a table: task, metric, value, and its standard error if there is one."""
    lines = []
    for task, values in found.items():
        for name, value in values.items():
            metric, _, rest = name.partition(",")
            error = values.get(f"{metric}_stderr" + (f",{rest}" if rest else ""))
            if not metric.endswith("_stderr"):
                spread = "" if error is None else f" ± {error:.4f}"
                lines.append(f"{task:24} {name:24} {value:.4f}{spread}")
    return lines


def text_bytes(tokenizer: Tokenizer, batch: Batch) -> int:
    """UTF-8 bytes of the text of a batch's targets."""
    rows = zip(batch.tokens[:, :1].tolist(), batch.targets.tolist(), strict=True)
    return sum(_bytes_after(tokenizer, before, row) for before, row in rows)


def _bytes_after(tokenizer: Tokenizer, before: list[int], row: list[int]) -> int:
    """UTF-8 bytes of a row's targets, decoded after the token `before` them, because Llama's
    tokenizers drop a space at the start of a text."""
    # The end-of-document token is no text, though some tokenizers decode it to its name.
    before, row = ([i for i in ids if i >= 0 and i != tokenizer.eod] for ids in (before, row))
    return _bytes_of(tokenizer.decode(before + row)) - _bytes_of(tokenizer.decode(before))


def _bytes_of(row: str) -> int:
    """UTF-8 bytes of a decoded row. Part of a character at either end, which decodes to U+FFFD,
    counts as one byte."""
    whole = row.strip("\ufffd")
    return len(whole.encode()) + len(row) - len(whole)


def describe(checkpoint: str, found: Evaluation) -> str:
    """One line: nats per token, perplexity, and bits per byte of UTF-8 text, if there is any."""
    line = f"{checkpoint}: loss {found.loss:.4f}  perplexity {math.exp(min(found.loss, 700)):.2f}"
    if found.utf8_bytes == 0:
        return f"{line}  ({found.tokens} tokens)"
    bits = found.loss_sum / math.log(2) / found.utf8_bytes
    sizes = f"{found.tokens} tokens, {found.utf8_bytes} bytes"
    return f"{line}  bits per byte {bits:.4f}  ({sizes})"
