"""Sets of shard files: which boxes of which tensors a checkpoint has in which file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafrontier.checkpoint.boxes import BoxEntry, with_boxes
from megafrontier.partition.layout import Layout

FILES_PER_FOLDER = 256

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their safetensors names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredUnit:
    """A flat buffer that was cut into shards, and the types of its states by name: weight, exp_avg,
    exp_avg_sq, and in some runs published and error; of buffers, buffer."""

    layout: Layout
    """Its entries are `BoxEntry`s."""
    states: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, layout: Layout, states: Mapping[str, torch.dtype]) -> "StoredUnit":
        """The unit with this layout, whose entries may be whole tensors without a box."""
        return cls(with_boxes(layout), states)

    @property
    def entries(self) -> Sequence[BoxEntry]:
        return self.layout.entries  # type: ignore[return-value]


@dataclass(frozen=True)
class ShardSet:
    """Units that are cut into the same number of shards. There is a file for each shard index.

    name: tells it from the checkpoint's other sets, for instance `tensor1-pipeline3`: where in the
    model-parallel axes the ranks are that hold it. The only set of a checkpoint may have none.
    """

    name: str
    num_shards: int
    units: Sequence[StoredUnit]

    def file(self, index: int) -> str:
        """The path of a shard's file in the checkpoint."""
        return shard_path(index, self.name)


def shard_path(index: int, set_name: str = "") -> str:
    """The path of a shard's file in the checkpoint. A folder holds at most 256 of them, because
    parallel file systems create the files of one folder one after the other."""
    return _shard_path(set_name, f"{index // FILES_PER_FOLDER:05d}", f"{index:08d}")


def _shard_path(set_name: str, folder: str, name: str) -> str:
    return "/".join(["pieces", *([set_name] if set_name else []), folder, f"{name}.safetensors"])


PATH_PATTERN = _shard_path("SET", "PIECE // 256", "PIECE")
"""What the manifest says of the paths of shard files."""
StateTypes = tuple[tuple[str, torch.dtype], ...]


def distinct_states(sets: Iterable[ShardSet]) -> list[StateTypes]:
    """The different states of units, which refer to them by number."""
    units = (unit for shard_set in sets for unit in shard_set.units)
    return list(dict.fromkeys(tuple(unit.states.items()) for unit in units))


def encode_set(shard_set: ShardSet, types: Sequence[StateTypes]) -> dict[str, Any]:
    """A set as JSON. `types`: the `distinct_states` of all sets."""
    units = [
        {
            "name": unit.layout.name,
            "numel": unit.layout.numel,
            "states": types.index(tuple(unit.states.items())),
            "tensors": [_encode_entry(entry) for entry in unit.entries],
        }
        for unit in shard_set.units
    ]
    return {"name": shard_set.name, "pieces": shard_set.num_shards, "units": units}


def _encode_entry(entry: BoxEntry) -> list[Any]:
    box = [] if entry.is_whole else [[list(part) for part in entry.box]]
    return [entry.name, list(entry.global_shape), entry.offset, *box]


def describe_set(shard_set: ShardSet) -> list[Any]:
    """A set alone as JSON: the arguments of `decode_set`."""
    types = distinct_states([shard_set])
    states = [{state: DTYPE_NAMES[dtype] for state, dtype in found} for found in types]
    return [encode_set(shard_set, types), states]


def decode_set(values: dict[str, Any], states: Sequence[Mapping[str, str]]) -> ShardSet:
    """The inverse of `encode_set`. `states`: the type names of each unit's states, by number."""
    types = [{state: DTYPES[name] for state, name in found.items()} for found in states]
    units = [StoredUnit(_decode_layout(unit), types[unit["states"]]) for unit in values["units"]]
    return ShardSet(values["name"], values["pieces"], units)


def _decode_layout(values: dict[str, Any]) -> Layout:
    entries = []
    for name, global_shape, offset, *rest in values["tensors"]:
        box = rest[0] if rest else [(0, size) for size in global_shape]
        shape = tuple(stop - start for start, stop in box)
        entries.append(
            BoxEntry(name, shape, offset, tuple(global_shape), tuple((a, b) for a, b in box))
        )
    return Layout(values["name"], tuple(entries), values["numel"])
