"""A checkpoint of Megatron core (format torch_dist): where it is, its arguments, its tensors.

Note [Where Megatron keeps what]
`DIR/latest_checkpointed_iteration.txt` names the newest iteration, whose folder `iter_0005000` is a
DCP checkpoint. What is no tensor of the model or the optimizer, such as the run's arguments, is in
`common.pt`, or in newer versions in the object `common_state/shard_0_1`. An optimizer's states are
`optimizer.state.STATE.NAME`, or with a prefix if there are several optimizers, as for experts.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.boxes import Box
from megafrontier.commands.dcp_folder import DCPFolder, DCPTensor, Inert
from megafrontier.commands.megatron.arguments import ArgumentReader
from megafrontier.commands.megatron.tensors import LAYERS, TensorRow
from megafrontier.common.errors import UserError, need
from megafrontier.common.parsing import parse_json, read_text

OPTION = "--megatron"
_LATEST, _COMMON, _METADATA = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
_COMMON_OBJECT = "common_state/shard_0_1"
_CHAIN = r"(?:chained_\d+\.)?optimizer\."
_STATE = re.compile(rf"{_CHAIN}state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_BUCKETS = re.compile(rf"{_CHAIN}distributed\.")
_OPTIMIZER = re.compile(_CHAIN)
MASTERS = ("fp32_param", "param")
"""Names of the fp32 weights among the optimizer's states."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's states, which have the same names here."""


def iteration_folder(path: Path) -> Path:
    """The newest iteration's folder below `path`, or `path` if it is one. Raises UserError."""
    latest = path / _LATEST
    if not latest.is_file():
        return path
    text = _text(latest).strip()
    is_known = text == "release" or (text.isascii() and text.isdigit())
    need(is_known, str(latest), repr(text[:40]), "need the number of an iteration")
    return path / (text if text == "release" else f"iter_{int(text):07d}")


def _text(path: Path) -> str:
    try:
        return read_text(path, 2**20)
    except (OSError, ValueError) as error:
        raise UserError(f"{OPTION} {path}: {error}, need text") from error


class MegatronFolder:
    """An open checkpoint (Note [Where Megatron keeps what]).

    arguments: of the run that wrote it. states: by name of an optimizer's state and of the model's
    tensor, the key.
    """

    def __init__(self, path: Path) -> None:
        """Raises UserError if it is no sound torch_dist checkpoint, and StorageFailed."""
        folder = iteration_folder(path)
        _check_format(folder)
        self.where = f"{OPTION} {folder}"
        self._dcp = DCPFolder(folder, OPTION)
        self._is_old = (folder / _COMMON).is_file()
        self._common = self._read_common()
        self.arguments = ArgumentReader(self.where, self._read_arguments())
        self.states: dict[str, dict[str, str]] = {}
        for key in self._dcp.tensors:
            if match := _STATE.fullmatch(key):
                self.states.setdefault(match[1], {})[match[2]] = key

    def _read_common(self) -> Mapping[str, Any]:
        if self._is_old:
            found = self._dcp.file(_COMMON)
        else:
            fits = "need it, or common.pt, with the run's arguments"
            need(_COMMON_OBJECT in self._dcp.objects, self.where, f"no {_COMMON_OBJECT}", fits)
            found = self._dcp.object(_COMMON_OBJECT)
            found = found[0] if isinstance(found, list) and found else found
        need(isinstance(found, Mapping), self.where, "no common state", "need Megatron's")
        return dict(found)

    def _read_arguments(self) -> dict[str, Any]:
        found = self._common.get("args")
        need(isinstance(found, Inert), f"{self.where}: args", "missing", "need the run's arguments")
        return {key: value for key, value in vars(found).items() if key != "arguments"}

    @property
    def iteration(self) -> int:
        """Optimizer steps done."""
        found = self._common.get("iteration", 0)
        is_count = type(found) is int and found >= 0
        need(is_count, f"{self.where}: iteration", found, "need a whole number")
        return int(found)

    def updates(self) -> int:
        """The optimizer's number of updates. Raises UserError unless it is one number."""
        steps = {float(step) for step in _steps(self._common.get("optimizer"))}
        fits = "need the number of Adam's updates, on which its bias correction depends"
        is_one = len(steps) == 1 and min(steps) >= 0
        need(is_one, f"{self.where}: optimizer: step", sorted(steps) or "missing", fits)
        return int(min(steps))

    def bucket_key(self) -> str | None:
        """A key of optimizer states in flat buckets, of which only Megatron knows the layout."""
        keys = (*self._dcp.tensors, *self._dcp.objects)
        return next((key for key in keys if _BUCKETS.match(key)), None)

    def model_keys(self) -> list[str]:
        """The keys of the model's tensors."""
        return [key for key in self._dcp.tensors if not _OPTIMIZER.match(key)]

    def tensor(self, key: str) -> DCPTensor:
        """What is known of a tensor."""
        return self._dcp.tensors[key]

    def find(self, row: TensorRow, block: int | None) -> tuple[str, int | None]:
        """The key of a row's tensor, and the block's number in it if all blocks are stacked.
        Raises UserError if there is none."""
        for key in row.keys:
            single = key if block is None else f"{LAYERS}{block}.{key}"
            if single in self._dcp.tensors:
                return single, None
            if block is not None and f"{LAYERS}{key}" in self._dcp.tensors:
                return f"{LAYERS}{key}", block
        named = row.keys[0] if block is None else f"{LAYERS}{row.keys[0]}"
        raise UserError(f"{self.where}: {named}: missing, need it as args say")

    def read(self, key: str, out: torch.Tensor, box: Box, shape: tuple[int, ...]) -> None:
        """Read the box of a tensor of `shape` into `out`, contiguous."""
        is_flat = self._dcp.tensors[key].is_flattened(shape)
        self._dcp.read(key, out, box, shape if is_flat else None)


def _check_format(folder: Path) -> None:
    """Raise UserError for another of Megatron's formats."""
    path = folder / _METADATA
    if not path.is_file():
        return
    try:
        values = parse_json(_text(path))
    except ValueError as error:
        raise UserError(f"{OPTION} {path}: not valid JSON: {error}") from error
    backend = values.get("sharded_backend") if isinstance(values, dict) else None
    need(backend == "torch_dist", f"{OPTION} {path}: sharded_backend", backend, "need torch_dist")


def _steps(state: Any) -> Iterator[float]:
    """The numbers of updates in an optimizer's part of the common state."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key in ("step", "common_step") and isinstance(value, int | float | torch.Tensor):
                yield float(value)
            else:
                yield from _steps(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _steps(value)
