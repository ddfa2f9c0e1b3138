"""`megafrontier checkpoint average`: one checkpoint whose weights are the mean of several."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import sqrt
from pathlib import Path

import torch

from megafrontier.checkpoint.format import BUFFER, CheckpointCorrupt, Manifest
from megafrontier.checkpoint.load import Checkpoint, attached_problems, open_checkpoint
from megafrontier.checkpoint.requests import Request
from megafrontier.checkpoint.save import OwnShard, save
from megafrontier.checkpoint.sets import ShardSet
from megafrontier.checkpoint.shard_file import Slice, slices_of
from megafrontier.common.checkpoints import find, step_of
from megafrontier.common.errors import need
from megafrontier.optim.groups import EMA
from megafrontier.parallel.world import World
from megafrontier.training.resume.compatibility import check_model, saved_model

WEIGHTS = {"mean": lambda place: 1.0, "linear": float, "sqrt": sqrt}
"""The weight of a checkpoint by its place in the average, 1 for the oldest."""
_WEIGHT = "weight"
_DROPPED = ("published", "error")
"""States of the last weights that were sent: they do not fit the average, and a run begins without
them, as it does with other wires."""


def average_command(
    path: Path, out: Path, last: int | None, steps: Sequence[int] | None, weights: str
) -> Path:
    """Write the average of checkpoints of a run into the new folder `out`. Returns its path.

    The masters, and their moving averages if all checkpoints have them, are
    sum(weight * values) / sum(weight), computed in fp64 and rounded once. All else, such as the
    optimizer's states and the step, is the newest checkpoint's, as are the shards. One slice of the
    result is in memory at a time.

    path: a run or its checkpoints. The `last` newest are taken, or those of `steps`. weights: a key
    of WEIGHTS.

    Raises UserError for fewer than two checkpoints, a step that is not there, different models, a
    checkpoint that is not whole, and if `out` exists; StorageFailed; CheckpointWriteError.
    """
    need(not out.exists(), "--out", out, "which exists, need a new folder")
    need(step_of(out) is None, "--out", out, f"need a folder, such as {out.parent / 'average'}")
    checkpoints = [open_checkpoint(chosen) for chosen in _choose(path, last, steps)]
    _check_same_model(checkpoints)
    average = _Average(checkpoints, [WEIGHTS[weights](i + 1) for i in range(len(checkpoints))])
    about = {"steps": [one.manifest.step for one in checkpoints], "weights": weights}
    manifest, attach = average.manifest(about), partial(_copy_files, checkpoints[-1])
    with _new_folder(out):
        return save(out, manifest, average.shards(manifest), World.single(), attach)


def _choose(path: Path, last: int | None, steps: Sequence[int] | None) -> list[Path]:
    """The checkpoints of an average, oldest first."""
    given = "neither" if last is None else "both"
    need((last is None) != (steps is None), "--last, --steps", given, "need one of them")
    found = {step_of(one): one for one in find(path)}
    if last is not None:
        fits = f"need at least 2, and {path} has {len(found)} (checkpoint.keep: how many stay)"
        need(2 <= last <= len(found), "--last", last, fits)
        return list(found.values())[-last:]
    wanted = sorted(steps or ())
    are_different = len(set(wanted)) == len(wanted) > 1
    need(are_different, "--steps", " ".join(map(str, wanted)), "need two or more different steps")
    for step in wanted:
        need(step in found, "--steps", step, f"need steps of {path}: {[*found]}")
    return [found[step] for step in wanted]


def _check_same_model(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise UserError unless all checkpoints are of the newest one's model."""
    newest = checkpoints[-1]
    model = saved_model(newest.manifest)
    for other in checkpoints[:-1]:
        differs = other.shapes != newest.shapes or _names(other, _WEIGHT) != _names(newest, _WEIGHT)
        need(not differs, str(other.path), "other parameters", f"need those of {newest.path}")
        if model is not None:
            check_model(model, other)


def _names(checkpoint: Checkpoint, state: str) -> set[str]:
    """The tensors that have a state."""
    tensors = checkpoint.manifest.tensors.items()
    return {name for name, boxes in tensors if state in boxes[0].unit.states}


@contextmanager
def _new_folder(path: Path) -> Iterator[None]:
    """Make a folder, and remove it if the body fails or is interrupted."""
    path.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _copy_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the attached files of a checkpoint. Raises CheckpointCorrupt if one is damaged."""
    problem = next(attached_problems(checkpoint.path, checkpoint.manifest), None)
    if problem is not None:
        raise CheckpointCorrupt(problem)
    for file in checkpoint.manifest.files:
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path / file.path, folder / file.path)


class _Average:
    """The states of an average, read from its checkpoints slice by slice."""

    def __init__(self, checkpoints: Sequence[Checkpoint], weights: Sequence[float]) -> None:
        self.newest = checkpoints[-1]
        self._all = list(zip(checkpoints, weights, strict=True))
        trained = _names(self.newest, EMA)
        has_ema = bool(trained) and all(_names(one, EMA) == trained for one in checkpoints)
        self._averaged = (_WEIGHT, EMA) if has_ema else (_WEIGHT,)

    def manifest(self, about: Mapping[str, object]) -> Manifest:
        """The manifest of the average: the newest checkpoint's, without states that do not fit, and
        with `about` as `average` of its extra."""
        newest = self.newest.manifest
        left_out = {*_DROPPED, EMA}.difference(self._averaged)
        kept = newest.with_states(BUFFER, *newest.states.keys() - left_out)
        return replace(kept, extra={**newest.extra, "average": about})

    def shards(self, manifest: Manifest) -> list[OwnShard]:
        """All shards of all sets, whose slices are computed when they are written."""
        return [
            _AverageShard(shard_set, index, True, {}, self, manifest.slice_elements)
            for shard_set in manifest.sets
            for index in range(shard_set.num_shards)
        ]

    def read(self, shard_set: ShardSet, parts: Sequence[Slice]) -> Sequence[torch.Tensor]:
        """The values of slices of one state and type, each [count]."""
        state, dtype = parts[0].state, parts[0].dtype
        counts = [part.count for part in parts]
        if state not in self._averaged:
            return _read(self.newest, shard_set, parts, dtype).split(counts)
        # Weights that are whole numbers make exact products, and equal values a sum whose quotient
        # is the value again. Weights that sum to 1 would be rounded themselves.
        total = torch.zeros(sum(counts), dtype=torch.float64)
        for checkpoint, weight in self._all:
            stored = checkpoint.manifest.states[state]
            total.add_(_read(checkpoint, shard_set, parts, stored), alpha=weight)
        total /= sum(weight for _, weight in self._all)
        return total.to(dtype).split(counts)


def _read(
    checkpoint: Checkpoint, shard_set: ShardSet, parts: Sequence[Slice], dtype: torch.dtype
) -> torch.Tensor:
    """The values of slices of `shard_set`, one after the other, whatever boxes and shards the
    checkpoint has."""
    values = torch.empty(sum(part.count for part in parts), dtype=dtype)
    requests = []
    for part, out in zip(parts, values.split([part.count for part in parts]), strict=True):
        entries = shard_set.units[part.unit].entries
        entry = next(entry for entry in entries if entry.key == part.parameter)
        requests.append(Request(part.state, entry, part.start, out))
    checkpoint.read(requests)
    return values


@dataclass(frozen=True)
class _AverageShard(OwnShard):
    """A shard that is never in memory: its slices are computed in the order of its file."""

    average: _Average
    slice_elements: int

    def check(self) -> None:
        """Nothing: the slices have the types and sizes that the set says."""

    def read(self, part: Slice) -> torch.Tensor:
        """The values of the next slice, which is `part`."""
        return next(self._values)

    @cached_property
    def _values(self) -> Iterator[torch.Tensor]:
        slices = slices_of(self.shard_set, self.index, self.slice_elements)
        for parts in _batches(slices, self.slice_elements):
            yield from self.average.read(self.shard_set, parts)


def _batches(slices: Sequence[Slice], elements: int) -> Iterator[list[Slice]]:
    """Slices in a row of one state and type, up to the elements of the largest slice: each read
    opens files, and many parameters are small."""
    batch: list[Slice] = []
    for part in slices:
        same = batch and (part.state, part.dtype) == (batch[0].state, batch[0].dtype)
        if batch and not (same and sum(one.count for one in batch) + part.count <= elements):
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch
