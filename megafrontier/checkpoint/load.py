"""Open a checkpoint and read any part of any tensor of it, on any number of ranks.

Nothing here depends on how the reader cuts its tensors: it asks for elements of global tensors,
and only the files and slices that hold them are read, each checked against its checksum.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megafrontier.checkpoint.checksum import crc32_hex
from megafrontier.checkpoint.errors import CheckpointCorrupt, not_read
from megafrontier.checkpoint.folder import is_folder
from megafrontier.checkpoint.manifest import FILE_NAME, Attached, Manifest, piece_file
from megafrontier.checkpoint.piece import PieceFile, file_size
from megafrontier.common.errors import UserError
from megafrontier.partition.layout import Layout

OPEN_FILES = 16
"""Piece files held open: a reader that goes through a tensor in steps opens each once."""


def open_checkpoint(path: Path, rank: int = 0, size: int = 1) -> "Checkpoint":
    """Open the checkpoint at `path` after checking that its manifest is sound and that all its
    files are there in full length; of `size` ranks each looks at every size-th file.

    Raises CheckpointCorrupt naming the file that is not right, UserError when there is no folder
    at `path` or it was written by a later version.
    """
    path = Path(path)
    try:
        is_there = is_folder(path)
    except OSError as error:
        raise not_read(path, error) from error
    if not is_there:
        raise UserError(f"{path}: no such folder, need a checkpoint")
    manifest = read_manifest(path)
    for name, need in _needed_files(manifest, rank, size):
        _check_size(path / name, need)
    return Checkpoint(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, checked. Raises CheckpointCorrupt when there is
    none or it is damaged, CheckpointUnreadable when the storage fails, UserError when it was
    written by a later version."""
    try:
        text = (path / FILE_NAME).read_bytes()
    except FileNotFoundError as error:
        reason = f"{path}: no {FILE_NAME}: half-written, or not a megafrontier checkpoint"
        raise CheckpointCorrupt(reason) from error
    except OSError as error:
        raise not_read(path / FILE_NAME, error) from error
    return Manifest.decode(text, path / FILE_NAME)


def attached_problems(path: Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the files beside the pieces of the checkpoint at `path`, by all of their
    bytes: a line for each that is not as it was written."""
    found = (_attached_problem(path, file) for file in manifest.files)
    return (problem for problem in found if problem is not None)


def _attached_problem(path: Path, file: Attached) -> str | None:
    try:
        data = (path / file.path).read_bytes()
    except OSError as error:
        return f"{path / file.path}: missing: {error.strerror}"
    if len(data) != file.size:
        return f"{path / file.path}: {len(data)} bytes, need {file.size}: cut short or grown"
    if crc32_hex(data) != file.crc32:
        return f"{path / file.path}: checksum does not match: changed since it was written"
    return None


def _needed_files(manifest: Manifest, rank: int, size: int) -> Iterator[tuple[str, int]]:
    if rank == 0:
        yield from ((file.path, file.size) for file in manifest.files)
    for piece in range(rank, manifest.pieces, size):
        yield piece_file(piece), file_size(manifest, piece)


def _check_size(path: Path, need: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise not_read(path, error) from error
    if found != need:
        raise CheckpointCorrupt(f"{path}: {found} bytes, need {need}: cut short or grown")


@dataclass(frozen=True)
class _Want:
    """Elements [start, start + out.numel()) of a parameter in one state, to be put into `out`."""

    state: str
    parameter: str
    start: int
    out: torch.Tensor


class Checkpoint:
    """An open checkpoint: its folder, its manifest, and its tensors by name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Use `open_checkpoint`, which checks first; this to look at the manifest alone."""
        self.path = path
        self.manifest = manifest
        self._files: OrderedDict[int, PieceFile] = OrderedDict()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every parameter, by name."""
        return {name: entry.shape for name, (_, entry) in self.manifest.tensors.items()}

    def read(self, state: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop), row-major, of parameter `name` in `state`: 1-D, on the CPU.

        Raises UserError for a state, name or range that is not there, CheckpointCorrupt for a
        file that is not as it was written.
        """
        numel = prod(self._shape(state, name))
        if not 0 <= start <= stop <= numel:
            raise UserError(f"{self.path}: {name}: elements {start} to {stop}, need 0 to {numel}")
        out = torch.empty(stop - start, dtype=self.manifest.states[state])
        self._copy([_Want(state, name, start, out)])
        return out

    def tensor(self, state: str, name: str) -> torch.Tensor:
        """All of parameter `name` in `state`, in its global shape, on the CPU. Raises as `read`."""
        return self.tensors(state, [name])[name]

    def tensors(self, state: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Whole parameters in `state`, in their global shapes, on the CPU; each file is opened
        once for all of them. Raises as `read`."""
        shapes = {name: self._shape(state, name) for name in names}
        dtype = self.manifest.states[state]
        found = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self._copy([_Want(state, name, 0, out.view(-1)) for name, out in found.items()])
        return found

    def fill(
        self,
        layouts: Sequence[Layout],
        states: Mapping[str, Sequence[torch.Tensor]],
        piece: int,
        pieces: int,
    ) -> None:
        """Load a rank's shards in place, however the units were grouped, padded and cut in save.

        `states[state][u]` is piece number `piece` of `pieces` equal ones of the flat buffer that
        `layouts[u]` describes: 1-D, on any device; other types are converted. Padding is left as
        it is. Raises UserError when the model's tensors are not the checkpoint's,
        CheckpointCorrupt for a file that is not as it was written.
        """
        self.check_shapes({entry.name: entry.shape for unit in layouts for entry in unit.entries})
        for state in states:
            self._check_state(state)
        self._copy(
            [
                _Want(state, entry.name, first, shard[at : at + last - first])
                for state, shards in states.items()
                for unit, shard in zip(layouts, shards, strict=True)
                for entry, first, last, at in unit.in_shard(piece, pieces)
            ]
        )

    def close(self) -> None:
        """Close the files that reading has opened; further reading opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def _shape(self, state: str, name: str) -> tuple[int, ...]:
        self._check_state(state)
        if name not in self.manifest.tensors:
            raise UserError(
                f"{self.path}: no tensor {name!r}; `checkpoint show` lists those it has"
            )
        return self.manifest.tensors[name][1].shape

    def _check_state(self, state: str) -> None:
        if state not in self.manifest.states:
            raise UserError(f"{self.path}: no state {state!r}, it has {list(self.manifest.states)}")

    def check_shapes(self, model: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError for the first tensor of which a model and this have not the same."""
        saved = self.shapes
        for name in (*model, *saved):
            if model.get(name) != saved.get(name):
                raise UserError(
                    f"{self.path}: {name}: {_shape_text(saved.get(name))} in the checkpoint, "
                    f"{_shape_text(model.get(name))} in the model"
                )

    def _copy(self, wants: Sequence[_Want]) -> None:
        """Read what is wanted file by file, so that each is opened once, in the file's order."""
        by_piece: dict[int, list[_Want]] = {}
        for want in wants:
            for piece, part in self._by_piece(want):
                by_piece.setdefault(piece, []).append(part)
        for piece in sorted(by_piece):
            file = self._file(piece)
            for want in by_piece[piece]:
                _copy_slices(file, want)

    def _by_piece(self, want: _Want) -> Iterator[tuple[int, _Want]]:
        """The parts of `want` that lie in each piece."""
        unit, entry = self.manifest.tensors[want.parameter]
        length = unit.numel // self.manifest.pieces
        begin = entry.offset + want.start
        end = begin + want.out.numel()
        at = begin
        while at < end:
            piece = at // length
            stop = min(end, (piece + 1) * length)
            out = want.out[at - begin : stop - begin]
            yield piece, _Want(want.state, want.parameter, at - entry.offset, out)
            at = stop

    def _file(self, piece: int) -> PieceFile:
        file = self._files.pop(piece, None)
        if file is None:
            file = PieceFile(self.path, piece_file(piece), self.manifest, piece)
        self._files[piece] = file
        if len(self._files) > OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return file


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"shape {list(shape)}"


def _copy_slices(file: PieceFile, want: _Want) -> None:
    """Copy what the slices of one file have of `want`, which must be all of it."""
    done, stop = want.start, want.start + want.out.numel()
    for stored in file.slices.get((want.state, want.parameter), ()):
        first, last = max(done, stored.start), min(stop, stored.stop)
        if first >= last or first > done:
            continue
        out = want.out[first - want.start : last - want.start]
        if (first, last) == (stored.start, stored.stop) and _takes_bytes(out, stored.dtype):
            file.read_into(stored, out)
        else:
            # The checksum is the whole slice's, so all of it is read for any part of it.
            whole = torch.empty(stored.stop - stored.start, dtype=stored.dtype)
            file.read_into(stored, whole)
            out.copy_(whole[first - stored.start : last - stored.start])
        done = last
    if done != stop:
        raise CheckpointCorrupt(
            f"{file.path}: no element {done} of {want.state}/{want.parameter}, though it must have"
        )


def _takes_bytes(out: torch.Tensor, dtype: torch.dtype) -> bool:
    return out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
