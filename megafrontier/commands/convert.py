"""The commands `export` and `import`: checkpoints to and from Hugging Face model folders."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path

import torch

from megafrontier.checkpoint.format import BUFFER, Manifest
from megafrontier.checkpoint.load import Checkpoint, open_checkpoint
from megafrontier.checkpoint.streamed import LoadTensor, save_streamed, unit_of
from megafrontier.comm.wires.registry import DTYPES
from megafrontier.commands.checkpoints import check_state, saved_config
from megafrontier.commands.fine_tuning import CONFIG, write_config
from megafrontier.common.checkpoints import candidates, of_newest, step_folder, step_of
from megafrontier.common.errors import UserError, need
from megafrontier.config import Config, ModelConfig, config_to_dict
from megafrontier.data.tokenizers.tokenizer import (
    cached_tokenizer,
    load_tokenizer,
    save_cached_tokenizer,
)
from megafrontier.families import family_for
from megafrontier.families.hf_io import described_model, export_model, import_model
from megafrontier.families.hub import model_folder
from megafrontier.model.flops import buffer_shapes, parameter_shapes
from megafrontier.plan.refuse import check_vocabulary

IMPORTED_SLICE = 2**20
"""Elements of a slice: fewer than in other checkpoints, because each of many readers wants only a
small part of the one shard file."""


READ_BYTES = 4 * 2**30
"""fp32 weights that `export` holds at a time, unless one parameter is larger."""


class _Weights(dict[str, torch.Tensor]):
    """A checkpoint's weights, or another state of them, by parameter name, fp32, read when they are
    asked for.

    Every shard file holds a part of every unit, so each read may open all files. Therefore a read
    also fetches the parameters that an export asks for next, up to READ_BYTES.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, state: str) -> None:
        self._checkpoint, self._state = checkpoint, state
        self._sizes = {
            mapping.name: 4 * prod(checkpoint.shapes[mapping.name])
            for mapping in family_for(config).mappings(config)
            if mapping.name in checkpoint.shapes
        }

    def __missing__(self, name: str) -> torch.Tensor:
        if name not in self._sizes:
            return self._checkpoint.tensors(BUFFER, [name])[name]
        self.clear()  # free the last read before the next
        order = list(self._sizes)
        following = order[order.index(name) :]
        totals = accumulate(self._sizes[other] for other in following)
        count = max(1, bisect_right(list(totals), READ_BYTES))
        self.update(self._checkpoint.tensors(self._state, following[:count]))
        return self[name]


def export_command(path: Path, out: Path, precision: str, state: str = "weight") -> str:
    """Write a checkpoint as a Hugging Face model folder, and return the architecture's name.
    `state`: as for `check_state`."""

    def write(source: Path) -> str:
        config = saved_config(source)
        checkpoint = open_checkpoint(source)
        check_state(checkpoint, state)
        weights = _Weights(checkpoint, config.model, state)
        tokenizer = load_tokenizer(config.tokenizer)
        saved = tokenizer if tokenizer.min_vocab_size else None
        return export_model(config.model, weights, out, saved, DTYPES[precision])

    return of_newest(path, write)


def import_command(name: str | Path, out: Path, tokenizer: str | None = None) -> Path:
    """Make a checkpoint of step 0, with weights only, from a Hugging Face model, and a config.yaml
    beside it that trains on. Returns the checkpoint's path.

    name: a folder, or the name of a model in the hub.
    out: the folder to write the checkpoint into, or the checkpoint itself (step-00000000 in it).
    tokenizer: a tokenizer to use instead of the folder's, or `none`.

    Raises UserError for a model that GPT cannot express, a tokenizer that does not fit, and a
    folder that holds checkpoints or a config already or cannot be written.
    """
    root = import_root(out, 0)
    folder = model_folder(str(name))
    # Check everything first, because reading the weights may take an hour.
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
    root.mkdir(parents=True, exist_ok=True)
    model, tensors = import_model(folder)

    def load(_: str, name: str) -> torch.Tensor:
        # Free each tensor at once: a 70B model would take half as much memory again.
        return tensors.pop(name)

    manifest = Manifest(0, 0, config_to_dict(Config(model=model, tokenizer=spec)))
    saved = save_imported(root, manifest, model, ["weight"], list(tensors), load)
    write_config(saved, described[1], has_tokenizer=tokenizer != "none")
    return saved


def import_root(out: Path, step: int) -> Path:
    """The folder to write an imported checkpoint of a step into. `out`: that folder, or the
    checkpoint in it. Raises UserError if it holds checkpoints or a config."""
    named = step_of(out)
    if named not in (None, step):
        fits = f"need {step_folder(out.parent, step)}"
        raise UserError(f"--out {out}: the name of another step, {fits}")
    root = out if named is None else out.parent
    if any(candidates(root)):
        raise UserError(f"{root}: holds checkpoints; need another --out")
    need(not (root / CONFIG).exists(), "--out", root, f"holds a {CONFIG}; need another")
    return root


def save_imported(
    root: Path,
    manifest: Manifest,
    model: ModelConfig,
    states: Sequence[str],
    names: Collection[str],
    load: LoadTensor,
) -> Path:
    """Write a checkpoint of a model, with the tokenizer of the manifest's config.

    states: in fp32, of each parameter. names: what there is besides, among it the buffers to write.
    `load` is asked for each state of each parameter, and for each of these buffers.
    """
    types = dict.fromkeys(states, torch.float32)
    units = [unit_of("imported", parameter_shapes(model), types)]
    buffers = {name: shape for name, shape in buffer_shapes(model).items() if name in names}
    if buffers:
        units.append(unit_of("buffers", buffers, {BUFFER: torch.float32}))
    spec = manifest.config["tokenizer"]

    def attach(checkpoint: Path) -> None:
        save_cached_tokenizer(spec, checkpoint / "tokenizer")

    manifest = replace(manifest, slice_elements=IMPORTED_SLICE)
    return save_streamed(root, manifest, units, load, attach)
