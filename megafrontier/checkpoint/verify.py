"""Read every byte of a checkpoint and say all that is wrong with it."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megafrontier.checkpoint.errors import CheckpointUnreadable
from megafrontier.checkpoint.load import attached_problems, read_manifest
from megafrontier.checkpoint.manifest import Manifest, piece_file
from megafrontier.checkpoint.piece import PieceFile, Stored
from megafrontier.common.errors import UserError

UNSOUND = (UserError, CheckpointUnreadable)
Covered = list[tuple[tuple[str, str], int, int]]
"""(state, parameter), start and stop of slices that are sound."""


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found: one line per problem, each starting with the file's path."""

    path: Path
    problems: tuple[str, ...]
    files: int
    """Files read."""
    payload_bytes: int
    """Bytes of tensors read and found right."""
    seconds: float

    @property
    def whole(self) -> bool:
        return not self.problems


def verify(path: Path) -> VerifyReport:
    """Read all of the checkpoint at `path`: every checksum, and whether every element of every
    tensor in every state is there once. Raises UserError when there is no folder at `path`."""
    started = time.monotonic()
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder, need a checkpoint")
    try:
        manifest = read_manifest(path)
    except UNSOUND as error:
        return VerifyReport(path, (str(error),), 1, 0, time.monotonic() - started)
    problems = list(attached_problems(path, manifest))
    covered: Covered = []
    # Checksums and reads leave the interpreter lock, and parallel file systems want many readers.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for found, sound in pool.map(partial(_check_piece, path, manifest), range(manifest.pieces)):
            problems += found
            covered += sound
    problems += _coverage_problems(path, manifest, covered) if not problems else []
    read = sum((stop - start) * manifest.states[key[0]].itemsize for key, start, stop in covered)
    files = 1 + len(manifest.files) + manifest.pieces
    return VerifyReport(path, tuple(problems), files, read, time.monotonic() - started)


def _check_piece(path: Path, manifest: Manifest, piece: int) -> tuple[list[str], Covered]:
    """The problems of one piece's file and its sound slices."""
    problems: list[str] = []
    covered: Covered = []
    try:
        file = PieceFile(path, piece_file(piece), manifest, piece)
    except UNSOUND as error:
        return [str(error)], covered
    for key, slices in file.slices.items():
        for stored in slices:
            try:
                _read(file, stored)
                covered.append((key, stored.start, stored.stop))
            except UNSOUND as error:
                problems.append(str(error))
    file.close()
    return problems, covered


def _read(file: PieceFile, stored: Stored) -> None:
    file.read_into(stored, torch.empty(stored.stop - stored.start, dtype=stored.dtype))


def _coverage_problems(path: Path, manifest: Manifest, covered: Covered) -> Iterator[str]:
    """Elements that sound slices lack or hold twice."""
    ends = {(state, name): 0 for state in manifest.states for name in manifest.tensors}
    for key, start, stop in sorted(covered):
        if key not in ends:
            yield f"{path}: {'/'.join(key)}: in the pieces but not in the manifest"
        elif start != ends[key]:
            what = "missing" if start > ends[key] else "held twice"
            first, last = sorted((start, ends[key]))
            yield f"{path}: {'/'.join(key)}: elements {first} to {last} {what}"
        ends[key] = stop
    for (state, name), end in ends.items():
        if name in manifest.tensors and end != (numel := manifest.tensors[name][1].numel):
            yield f"{path}: {state}/{name}: ends at element {end}, need {numel}"
