"""Checkpoints of tensors that are loaded when they are written, one at a time."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megafrontier.checkpoint.format import CheckpointWriteError, Manifest
from megafrontier.checkpoint.save import Attach, OwnShard, save
from megafrontier.checkpoint.sets import ShardSet, StoredUnit
from megafrontier.checkpoint.shard_file import Slice
from megafrontier.common.errors import FatalError
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Layout

LoadTensor = Callable[[str, str], torch.Tensor]
"""The tensor of a state and a name, in the state's type. It is called once for each."""


@dataclass(frozen=True)
class StreamedShard(OwnShard):
    """The only shard of the only set of a checkpoint. It holds the tensor that is being written."""

    load: LoadTensor
    _held: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_units(cls, units: Sequence[StoredUnit], load: LoadTensor) -> "StreamedShard":
        """The shard of these units, whose entries are whole tensors."""
        states = dict.fromkeys(state for unit in units for state in unit.states)
        shards = {state: [_absent(unit, state) for unit in units] for state in states}
        return cls(ShardSet("", 1, units), 0, True, shards, load)

    def read(self, part: Slice) -> torch.Tensor:
        """The values of a slice [count]. Slices come tensor by tensor."""
        key = part.state, part.parameter
        if key not in self._held:
            self._held.clear()  # before the next is loaded
            self._held[key] = self.load(*key).to(part.dtype).reshape(-1)
        return self._held[key][part.start : part.start + part.count]


def _absent(unit: StoredUnit, state: str) -> torch.Tensor | None:
    """A shard of a unit without memory; None if the unit lacks the state."""
    dtype = unit.states.get(state)
    return None if dtype is None else torch.empty(unit.layout.numel, dtype=dtype, device="meta")


def unit_of(
    name: str, shapes: Mapping[str, Sequence[int]], states: Mapping[str, torch.dtype]
) -> StoredUnit:
    """The unit of tensors with these shapes and states."""
    return StoredUnit.of(Layout.build(name, shapes.items(), 1), states)


def save_streamed(
    root: Path,
    manifest: Manifest,
    units: Sequence[StoredUnit],
    load: LoadTensor,
    attach: Attach | None = None,
) -> Path:
    """Save a checkpoint of these units in one process, as `checkpoint.save` does. Raises what
    `load` raises. After an error nothing of the checkpoint is left."""
    is_new = not root.exists()
    try:
        own = StreamedShard.of_units(units, load)
        return save(root, manifest, [own], World.single(), attach)
    except CheckpointWriteError as error:
        if is_new:
            with suppress(OSError):
                root.rmdir()
        if isinstance(error.__cause__, FatalError):
            raise error.__cause__ from None
        raise
