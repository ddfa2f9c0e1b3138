"""What is done with a finished checkpoint: evaluate, generate, export; and import makes one."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.crowd import Alone, from_rank_0
from megafrontier.checkpoint.errors import CheckpointCorrupt
from megafrontier.checkpoint.folder import candidates, newest, step_folder, step_of
from megafrontier.checkpoint.manifest import Manifest
from megafrontier.checkpoint.read import (
    Checkpoint,
    attached_problems,
    open_checkpoint,
    read_manifest,
)
from megafrontier.checkpoint.resume import load_checkpoint
from megafrontier.checkpoint.write import save
from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.cluster.identity import identify
from megafrontier.config import (
    Config,
    PartitionConfig,
    config_from_dict,
    config_to_dict,
    load_config,
    load_machine,
)
from megafrontier.data.samples import Batch
from megafrontier.data.tokenizer import Tokenizer, kept_tokenizer, load_tokenizer
from megafrontier.errors import UserError
from megafrontier.model.generate import check_request, generate, stream_text
from megafrontier.model.gpt import GPT, parameter_shapes
from megafrontier.model.huggingface import (
    described_model,
    export_model,
    export_order,
    import_model,
)
from megafrontier.partition.layout import Layout
from megafrontier.partition.wires import DTYPES
from megafrontier.training.arrangement import Arrangement, check_training
from megafrontier.training.evaluation import Evaluation, describe_validation, evaluate
from megafrontier.training.launch import joined, launch, prepared, uses_accelerator
from megafrontier.training.memory import out_of_memory_told
from megafrontier.training.preflight import check_present
from megafrontier.training.resuming import fill_shards, share_shards
from megafrontier.training.saving import attach_tokenizer
from megafrontier.training.trainer import build_model, open_loader
from megafrontier.training.watch import Watch, watched

IMPORTED_SLICE = 2**20
"""Elements; a quarter of other checkpoints', for its readers all want little of one large piece."""


def saved_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config a checkpoint was trained with, and its own copy of the tokenizer, unless
    `overrides` name another.

    Raises UserError for overrides that do not fit it, CheckpointCorrupt for a damaged tokenizer.
    """
    manifest = read_manifest(path)
    config = config_from_dict(dict(manifest.config), str(path), overrides)
    if (path / "tokenizer").is_dir() and not any(o.startswith("tokenizer=") for o in overrides):
        problem = next(attached_problems(path, manifest), None)
        if problem is not None:
            raise CheckpointCorrupt(problem)
        config.tokenizer = str(path / "tokenizer")
    return config


READ_BYTES = 4 * 2**30
"""What `export` holds of the weights at a time, in fp32; or one larger parameter."""


class Weights(Mapping[str, torch.Tensor]):
    """A checkpoint's weights by parameter name, fp32. With the one that is asked for those that
    follow in `order` are read, READ_BYTES in all: each reading may open every file, for each holds
    a part of every unit."""

    def __init__(self, checkpoint: Checkpoint, order: Sequence[str]) -> None:
        self._checkpoint = checkpoint
        shapes = checkpoint.shapes
        self._bytes = {name: 4 * math.prod(shapes[name]) for name in order if name in shapes}
        self._read: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._bytes:
            raise KeyError(name)
        if name not in self._read:
            self._read = {}  # before the next are read
            self._read = self._checkpoint.tensors("weight", self._together_with(name))
        return self._read[name]

    def _together_with(self, name: str) -> list[str]:
        order = list(self._bytes)
        names, total = [name], self._bytes[name]
        for after in order[order.index(name) + 1 :]:
            total += self._bytes[after]
            if total > READ_BYTES:
                break
            names.append(after)
        return names

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)


def load_model(path: Path, config: Config, device: torch.device) -> GPT:
    """A whole model on one device: fp32 on a CPU, bf16 on a GPU, which would not hold the largest
    otherwise. Raises UserError when the checkpoint is not whole."""
    with torch.device("meta"):
        model = GPT(config.model)
    # In one call, which reads each file once: one a parameter would open all of them each time.
    shapes = parameter_shapes(config.model)
    layout = Layout.build("model", shapes.items(), 1)
    flat = torch.empty(layout.numel, dtype=_dtype_on(device), device=device)
    open_checkpoint(path).fill([layout], {"weight": [flat]}, 0, 1)
    model.load_state_dict(dict(zip(shapes, layout.views(flat), strict=True)), assign=True)
    return model


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def generate_command(
    path: Path,
    prompt: str,
    show: Callable[[str], Any],
    device: str = "any",
    **sampling: Any,
) -> str | None:
    """Continue `prompt` with the model of a checkpoint, handing each piece of text to `show`.
    Returns what else is to be told: that the context was full before `max_new_tokens` had come.

    `device`: `cpu`, or `any` for a GPU where there is one and the model was not trained on the CPU.
    `sampling` as in `model.generate.generate`. Raises UserError for a bad checkpoint or value, and
    OutOfMemory.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # the shell's bytes, as Python hands them on
        raise UserError("--prompt: not valid UTF-8") from error
    checkpoint = newest(path)
    config = saved_config(checkpoint)
    tokenizer = load_tokenizer(config.tokenizer)
    tokens = tokenizer.encode(prompt)
    if not tokens and config.data.document_mask:
        raise UserError(
            "--prompt: empty, but with data.document_mask no model learns how a document begins; "
            "need some text"
        )
    tokens = tokens or [tokenizer.eod]  # an empty prompt starts where a document starts
    try:
        check_request(config.model, tokens, **sampling)
    except UserError as error:  # of generate's arguments, which are options here
        name, _, problem = str(error).partition(":")
        raise UserError(f"--{name.replace('_', '-')}:{problem}") from error
    sampling |= {"stop": tokenizer.eod, "vocab_size": tokenizer.vocab_size}
    name = _device_name(config) if device == "any" else device
    where = torch.device("cuda" if uses_accelerator(name) else "cpu")
    with out_of_memory_told(str(where), "--device cpu, or a shorter text"):
        model = load_model(checkpoint, config, where)
        show(prompt)
        new: list[int] = []
        made = _noted(generate(model, tokens, **sampling), new)
        for text in stream_text(made, tokenizer.decode, tokens):
            show(text)
    length = config.model.sequence_length
    if len(new) < sampling["max_new_tokens"] and len(tokens) + len(new) == length:
        return f"ended at the {length} tokens of model.sequence_length"
    return None


def _noted(tokens: Iterator[int], seen: list[int]) -> Iterator[int]:
    for token in tokens:
        seen.append(token)
        yield token


def export_command(path: Path, out: Path, precision: str) -> str:
    """Write a checkpoint as a Hugging Face model folder; returns the architecture's name."""
    source = newest(path)
    config = saved_config(source)
    weights = Weights(open_checkpoint(source), export_order(config.model))
    return export_model(
        config.model, weights, out, load_tokenizer(config.tokenizer), DTYPES[precision]
    )


def import_command(folder: Path, out: Path) -> Path:
    """Make a checkpoint, at step 0 and of weights alone, of a Hugging Face model folder.

    `out` is the checkpoints folder to write it into, or in one the checkpoint, step-00000000.
    Raises UserError for what GPT does not do, and when that folder holds checkpoints already or
    cannot be written.
    """
    if step_of(out):
        raise UserError(f"--out {out}: another step's name; need {step_folder(out.parent, 0)}")
    out = out if step_of(out) is None else out.parent
    if any(candidates(out)):
        raise UserError(f"{out}: holds checkpoints; need another --out")
    # First what may be wrong: the rest may take an hour.
    described_model(folder)
    kept_tokenizer(str(folder))
    _check_writable(out)
    model, tensors = import_model(folder)
    config = Config(model=model, tokenizer=str(folder))
    layout = Layout.build("imported", parameter_shapes(model).items(), 1)
    flat = torch.zeros(layout.numel)
    for entry, place in zip(layout.entries, layout.views(flat), strict=True):
        # Let go of each: a model of 70B would take half as much memory again.
        place.copy_(tensors.pop(entry.name))
    states = {"weight": flat.dtype}
    saved = config_to_dict(config)
    manifest = Manifest(0, 0, [layout], 1, states, saved, slice_elements=IMPORTED_SLICE)
    return save(
        out, manifest, {"weight": [flat]}, 0, True, Alone(), partial(attach_tokenizer, str(folder))
    )


def _check_writable(out: Path) -> None:
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {there} cannot be written into, need another folder")


@dataclass(frozen=True)
class Target:
    """What to evaluate: a checkpoint, with this configuration."""

    checkpoint: Path
    config: Config


def find_target(path: Path, overrides: Sequence[str], unused: Sequence[str]) -> Target:
    """A YAML config stands for its run's newest checkpoint, evaluated as the file says; a
    checkpoint (or a run) is evaluated as it was trained. Raises UserError when there is none, for
    nothing to evaluate on, and for overrides of `unused` keys and sections."""
    _refuse_unused(overrides, unused)
    if path.is_file():
        config = load_config(path, overrides)
        target = Target(newest(Path(config.run.directory)), config)
    else:
        checkpoint = newest(path)
        target = Target(checkpoint, saved_config(checkpoint, overrides))
    if target.config.evaluate.batches == 0:
        raise UserError("evaluate.batches: 0, need at least 1")
    data = target.config.data
    if not (data.valid or data.train):
        need = "need a corpus to evaluate on: 'data.valid=[{path: …}]'"
        raise UserError(f"data.valid: empty, {need}")
    return target


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
    target = prepared(lambda: find_target(path, overrides, unused), nproc)
    config = target.config
    config.train.compile = False  # a few batches would not repay it
    if is_local:
        config.machine = {"levels": {"world": {}}, "device": {"name": _device_name(config)}}
        config.partition = PartitionConfig(strategy="zero3")

    def body() -> int:
        need = f"a smaller train.micro_batch ({config.train.micro_batch}), or more ranks"
        folder = target.checkpoint.resolve().parent  # its run's: the config's may have been moved
        directory = folder.parent if folder.name == "checkpoints" else folder
        identity, patience = identify(os.environ), config.train.hang_seconds
        with (
            closing(Watch(identity, directory, patience)) as watch,
            joined(config, watch.start, watch.fail) as (arrangement, hierarchy),
            watched(watch),
        ):
            _agree_on(target.checkpoint, hierarchy)
            with out_of_memory_told(f"rank {hierarchy.rank}", need):
                found = _evaluate(target, arrangement, hierarchy, show, watch.beat)
            if hierarchy.rank == 0:
                show(describe(target.checkpoint, found))
        return 0

    def check(ranks: int) -> None:
        if not is_local:
            check_present(load_machine(config.machine).device, identify(os.environ), False)
        check_training(config, ranks, parts=("valid",))

    return launch(config, body, nproc, check)


def _agree_on(checkpoint: Path, hierarchy: Hierarchy) -> None:
    """Raises UserError on all ranks where some have found another newest one: a training may be
    writing."""
    first = from_rank_0(hierarchy, str(checkpoint))
    other = hierarchy.first_error(None if str(checkpoint) == first else str(checkpoint))
    if other is not None:
        raise UserError(
            f"{first}: newest for rank 0, but others have found {other}; need the path of one"
        )


def _device_name(config: Config) -> str:
    try:
        return load_machine(config.machine).device.name
    except UserError:  # its file is not here
        return "any"


def _refuse_unused(overrides: Sequence[str], unused: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0]
        if key != "machine.device.name" and any(f"{key}.".startswith(f"{n}.") for n in unused):
            raise UserError(f"{key}: not used by evaluate here, leave it out")


def _evaluate(
    target: Target,
    arrangement: Arrangement,
    hierarchy: Hierarchy,
    show: Callable[[str], Any],
    beat: Callable[[], None],
) -> Evaluation:
    config = target.config
    model, engine = build_model(config, arrangement, hierarchy)
    weights = {"weight": [unit.master for unit in engine.units]}
    load = partial(fill_shards, model=config.model, engine=engine, states=weights)
    load_checkpoint(target.checkpoint, load, hierarchy)
    share_shards(engine, weights)
    engine.restore(has_published=False)
    loader = hierarchy.together(lambda: open_loader(config, "valid", hierarchy))
    if loader is None:
        raise UserError("data.split: keeps nothing for validation; need data.valid or a part")
    if hierarchy.rank == 0:
        for line in describe_validation(loader, config.evaluate.batches):
            show(line)
    count_bytes = partial(text_bytes, load_tokenizer(config.tokenizer))
    try:
        return evaluate(model, loader, hierarchy, config.evaluate.batches, count_bytes, beat)
    finally:
        loader.close()


def text_bytes(tokenizer: Tokenizer, batch: Batch) -> int:
    """Bytes of UTF-8 that a batch's targets stand for."""
    # The end of a document is no text, though some tokenizers decode it to their name for it.
    kept = (row[(row >= 0) & (row != tokenizer.eod)].tolist() for row in batch.targets.cpu())
    return sum(_bytes_of(tokenizer.decode(ids)) for ids in kept)


def _bytes_of(row: str) -> int:
    """Of a character that a row's end cuts each side decodes to U+FFFD: three bytes for one or
    two, which are counted as one."""
    whole = row.strip("\ufffd")
    return len(whole.encode()) + len(row) - len(whole)


def describe(checkpoint: Path, found: Evaluation) -> str:
    """One line: nats per token, perplexity, and bits per byte of UTF-8 text."""
    bits = found.loss_sum / math.log(2) / max(found.utf8_bytes, 1)
    return (
        f"{checkpoint}: loss {found.loss:.4f}  perplexity {math.exp(min(found.loss, 700)):.2f}  "
        f"bits per byte {bits:.4f}  ({found.tokens} tokens, {found.utf8_bytes} bytes)"
    )
