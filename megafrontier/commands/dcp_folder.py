"""Read a folder of torch.distributed.checkpoint (DCP) that anyone may have written.

Note [Folders that are not trusted]
`.metadata` is a pickle, and torch's own reader calls whatever that names. Here an unpickler knows
DCP's metadata classes alone, and what it returns is checked before any file is opened or memory is
allocated. The data files hold one `torch.save` zip archive for each chunk of a tensor. They are
loaded with `weights_only`, and the CRC-32 of each archive member is compared, which torch does not.
Of objects that name other classes, such as Megatron's, only the attributes are kept.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.serialization import _get_layout, get_unsafe_globals_in_checkpoint, safe_globals

from megafrontier.checkpoint.boxes import Box, Region, copy_common, count_common, regions
from megafrontier.checkpoint.sets import DTYPE_NAMES
from megafrontier.common.errors import FatalError, UserError, as_fatal_error, need
from megafrontier.config.building import shown

_RECORDS: tuple[type, ...] = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    SavePlan,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    _StorageInfo,
)
_ENUMS: tuple[type, ...] = (_MEM_FORMAT_ENCODING, WriteItemType)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(known.__module__, known.__name__): known for known in (*_RECORDS, *_ENUMS)},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if type(dtype) is torch.dtype},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    # The folder that the checkpoint was written to, which is not used.
    **{
        (module, f"{kind}Path"): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
    },
}
"""The globals that `.metadata` may name. None of them runs code that the pickle chooses."""


class Inert:
    """In place of an object whose class is not loaded: its arguments, and its attributes."""

    def __new__(cls, *args: Any) -> "Inert":
        made = object.__new__(cls)
        made.__dict__["arguments"] = args
        return made

    def __init__(self, *args: Any) -> None:
        pass


def _inert(name: str) -> type[Inert]:
    """A class in place of the one with this name."""
    return type(name.rpartition(".")[2], (Inert,), {})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):
            return _inert(name)
        known = _KNOWN.get((module, name))
        fits = "need classes of torch's DCP metadata alone"
        need(known is not None, "names", f"{module}.{name}", fits)
        # A pickle can set attributes of a class: not of the real one.
        return type(name, (known,), {}) if known in _RECORDS else known


@dataclass(frozen=True)
class _Archive:
    """Where the `torch.save` archive of a chunk or an object is: bytes of a file of the folder."""

    path: str
    start: int
    length: int


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    archive: _Archive


@dataclass(frozen=True)
class DCPTensor:
    """A tensor of a DCP checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def is_flattened(self, shape: Sequence[int]) -> bool:
        """Whether it holds a tensor of `shape` as [*grid, n]: a grid of equal boxes of the tensor,
        each flattened to n elements (Megatron's fully_sharded_model_space)."""
        *grid, size = self.shape or (0,)
        if len(grid) != len(shape) or not all(grid):
            return False
        fits = all(whole % parts == 0 for whole, parts in zip(shape, grid, strict=True))
        return fits and size == prod(shape) // prod(grid)


class DCPFolder:
    """An open DCP checkpoint (Note [Folders that are not trusted]).

    tensors: by key of the flattened state dict.
    objects: keys of what is no tensor.
    """

    def __init__(self, folder: Path, option: str = "--dcp") -> None:
        """`option`: the one that names the folder, for errors. Raises UserError with the file or
        key if the folder is no sound DCP checkpoint, StorageFailed if it cannot be read."""
        self._folder, self._sizes = folder, dict[str, int]()
        self._where = f"{option} {folder}"
        metadata = self._unpickle(folder / ".metadata")
        entries = _field(metadata, "state_dict_metadata")
        places = _field(metadata, "storage_data")
        if not (isinstance(entries, dict) and isinstance(places, dict)):
            raise UserError(f"{self._where}/.metadata: no metadata of a checkpoint, need torch's")
        self._check_keys(entries, _field(metadata, "planner_data"))
        self._places = {
            (_field(index, "fqn"), _field(index, "offset")): place
            for index, place in places.items()
        }
        self.tensors = {
            key: self._tensor(key, entry)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = {key for key in entries if key not in self.tensors}
        size, available = sum(t.nbytes for t in self.tensors.values()), sum(self._sizes.values())
        fits = f"need at most the {available} of its files"
        need(size <= available, self._where, f"tensors of {size} bytes", fits)

    def read(
        self,
        key: str,
        out: torch.Tensor,
        box: Box | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Read a tensor, or a box of it, into `out`, contiguous, of that shape and any type.

        shape: the tensor's, if it is stored in flattened parts: `DCPTensor.is_flattened`. Raises as
        the constructor.
        """
        tensor, values = self.tensors[key], out.view(-1)
        wanted = [_region(box or tuple((0, size) for size in shape or tensor.shape))]
        is_read = torch.zeros(values.shape, dtype=torch.bool)
        for chunk in tensor.chunks:
            with self._refused(shown(key)):
                held = _held(chunk) if shape is None else _flattened(chunk, tensor.shape, shape)
            if count_common(held, wanted):
                value = self._chunk_values(key, tensor, chunk)
                copy_common(value, held, values, wanted)
                copy_common(torch.ones(value.shape, dtype=torch.bool), held, is_read, wanted)
        missing = int((~is_read).sum())
        fits = "need all elements"
        need(not missing, f"{self._where}: {key}", f"{missing} elements missing", fits)

    def _chunk_values(self, key: str, tensor: DCPTensor, chunk: _Chunk) -> torch.Tensor:
        """The elements of a chunk [n]."""
        value = self._load(key, chunk.archive)
        is_chunk = (
            isinstance(value, torch.Tensor)
            and tuple(value.shape) == chunk.sizes
            and value.dtype == tensor.dtype
            and value.layout == torch.strided
            and value.device.type == "cpu"
        )
        fits = f"need a tensor {list(chunk.sizes)} of {tensor.dtype}"
        need(is_chunk, f"{self._where}: {key}", f"a chunk is {_kind(value)}", fits)
        found: torch.Tensor = value.reshape(-1)
        return found

    def number(self, key: str) -> float | None:
        """The number that is stored under `key`, as a tensor of one element or as an object; None
        if there is no such key. Raises as the constructor."""
        if key in self.tensors:
            shape = self.tensors[key].shape
            need(prod(shape) == 1, f"{self._where}: {key}", list(shape), "need a number")
            out = torch.empty(shape, dtype=torch.float64)
            self.read(key, out)
            return out.item()
        if key not in self.objects:
            return None
        value = self.object(key)
        is_number = isinstance(value, int | float)
        need(is_number, f"{self._where}: {key}", _kind(value), "need a number")
        return float(value)

    def object(self, key: str) -> Any:
        """The object that is stored under `key`, with `Inert` objects for what torch does not know
        to be safe. Raises as the constructor."""
        with self._refused(shown(key)):
            archive = self._archive(key, None)
        return self._load(key, archive)

    def file(self, name: str) -> Any:
        """As `object`, of a file that `torch.save` wrote beside the checkpoint."""
        with self._refused(name):
            archive = _Archive(name, 0, self._size(name))
        return self._load("content", archive)

    def _unpickle(self, path: Path) -> Any:
        # The open of a pipe would wait for ever.
        need(path.is_file(), self._where, "no file .metadata", "need a DCP checkpoint")
        with self._refused(path.name), path.open("rb") as file:
            return _Unpickler(file).load()

    @contextmanager
    def _refused(self, place: str) -> Iterator[None]:
        """Turn whatever a malformed pickle or archive raises into one line."""
        try:
            yield
        except FatalError as error:
            raise UserError(f"{self._where}: {place}: {error}") from error
        except OSError as error:
            line = f"{self._where}: {place}: {error.strerror}, need a file to read"
            raise as_fatal_error(error, line) from error
        except Exception as error:
            problem = shown(f"{type(error).__name__}: {error}")
            fits = "need it as torch wrote it"
            raise UserError(f"{self._where}: {place}: {problem}, {fits}") from error

    def _check_keys(self, entries: Mapping[Any, Any], paths: Any) -> None:
        """Compare each key with its path in the state dict, if there is one. `.metadata` has no
        checksum, and a damaged name would be that of another tensor."""
        if not isinstance(paths, dict) or not paths:
            return
        for key in (*entries, *paths):
            path = paths.get(key)
            is_path = isinstance(path, tuple) and ".".join(map(str, path)) == key
            fits = f"but its path is {shown(path)}, need the same"
            need(is_path and key in entries, f"{self._where}: .metadata", shown(key), fits)

    def _tensor(self, key: Any, entry: TensorStorageMetadata) -> DCPTensor:
        with self._refused(shown(key)):
            need(isinstance(key, str), "key", key, "need text")
            dtype = _field(_field(entry, "properties"), "dtype")
            need(dtype in DTYPE_NAMES, "type", dtype, f"need one of {list(DTYPE_NAMES.values())}")
            shape = _sizes(_field(entry, "size"))
            chunks = _field(entry, "chunks")
            need(isinstance(chunks, list), "chunks", _kind(chunks), "need a list")
            found = (self._chunk(key, shape, chunk) for chunk in chunks)
            return DCPTensor(dtype, shape, tuple(found))

    def _chunk(self, key: str, shape: tuple[int, ...], chunk: Any) -> _Chunk:
        offsets = _sizes(_field(chunk, "offsets"))
        sizes = _sizes(_field(chunk, "sizes"))
        is_inside = len(offsets) == len(sizes) == len(shape) and all(
            first + size <= whole for first, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        need(is_inside, "chunk", f"{list(sizes)} at {list(offsets)}", f"need it in {list(shape)}")
        return _Chunk(offsets, sizes, self._archive(key, torch.Size(offsets)))

    def _archive(self, key: str, offset: torch.Size | None) -> _Archive:
        """Where a chunk or object is, after checking that its file has these bytes."""
        place = self._places.get((key, offset))
        path, start, length = (
            _field(place, name) for name in ("relative_path", "offset", "length")
        )
        need(isinstance(path, str), "file", path, "need one in the metadata")
        transforms = _field(place, "transform_descriptors")
        need(not transforms, "transforms", transforms, "need none, such as no compression")
        is_span = type(start) is type(length) is int and start >= 0 and length >= 0
        need(is_span, "bytes", f"{start} + {length}", "need two numbers of at least 0")
        size = self._size(path)
        fits = f"need at most the {size} of {path}"
        need(start + length <= size, "bytes", f"{start} to {start + length}", fits)
        return _Archive(path, start, length)

    def _size(self, path: str) -> int:
        """Bytes of a file in the folder."""
        if path not in self._sizes:
            pure = PurePosixPath(path)
            is_inside = not pure.is_absolute() and ".." not in pure.parts
            need(is_inside, "file", shown(path), "need one in the folder")
            is_file = (self._folder / path).is_file()
            need(is_file, "file", shown(path), "which is missing or no file, need all")
            self._sizes[path] = (self._folder / path).stat().st_size
        return self._sizes[path]

    def _load(self, key: str, archive: _Archive) -> Any:
        """The value of an archive."""
        with self._refused(f"{archive.path}: {shown(key)}"):
            with (self._folder / archive.path).open("rb") as file:
                file.seek(archive.start)
                data = BytesIO(file.read(archive.length))
            _check_archive(data)
            return _load_safely(data)


def _load_safely(data: BytesIO) -> Any:
    """What an archive holds. No class or function that it names is called but torch's safe ones."""
    data.seek(0)
    unknown = get_unsafe_globals_in_checkpoint(data)
    data.seek(0)
    with safe_globals([(_inert(name), name) for name in unknown]):
        return torch.load(data, map_location="cpu", weights_only=True)


def _region(box: Box) -> Region:
    """A box whose elements follow one another. A number is a box of one element."""
    return Region(box or ((0, 1),), 0)


def _held(chunk: _Chunk) -> list[Region]:
    spans = zip(chunk.offsets, chunk.sizes, strict=True)
    return [_region(tuple((first, first + size) for first, size in spans))]


def _flattened(chunk: _Chunk, grid: Sequence[int], shape: Sequence[int]) -> list[Region]:
    """The regions of a tensor of `shape` that a chunk has, if it is stored as [*grid, n]: each part
    of the grid is a box of the tensor, flattened."""
    sizes = [size // parts for size, parts in zip(shape, grid[:-1], strict=True)]
    *cell, first = chunk.offsets
    is_in_one = all(size == 1 for size in chunk.sizes[:-1])
    need(is_in_one, "chunk", list(chunk.sizes), f"need it in one part of {list(grid)}")
    box = tuple((at * size, at * size + size) for at, size in zip(cell, sizes, strict=True))
    return regions(box, first, first + chunk.sizes[-1])


def _check_archive(data: BytesIO) -> None:
    """Raise UserError, or what zipfile raises, unless all bytes are those that were written."""
    with zipfile.ZipFile(data) as archive:
        members = archive.infolist()
        # torch never compresses, and a bomb would.
        is_plain = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        need(is_plain, "archive", "compressed", "need it as torch wrote it")
        # With torch.serialization.set_crc32_options(False) there are no checksums.
        if any(member.CRC for member in members):
            damaged = archive.testzip()
            need(damaged is None, f"checksum of {damaged}", "does not match", "need it as written")


def _field(record: Any, name: str) -> Any:
    """An attribute, which a pickle may have left out."""
    return getattr(record, name, None)


def _sizes(value: Any) -> tuple[int, ...]:
    is_sizes = isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in value)
    need(is_sizes, "sizes", shown(value), "need numbers of at least 0")
    return tuple(value)


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"{list(value.shape)} of {value.dtype}" if is_tensor else type(value).__name__
