"""Export a model to a Hugging Face folder, and import one from it.

Only config.json and safetensors are read: no code and no pickle. `transformers` is not imported.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megafrontier.common.errors import UserError
from megafrontier.common.files import work_folder
from megafrontier.common.parsing import LARGEST_JSON, parse_json, read_text
from megafrontier.common.progress import track
from megafrontier.config import Config, MLPConfig, ModelConfig, check
from megafrontier.config.model.gpt import MOST_LAYERS
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.families import family_for, family_of
from megafrontier.families.base import HEAD, Family, ParamMapping, text_reader
from megafrontier.families.mixtures.mxfp4 import BLOCKS, SCALES, unpacked
from megafrontier.model.flops import buffer_shapes, parameter_shapes
from megafrontier.model.scaling import folded

SHARD_BYTES = 4 * 1024**3
"""Larger models are written as several files of about this size."""

_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_TEXT = "language_model."
"""In names of tensors, if a file has a model of images and text."""
_DERIVED = (*_BUFFERS, "rotary_emb.inv_freq")
"""Suffixes of the names of causal masks and rotary tables in old files."""


def export_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    out: Path,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write config.json, safetensors and the tokenizer's files. Returns the architecture's name.

    `weights` holds GPT's parameters and buffers by name. They are read one at a time, so it may
    load them lazily. The folder appears complete or not at all. Padded token ids are dropped. A
    model without biases gets zero biases if its family always has them. The constants of
    `model.scaling` are multiplied into the weights.

    Raises UserError if no family can express the model, or if `out` is not empty or cannot be
    written.
    """
    family = family_for(replace(config, prediction=None))  # which only training needs
    if config.scaling is not None or not family.has_prediction:
        config = replace(config, prediction=None)
    config, weights = folded(config, weights)
    with _new_folder(out) as folder:
        _write_weights(_exported(config, family, weights, dtype), folder)
        written = _config_json(config, family, tokenizer, dtype)
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(folder)
    return family.architecture


def import_model(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model in a Hugging Face folder: its config, and GPT's parameters by name, then the
    buffers that the family has.

    Tensors have the type that they are stored in. Rows of padded token ids are zero. Raises
    UserError for anything missing, damaged, or not supported by GPT.
    """
    family, config = described_model(folder)
    files = _TensorFiles(folder, family)
    mappings = family.mappings(config)
    with track("import", mappings, len(mappings), "parameters") as shown:
        weights = {mapping.name: _load(mapping, files) for mapping in shown}
    if config.tie_embeddings:
        files.refuse_other_head(weights["embedding.tokens.weight"])
    files.refuse_unread()
    shapes = parameter_shapes(config)
    if weights.keys() - shapes.keys():
        shapes |= buffer_shapes(config)
    for name, tensor in weights.items():
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"{folder}: {name}: shape {list(tensor.shape)}, need {shapes[name]}")
    return config, {name: weights[name] for name in shapes if name in weights}


def described_model(folder: Path) -> tuple[Family, ModelConfig]:
    """The family and config in a folder's config.json. Raises UserError as `import_model`."""
    path = folder / "config.json"
    reader = text_reader(path, _read_json(path))
    family = family_of(reader)
    for key in ("num_hidden_layers", "n_layer"):
        value = reader.number(key, 1)
        if not value <= MOST_LAYERS:  # before a list has an item for each layer
            raise reader.error(key, value, f"need at most {MOST_LAYERS}")
    config = family.read_config(reader)
    try:
        check(Config(model=config))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if config.prediction is not None and not _has_prediction(folder, family, config):
        config = replace(config, prediction=None)
    return family, config


def _has_prediction(folder: Path, family: Family, config: ModelConfig) -> bool:
    """Whether the files have the tensors of `prediction`, which transformers does not save."""
    files = _TensorFiles(folder, family)
    own = [m for m in family.mappings(config) if m.name.startswith("prediction.")]
    return any(files.has(name) for mapping in own for name in mapping.hf_names)


def _config_json(
    config: ModelConfig, family: Family, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> dict[str, Any]:
    # Without these ids, transformers would use those of the family's own tokenizer.
    begin, end = (None, None) if tokenizer is None else (tokenizer.bos, tokenizer.eod)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.write_config(config),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _exported(
    config: ModelConfig, family: Family, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The family's tensors and their names in files, one at a time."""
    attention = replace(config.attention, out_bias=None)
    biased = replace(config, bias=True, norm_bias=True, attention=attention, mlp=MLPConfig())
    with_biases = parameter_shapes(biased)
    own = parameter_shapes(config)
    added = with_biases.keys() - own.keys()
    mappings = family.mappings(config)
    with track("export", mappings, len(mappings), "parameters") as shown:
        for mapping in shown:
            is_added = mapping.name in added
            weight = torch.zeros(with_biases[mapping.name]) if is_added else weights[mapping.name]
            tensors = list(mapping.export(weight))
            tensors += tensors[:1] * len(mapping.copies)
            for hf_name, tensor in zip((*mapping.hf_names, *mapping.copies), tensors, strict=True):
                name = family.head if hf_name == HEAD else family.prefix + hf_name
                # Copy, because safetensors refuses tensors that share memory.
                # Biases of routers move in steps that 16 bits would round away.
                kept = dtype if mapping.name in own or is_added else torch.float32
                yield name, tensor.detach().to("cpu", kept, copy=True).contiguous()


def _write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write model.safetensors, or several files of about SHARD_BYTES and their index."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    _name_shards(shards, total, folder)


def _name_shards(shards: list[list[str]], total_bytes: int, folder: Path) -> None:
    """Give the files their final names, which contain their number."""
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{i}.part").rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` on success and is removed otherwise."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not an empty folder; choose another --out")
    out = out.resolve()  # because `.` has no name
    try:
        with work_folder(out) as folder:
            yield folder
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out}: cannot write: {error}") from error


class _TensorFiles:
    """The tensors of a folder by the family's names, read on demand."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder, self._family = folder, family
        self._files: dict[str, Path] = {}
        self._names: dict[str, str] = {}
        self._read: set[str] = set()
        for path in _safetensors_in(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    known = self._canonical(name)
                    self._names[known], self._files[known] = name, path

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def get(self, name: str) -> Tensor:
        """One tensor. Raises UserError if it is missing, damaged, or not floating point."""
        if self.has(name + BLOCKS):
            return self._unpacked(name)
        tensor = self._stored(name)
        if not tensor.is_floating_point():
            found = f"{self.folder}: tensor {self._names[name]}: type {tensor.dtype}"
            raise UserError(f"{found}, need floating point")
        return tensor

    def _unpacked(self, name: str) -> Tensor:
        """A stack of matrices [experts, inputs, outputs], of which files have the transposed ones
        in MXFP4. One after another, because the steps in between are large."""
        blocks, scales = (self._stored(name + part) for part in (BLOCKS, SCALES))
        try:
            matrices = [unpacked(*pair) for pair in zip(blocks, scales, strict=True)]
            return torch.stack(matrices).transpose(1, 2)
        except ValueError as error:
            raise UserError(f"{self.folder}: tensor {self._spelled(name)}: {error}") from error

    def _stored(self, name: str) -> Tensor:
        """One tensor of any type. Raises UserError if it is missing or damaged."""
        if name not in self._files:
            raise UserError(f"{self.folder}: tensor {self._spelled(name)}: missing")
        self._read.add(name)
        with _opened(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(self._names[name])
        return tensor

    def refuse_other_head(self, embedding: Tensor) -> None:
        """Raise UserError for an output matrix that differs from the embedding although config.json
        ties them: transformers would leave the two untied."""
        if HEAD not in self._files:
            return
        head = self.get(HEAD)
        if not torch.equal(head.to(embedding.dtype), embedding[: len(head)]):
            raise UserError(
                f"{self._files[HEAD]}: tensor {self._names[HEAD]}: not the embedding's values, "
                "though config.json has tie_word_embeddings; need that false"
            )

    def refuse_other_copy(self, name: str, tensor: Tensor) -> None:
        """Raise UserError for a copy with other values."""
        if self.has(name) and not torch.equal(self.get(name), tensor):
            found = (
                f"{self._files[name]}: tensor {self._names[name]}: not the values of the model's"
            )
            raise UserError(f"{found}, need the same")

    def refuse_unread(self) -> None:
        """Raise UserError for an unused tensor, because then this is another model."""
        for name in sorted(self._files.keys() - self._read):
            if name.endswith(_DERIVED) or name.startswith(self._family.ignored):
                continue
            found = f"{self._files[name]}: tensor {self._names[name]}"
            raise UserError(f"{found}: not part of a {self._family.architecture}")

    def _canonical(self, name: str) -> str:
        name = name.replace(_TEXT, "", 1)
        # transformers 5 names every head lm_head. In transformers 4, GPT-NeoX's is embed_out.
        if name in ("lm_head.weight", "embed_out.weight"):
            return HEAD
        return name.removeprefix(self._family.prefix)

    def _spelled(self, name: str) -> str:
        return self._family.head if name == HEAD else self._family.prefix + name


def _load(mapping: ParamMapping, files: _TensorFiles) -> Tensor:
    is_other = bool(mapping.others) and files.has(mapping.others[0])
    names = mapping.others if is_other else mapping.hf_names
    tensors = [files.get(name) for name in names]
    for name in mapping.copies:
        files.refuse_other_copy(name, tensors[0])
    try:
        return mapping.load(tensors).contiguous()
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(
            f"{files.folder}: tensor {', '.join(names)}: not as config.json says: {error}"
        ) from error


def _safetensors_in(folder: Path) -> list[Path]:
    """The weight files of a folder. Raises UserError if there are none or one is missing.

    A single file takes precedence over an index, as in transformers, which does not remove the
    index of an earlier save.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: weight_map: missing, need tensor names and their files")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = ["model.safetensors"]
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing; weights are read from safetensors only")
    return [folder / name for name in names]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a complete safetensors file: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_text(path, LARGEST_JSON))
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: need keys and values at the top")
    return values
