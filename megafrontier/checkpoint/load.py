"""Open a checkpoint and read any part of any tensor, on any number of ranks.

Nothing here depends on how the reader shards its tensors. It asks for elements of global tensors.
Only the files and slices that hold these are read, and each slice is checked.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path

import torch

from megafrontier.checkpoint.boxes import BoxEntry, with_boxes
from megafrontier.checkpoint.format import (
    BUFFER,
    AttachedFile,
    CheckpointCorrupt,
    CheckpointUnreadable,
    Manifest,
    as_read_error,
    check_file,
)
from megafrontier.checkpoint.requests import Request, read_slices, requests_of, shards_with
from megafrontier.checkpoint.shard_file import ShardFile, file_size
from megafrontier.common.checkpoints import MANIFEST, MANIFEST_LIMIT, candidates, step_of
from megafrontier.common.errors import UserError
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Entry, Layout


def open_checkpoint(path: Path, rank: int = 0, size: int = 1) -> "Checkpoint":
    """Open the checkpoint at `path`, after checking its manifest and that all files are there in
    full length. Each of `size` ranks checks its share of the files.

    Raises CheckpointCorrupt with the name of a file that is not right, CheckpointUnreadable if the
    storage fails, UserError if a later version wrote the checkpoint.
    """
    manifest = read_manifest(path)
    for name, need in _needed_files(manifest, rank, size):
        check_size(path, name, need)
    return Checkpoint(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """The checked manifest of the checkpoint at `path`. Raises CheckpointCorrupt if it is missing
    or damaged, CheckpointUnreadable, and UserError if a later version wrote it."""
    try:
        if not (path / MANIFEST).exists():
            reason = f"{path}: no {MANIFEST}: half-written, or not a megafrontier checkpoint"
            raise CheckpointCorrupt(reason)
        size = check_file(path, MANIFEST)
        if size > MANIFEST_LIMIT:
            reason = f"{path / MANIFEST}: {size} bytes, need at most {MANIFEST_LIMIT}"
            raise CheckpointCorrupt(reason)
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise as_read_error(path / MANIFEST, error) from error
    return Manifest.decode(text, path / MANIFEST)


def attached_problems(path: Path, manifest: Manifest) -> Iterator[str]:
    """Read the attached files of the checkpoint at `path`. Yields a line for each file that is not
    as it was written."""
    for file in manifest.files:
        problem = _attached_problem(path, file)
        if problem is not None:
            yield problem


def _attached_problem(root: Path, file: AttachedFile) -> str | None:
    path, crc32 = root / file.path, 0
    try:
        check_size(root, file.path, file.size)
        with open(path, "rb") as opened:
            while chunk := opened.read(2**20):
                crc32 = zlib.crc32(chunk, crc32)
    except (UserError, CheckpointUnreadable) as error:
        return str(error)
    except OSError as error:
        return str(as_read_error(path, error))
    if f"{crc32:08x}" != file.crc32:
        return f"{path}: checksum does not match: changed since it was written"
    return None


def _needed_files(manifest: Manifest, rank: int, size: int) -> Iterator[tuple[str, int]]:
    if rank == 0:
        yield from ((file.path, file.size) for file in manifest.files)
    first = 0
    for shard_set in manifest.sets:
        for index in range((rank - first) % size, shard_set.num_shards, size):
            yield shard_set.file(index), file_size(manifest, shard_set, index)
        first += shard_set.num_shards


def check_size(root: Path, name: str, need: int) -> None:
    """Check a file of the checkpoint at `root` as `check_file`, and its size in bytes."""
    found = check_file(root, name)
    if found != need:
        raise CheckpointCorrupt(f"{root / name}: {found} bytes, need {need}: cut short or grown")


class Checkpoint:
    """An open checkpoint: its folder, its manifest, and its tensors by name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Checks nothing, unlike `open_checkpoint`; enough to look at the manifest."""
        self.path = path
        self.manifest = manifest

    @property
    def origin(self) -> str:
        """Where it comes from, for the log."""
        return str(self.path)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every parameter, by name."""
        buffers = set(self.manifest.buffers)
        return {name: s for name, s in self._all_shapes.items() if name not in buffers}

    @cached_property
    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        tensors = self.manifest.tensors.items()
        return {name: boxes[0].entry.global_shape for name, boxes in tensors}

    def tensor(self, state: str, name: str) -> torch.Tensor:
        """Tensor `name` in `state`, in its global shape, on the CPU. Raises as `tensors`."""
        return self.tensors(state, [name])[name]

    def tensors(self, state: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors in `state`, in their global shapes, on the CPU. Opens each file once.

        Raises UserError if there is no such state or name, CheckpointCorrupt if a file is not as it
        was written, CheckpointUnreadable if the storage fails.
        """
        found, requests = {}, []
        for name in names:
            if name not in self.manifest.tensors:
                need = "`checkpoint show` lists the tensors"
                raise UserError(f"{self.path}: no tensor {name!r}; {need}")
            states = self.manifest.tensors[name][0].unit.states
            if state not in states:
                raise UserError(f"{self.path}: {name}: no state {state!r}, it has {list(states)}")
            shape = self._all_shapes[name]
            found[name] = torch.empty(shape, dtype=states[state])
            entry = BoxEntry.of(Entry(name, shape, 0))
            requests.append(Request(state, entry, 0, found[name].view(-1)))
        self.read(requests)
        return found

    def fill(
        self,
        layouts: Sequence[Layout],
        states: Mapping[str, Sequence[torch.Tensor]],
        index: int,
        num_shards: int,
    ) -> None:
        """Load a rank's shards of a whole model in place, however units were grouped, padded and
        sharded in `save`.

        `states[state][u]` is shard number `index` of `num_shards` of the flat buffer with layout
        `layouts[u]`: 1-D, on any device. Other types are converted. Padding is not written. Raises
        UserError if the model has other tensors than the checkpoint, else as `tensors`.
        """
        layouts = [with_boxes(layout) for layout in layouts]
        for state in states:
            self._check_state(state)
        self.check_shapes(global_shapes(layouts))
        bounds = [layout.bounds(index, num_shards) for layout in layouts]
        self.read(
            [
                request
                for state, shards in states.items()
                for layout, (start, stop), shard in zip(layouts, bounds, shards, strict=True)
                for request in requests_of(state, layout, start, stop, shard)
            ]
        )

    def check_shapes(self, model: Mapping[str, tuple[int, ...]], is_all_of_it: bool = True) -> None:
        """Raise UserError unless a model has the same parameters, of the same global shapes.
        `is_all_of_it`: else the checkpoint may have more."""
        saved = self.shapes
        for name in (*model, *(saved if is_all_of_it else ())):
            if model.get(name) != saved.get(name):
                raise UserError(
                    f"{self.path}: {name}: {_shape_text(saved.get(name))} in the checkpoint, "
                    f"{_shape_text(model.get(name))} in the model"
                )

    def read(self, requests: Sequence[Request]) -> None:
        """Read elements of tensors, whatever boxes and shards hold them. Opens each file once.

        A tensor that the checkpoint has without the state, because it was frozen, is left as it is.
        Raises UserError for a state that no tensor has, else as `tensors`.
        """
        by_file: dict[tuple[int, int], list[Request]] = {}
        for request in requests:
            self._check_state(request.state)
            for found in self._files(request):
                requested = by_file.setdefault(found, [])
                if not requested or requested[-1] is not request:  # for another box of the tensor
                    requested.append(request)
        for number, index in sorted(by_file):
            self._read_file(number, index, by_file[number, index])
        for request in requests:
            if request.missing and self._holds(request):
                what = f"{request.state}/{request.entry.name}"
                raise CheckpointCorrupt(
                    f"{self.path}: {request.missing} elements of {what} are in no file, need all"
                )

    def _read_file(self, number: int, index: int, requests: Sequence[Request]) -> None:
        """Read what one file holds of these requests."""
        shard_set = self.manifest.sets[number]
        with closing(ShardFile(self.path, self.manifest, shard_set, index)) as file:
            self._read_slices(file, number, requests)

    def _read_slices(self, file: ShardFile, number: int, requests: Sequence[Request]) -> None:
        for request in requests:
            for box in self._boxes(number, request.entry.name):
                read_slices(file, box, request)

    def _check_state(self, state: str) -> None:
        if state not in (*self.manifest.states, BUFFER):
            raise UserError(f"{self.path}: no state {state!r}, it has {list(self.manifest.states)}")

    def _holds(self, request: Request) -> bool:
        return request.state in self.manifest.tensors[request.entry.name][0].unit.states

    def _boxes(self, number: int, name: str) -> list[BoxEntry]:
        """The boxes of a tensor in a set; query, key and value of one matrix, for example."""
        return [box.entry for box in self.manifest.tensors[name] if box.number == number]

    def _files(self, request: Request) -> Iterator[tuple[int, int]]:
        """The files, by set and shard, that hold elements of a request."""
        for stored in self.manifest.tensors[request.entry.name]:
            if request.state not in stored.unit.states:
                continue
            shards = self.manifest.sets[stored.number].num_shards
            for index in shards_with(stored, shards, request.regions):
                yield stored.number, index


def global_shapes(layouts: Iterable[Layout]) -> dict[str, tuple[int, ...]]:
    """The global shape of each parameter of units."""
    entries = (BoxEntry.of(entry) for layout in layouts for entry in layout.entries)
    return {entry.name: entry.global_shape for entry in entries}


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"shape {list(shape)}"


Load = Callable[[Checkpoint], None]
"""Reads this rank's part of an open checkpoint. It makes no collective call, because another rank
may be failing, and overwrites all that it sets, because it may be called for an older checkpoint
after one that turned out to be damaged."""

OpenNear = Callable[[Load, int], Checkpoint | None]
"""Loads a checkpoint that is not older than the step of one in the storage (0: none is there), on
all ranks; None without one."""


def open_newest(
    root: Path,
    load: Load,
    world: World,
    warn: Callable[[str], None],
    open_near: OpenNear = lambda load, step: None,
) -> Checkpoint | None:
    """Load the newest whole checkpoint in `root`; all ranks call it and get the same one. Returns
    None if there is no checkpoint. `warn` is called on rank 0 for each damaged checkpoint.
    `open_near` may know one that need not be read from the storage.

    Raises on all ranks: UserError if there are checkpoints and none is whole, because to start over
    in silence would waste them, or if one does not fit the model or was written by a later version;
    StorageFailed if the storage fails, because an older checkpoint would give up a whole one.
    """

    def list_names() -> str:
        try:
            return json.dumps([path.name for path in candidates(root)])
        except OSError as error:
            raise CheckpointUnreadable(f"{root}: {error.strerror}") from error

    refused = []
    for name in json.loads(world.broadcast_from_rank_0(list_names)):
        if (near := open_near(load, step_of(root / name) or 0)) is not None:
            return near
        checkpoint, problem = _try_to_load(root / name, load, world)
        if checkpoint is not None:
            return checkpoint
        refused.append(problem)
        if world.rank == 0:
            warn(f"checkpoint refused, trying the one before: {problem}")
    if (near := open_near(load, 0)) is not None:
        return near
    if refused:
        raise UserError(
            f"{root}: none of {len(refused)} checkpoints is whole: {'; '.join(refused)}; to start "
            "over, move them away or give another run.name"
        )
    return None


def load_checkpoint(path: Path, load: Load, world: World) -> Checkpoint:
    """Load the checkpoint at `path`; all ranks call it. Raises CheckpointCorrupt on all ranks if it
    is damaged, else as `open_newest`."""
    checkpoint, problem = _try_to_load(path, load, world)
    if checkpoint is None:
        raise CheckpointCorrupt(problem)
    return checkpoint


def _try_to_load(path: Path, load: Load, world: World) -> tuple[Checkpoint | None, str]:
    """The checkpoint, or None and how it is damaged. All ranks raise any other failure."""
    checkpoint: Checkpoint | None = None

    def open_share() -> None:
        nonlocal checkpoint
        checkpoint = open_checkpoint(path, world.rank, world.size)

    def load_share() -> None:
        assert checkpoint is not None
        load(checkpoint)

    problem = find_damage(open_share, world) or find_damage(load_share, world)
    return (None, problem) if problem else (checkpoint, "")


def find_damage(act: Callable[[], None], world: World) -> str | None:
    """Call `act` on all ranks. Returns the first rank's message if it found damage. All ranks raise
    other errors, as `World.run_on_all` does."""

    def find() -> str | None:
        try:
            act()
        except CheckpointCorrupt as error:
            return str(error)
        except OSError as error:
            line = f"{error.filename or 'storage'}: {error.strerror}"
            raise CheckpointUnreadable(line) from error
        return None

    return world.first_error(world.run_on_all(find))
