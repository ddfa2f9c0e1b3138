"""What is done with a finished checkpoint: generate, export; and import makes one."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.folder import candidates, of_newest, step_folder, step_of
from megafrontier.checkpoint.format import CheckpointCorrupt, Manifest
from megafrontier.checkpoint.load import (
    Checkpoint,
    attached_problems,
    open_checkpoint,
    read_manifest,
)
from megafrontier.checkpoint.save import save
from megafrontier.commands.generate import check_request, generate, stream_text
from megafrontier.common.errors import UserError
from megafrontier.config import (
    Config,
    config_from_dict,
    config_to_dict,
    load_machine,
)
from megafrontier.data.tokenizers.tokenizer import Tokenizer, cached_tokenizer, load_tokenizer
from megafrontier.launch.device import uses_accelerator
from megafrontier.model.families.hf_io import (
    described_model,
    export_model,
    export_order,
    import_model,
)
from megafrontier.model.flops import parameter_shapes
from megafrontier.model.gpt import GPT
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Layout
from megafrontier.partition.wires.registry import DTYPES
from megafrontier.training.callbacks.save import attach_tokenizer
from megafrontier.training.device import explain_out_of_memory
from megafrontier.training.preview import check_vocabulary

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
    opened = of_newest(path, partial(_opened, prompt=prompt, device=device, sampling=sampling))
    model, tokenizer, tokens = opened.model, opened.tokenizer, opened.tokens
    sampling |= {"stop": tokenizer.eod, "vocab_size": tokenizer.vocab_size}
    new: list[int] = []
    with _memory_told(opened.where):
        show(prompt)
        made = _noted(generate(model, tokens, **sampling), new)
        for text in stream_text(made, tokenizer.decode, tokens):
            show(text)
    length = model.config.sequence_length
    if len(new) < sampling["max_new_tokens"] and len(tokens) + len(new) == length:
        return f"ended at the {length} tokens of model.sequence_length"
    return None


@dataclass(frozen=True)
class _Opened:
    """A model on its device, its tokenizer, and the prompt's tokens."""

    model: GPT
    tokenizer: Tokenizer
    tokens: list[int]
    where: torch.device


def _opened(checkpoint: Path, prompt: str, device: str, sampling: Mapping[str, Any]) -> _Opened:
    """What there is to generate with, after a look at what is asked of it."""
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
    name = device_name(config) if device == "any" else device
    where = torch.device("cuda" if uses_accelerator(name) else "cpu")
    with _memory_told(where):
        return _Opened(load_model(checkpoint, config, where), tokenizer, tokens, where)


def _memory_told(where: torch.device) -> AbstractContextManager[None]:
    return explain_out_of_memory(str(where), "--device cpu, or a shorter text")


def _noted(tokens: Iterator[int], seen: list[int]) -> Iterator[int]:
    for token in tokens:
        seen.append(token)
        yield token


def export_command(path: Path, out: Path, precision: str) -> str:
    """Write a checkpoint as a Hugging Face model folder; returns the architecture's name."""

    def write(source: Path) -> str:
        config = saved_config(source)
        weights = Weights(open_checkpoint(source), export_order(config.model))
        tokenizer = load_tokenizer(config.tokenizer)
        saved = tokenizer if tokenizer.min_vocab_size else None
        return export_model(config.model, weights, out, saved, DTYPES[precision])

    return of_newest(path, write)


def import_command(folder: Path, out: Path, tokenizer: str | None = None) -> Path:
    """Make a checkpoint, at step 0 and of weights alone, of a Hugging Face model folder.

    `out` is the checkpoints folder to write it into, or in one the checkpoint, step-00000000.
    `tokenizer` names another than the folder's, or is `none`. Raises UserError for what GPT does
    not do, a tokenizer that does not fit, and when the checkpoints folder holds some already or
    cannot be written.
    """
    if step_of(out):
        raise UserError(f"--out {out}: another step's name; need {step_folder(out.parent, 0)}")
    out = out if step_of(out) is None else out.parent
    if any(candidates(out)):
        raise UserError(f"{out}: holds checkpoints; need another --out")
    # First what may be wrong: the rest may take an hour.
    described = described_model(folder)
    spec = str(folder) if tokenizer is None else tokenizer
    try:
        cached_tokenizer(spec)
    except UserError as error:
        if tokenizer is None:
            raise UserError(f"{error}; or --tokenizer PATH or --tokenizer none") from error
        raise
    if tokenizer is not None:
        check_vocabulary(Config(model=described[1], tokenizer=tokenizer))
    _check_writable(out)
    model, tensors = import_model(folder)
    config = Config(model=model, tokenizer=spec)
    layout = Layout.build("imported", parameter_shapes(model).items(), 1)
    flat = torch.zeros(layout.numel)
    for entry, place in zip(layout.entries, layout.views(flat), strict=True):
        # Let go of each: a model of 70B would take half as much memory again.
        place.copy_(tensors.pop(entry.name))
    states = {"weight": flat.dtype}
    saved = config_to_dict(config)
    manifest = Manifest(0, 0, [layout], 1, states, saved, slice_elements=IMPORTED_SLICE)
    return save(
        out,
        manifest,
        {"weight": [flat]},
        0,
        True,
        World.single(),
        partial(attach_tokenizer, spec),
    )


def _check_writable(out: Path) -> None:
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {there} cannot be written into, need another folder")


def device_name(config: Config) -> str:
    """`machine.device.name`, `any` where the machine's file is not here."""
    try:
        return load_machine(config.machine).device.name
    except UserError:
        return "any"
