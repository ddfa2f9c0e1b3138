"""The command `import --megatron`: a checkpoint of Megatron core as one of ours."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megafrontier.checkpoint.format import Manifest
from megafrontier.commands.convert import import_root, save_imported
from megafrontier.commands.fine_tuning import write_config
from megafrontier.commands.megatron.arguments import ArgumentReader, read_model, read_optimizer
from megafrontier.commands.megatron.continued import continued
from megafrontier.commands.megatron.folder import MASTERS, MOMENTS, OPTION, MegatronFolder
from megafrontier.commands.megatron.tensors import IGNORED, TensorRow, row_of
from megafrontier.common.errors import UserError, need
from megafrontier.config import Config, ModelConfig, OptimizerConfig, config_to_dict
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer
from megafrontier.model.flops import buffer_shapes, parameter_shapes
from megafrontier.plan.refuse import check_vocabulary

_VOCABULARY = ("embedding.tokens.weight", "head.output.weight")
"""Parameters with a row for each token id."""


@dataclass(frozen=True)
class _Source:
    """Where one of our tensors is: `box` of Megatron's tensor `key`, which has `whole` shape, and
    rows that are padded with zeros at the end to `shape`."""

    row: TensorRow
    key: str
    whole: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in which it is read."""
        is_stacked = len(self.box) > len(self.shape)
        return tuple(stop - start for start, stop in self.box[is_stacked:])


def import_megatron(
    path: Path, out: Path, tokenizer: str | None = None, weights_only: bool = False
) -> Path:
    """Make a checkpoint from one of Megatron core (torch_dist), which need not be trusted, and a
    config.yaml beside it, which goes on with the run.

    With Adam's states it has them, the fp32 weights, and the iteration as its step; without, or
    with `weights_only`, the weights and step 0. Tensors are read when they are written, one at a
    time.

    path: an iteration's folder, or the one above it. out: as for `import_command`. tokenizer: that
    of the run, or `none`.

    Raises UserError by key for a model or an optimizer that cannot be imported, a folder that is
    not sound, and an `out` that holds checkpoints or a config; StorageFailed.
    """
    need(tokenizer is not None, "--tokenizer", "missing", f"need PATH or none with {OPTION}")
    source = MegatronFolder(path)
    has_optimizer = not weights_only and _has_optimizer(source)
    root = import_root(out, source.iteration if has_optimizer else 0)
    config = _config(source.arguments, str(tokenizer), has_optimizer)
    sources = dict(_sources(source, config.model))
    _refuse_unread(source, sources)
    states = ("weight", *MOMENTS) if has_optimizer else ("weight",)
    keys = {state: _keys(source, state, sources, has_optimizer) for state in states}

    def load(state: str, name: str) -> torch.Tensor:
        known = keys.get(state, {}).get(name, sources[name].key)
        return _read(source, sources[name], known, config.model)

    manifest = _manifest(source, config, has_optimizer)
    lines = []
    if has_optimizer:
        lines = continued(source.arguments, source.iteration, config.optimizer)
    saved = save_imported(root, manifest, config.model, states, sources, load)
    write_config(saved, config.model, tokenizer != "none", lines)
    return saved


def _has_optimizer(source: MegatronFolder) -> bool:
    """Whether there are Adam's states. Raises UserError for those in flat buckets."""
    bucket = source.bucket_key()
    if bucket is not None:
        raise UserError(
            f"{source.where}: {bucket}: the optimizer's flat buckets, need a checkpoint of "
            "Megatron's --dist-ckpt-optim-fully-reshardable, or --weights-only here"
        )
    return any(state in source.states for state in MOMENTS)


def _config(reader: ArgumentReader, tokenizer: str, has_optimizer: bool) -> Config:
    padded = reader.count("padded_vocab_size")
    known = reader.optional_count("vocab_size") or cached_tokenizer(tokenizer).min_vocab_size
    # Without either, the padded rows count as tokens, which they are in Megatron's loss.
    model = read_model(reader, known or padded)
    optimizer = read_optimizer(reader) if has_optimizer else OptimizerConfig()
    config = Config(model=model, tokenizer=tokenizer, optimizer=optimizer)
    check_vocabulary(config)
    return config


def _manifest(source: MegatronFolder, config: Config, has_optimizer: bool) -> Manifest:
    if not has_optimizer:
        return Manifest(0, 0, config_to_dict(config))
    samples = source.arguments.number("consumed_train_samples", 0)
    step, tokens = source.iteration, int(samples) * source.arguments.count("seq_length")
    # Our order of samples is another one, and begins with its first.
    extra: dict[str, Any] = {"optimizer_steps": source.updates(), "data": (step, 0)}
    return Manifest(step, tokens, config_to_dict(config), extra=extra)


def _sources(source: MegatronFolder, model: ModelConfig) -> Iterator[tuple[str, _Source]]:
    """Each of our parameters, and of the buffers that Megatron has, with its source."""
    shapes = dict(parameter_shapes(model))
    if model.moe is not None and model.moe.balance == "bias":
        shapes |= buffer_shapes(model)
    for name, shape in shapes.items():
        row, block = row_of(name)
        key, index = source.find(row, block)
        stacked = () if index is None else (model.layers,)
        box = [(0, size) for size in shape]
        whole = [*stacked, *shape]
        if name in _VOCABULARY:
            whole[0] = source.tensor(key).shape[0] if source.tensor(key).shape else 0
            box[0] = 0, min(model.vocab_size, whole[0])
        at = [] if index is None else [(index, index + 1)]
        found = _Source(row, key, tuple(whole), (*at, *box), shape)
        _check(source, found, model, name)
        yield name, found


def _check(source: MegatronFolder, found: _Source, model: ModelConfig, name: str) -> None:
    """Raise UserError if a tensor has another shape or type, or too few rows."""
    tensor = source.tensor(found.key)
    where, need_shape = f"{source.where}: {found.key}", list(found.whole)
    need(tensor.shape == found.whole, where, list(tensor.shape), f"need {need_shape}")
    need(tensor.dtype.is_floating_point, where, tensor.dtype, "need floating point")
    rows, fits = found.whole[0], f"need a row for each of {model.vocab_size} token ids"
    need(name not in _VOCABULARY or rows >= model.vocab_size, where, f"{rows} rows", fits)


def _refuse_unread(source: MegatronFolder, sources: Mapping[str, _Source]) -> None:
    """Raise UserError for a tensor that is not imported, because then this is another model."""
    known = {found.key for found in sources.values()}
    for key in source.model_keys():
        if key not in known and not key.endswith(IGNORED) and not key.startswith("rng_state"):
            fits = "not part of the model that args describe, need one that GPT can express"
            raise UserError(f"{source.where}: {key}: {fits}")


def _keys(
    source: MegatronFolder, state: str, sources: Mapping[str, _Source], has_optimizer: bool
) -> dict[str, str]:
    """The key of each parameter in a state. Of weights: the optimizer's fp32 ones, if it has them.
    Raises UserError for a parameter that lacks a moment, or has it in another shape."""
    names = MASTERS if state == "weight" else (state,)
    held = {key: full for name in names for key, full in source.states.get(name, {}).items()}
    found: dict[str, str] = {}
    for name, of in sources.items():
        full = held.get(of.key) if has_optimizer else None
        if full is None:
            is_needed = state in MOMENTS and not name.endswith("router.bias")
            fits = "need it of every parameter, or --weights-only"
            key = f"optimizer.state.{state}.{of.key}"
            need(not is_needed, f"{source.where}: {key}", "missing", fits)
            continue
        tensor = source.tensor(full)
        has_shape = tensor.shape == of.whole or tensor.is_flattened(of.whole)
        fits = f"need {list(of.whole)}, or --weights-only"
        need(has_shape, f"{source.where}: {full}", list(tensor.shape), fits)
        is_float = tensor.dtype.is_floating_point
        need(is_float, f"{source.where}: {full}", tensor.dtype, "need floats, or --weights-only")
        found[name] = full
    return found


def _read(source: MegatronFolder, of: _Source, key: str, model: ModelConfig) -> torch.Tensor:
    """One of our tensors, in fp32."""
    values = torch.empty(of.stored, dtype=torch.float32)
    source.read(key, values, of.box, of.whole)
    values = of.row.convert(values, model)
    missing = of.shape[0] - values.shape[0]
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing)) if missing else values
