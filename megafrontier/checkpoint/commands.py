"""`megafrontier checkpoint list|show|verify PATH`."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.format import CheckpointUnreadable, Manifest
from megafrontier.checkpoint.load import (
    attached_problems,
    check_size,
    open_checkpoint,
    read_manifest,
)
from megafrontier.checkpoint.sets import DTYPE_NAMES, ShardSet
from megafrontier.checkpoint.shard_file import ShardFile, file_size, slices_of
from megafrontier.common.checkpoints import of_each, of_newest, step_of
from megafrontier.common.errors import UserError, print_error
from megafrontier.common.progress import track

NOT_WHOLE = (UserError, CheckpointUnreadable)


def list_command(path: Path, as_json: bool) -> int:
    """Print step, size, date and condition of every checkpoint. Returns 0, or 2 if one is not whole
    as far as can be told without reading all of it."""
    rows = of_each(path, _row)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            condition = "whole" if row["whole"] else row["problem"]
            step = "?" if row["step"] is None else row["step"]
            print(f"{step:>10}  {row['gib']:>10.3f} GiB  {row['saved_at']:<25}  {condition}")
    broken = sum(not row["whole"] for row in rows)
    if broken:
        print_error(f"megafrontier: {path}: {broken} of {len(rows)} are not whole")
    return 2 if broken else 0


def _row(path: Path) -> dict[str, Any]:
    row = {"path": str(path), "step": step_of(path), "gib": 0.0, "saved_at": "?"}
    try:
        manifest = read_manifest(path)
        row |= {"step": manifest.step, "saved_at": manifest.saved_at}
        row |= {"gib": round(manifest.payload_bytes / 2**30, 6)}
        open_checkpoint(path)
    except NOT_WHOLE as error:
        return row | {"whole": False, "problem": str(error)}
    return row | {"whole": True, "problem": None}


def show_command(path: Path, as_json: bool) -> int:
    """Print what one checkpoint holds, the newest if there are several. Returns 0."""
    facts = of_newest(path, lambda chosen: _facts(chosen, read_manifest(chosen)))
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    tensors, config = facts.pop("tensors"), facts.pop("config")
    for key, value in facts.items():
        print(f"{key + ':':<12} {value}")
    for key, value in config.items():
        print(f"{'config:':<12} {key}: {json.dumps(value)}")
    for name, shape in tensors.items():
        print(f"{'tensor:':<12} {name} {shape}")
    return 0


def _facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    tensors = {name: list(boxes[0].entry.global_shape) for name, boxes in manifest.tensors.items()}
    buffers = set(manifest.buffers)
    return {
        "path": str(path),
        "step": manifest.step,
        "tokens": manifest.tokens,
        "saved_at": manifest.saved_at,
        "gib": round(manifest.payload_bytes / 2**30, 6),
        "pieces": manifest.num_shards,
        "states": {state: DTYPE_NAMES[dtype] for state, dtype in manifest.states.items()},
        "files": [file.path for file in manifest.files],
        "rng": dict(manifest.rng),
        "extra": dict(manifest.extra),
        "parameters": sum(prod(tensors[name]) for name in tensors if name not in buffers),
        "config": dict(manifest.config),
        "tensors": tensors,
    }


def verify_command(path: Path, as_json: bool) -> int:
    """Read every byte of every checkpoint at `path`, and print a line for each problem on stderr.
    Returns 0, or 2 if there is a problem."""
    reports = of_each(path, verify)
    if as_json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    for report in reports:
        for problem in report.problems:
            print_error(f"megafrontier: {problem}")
        if report.whole and not as_json:
            gib = report.payload_bytes / 2**30
            print(f"{report.path}: whole, {report.files} files, {gib:.3f} GiB")
    return 0 if all(report.whole for report in reports) else 2


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found. Each problem is a line that starts with the path of a file."""

    path: str
    whole: bool
    problems: list[str]
    files: int
    """Files read."""
    payload_bytes: int
    """Bytes of tensors that are right."""
    seconds: float


def verify(path: Path) -> VerifyReport:
    """Read all of the checkpoint at `path`: whether every slice of every shard is there and has its
    checksum."""
    started = time.monotonic()
    files, payload_bytes = 1, 0
    try:
        manifest = read_manifest(path)
    except NOT_WHOLE as error:
        problems = [str(error)]
    else:
        problems, payload_bytes = _check_files(path, manifest)
        files += len(manifest.files) + manifest.num_shards
    seconds = round(time.monotonic() - started, 3)
    return VerifyReport(str(path), not problems, problems, files, payload_bytes, seconds)


def _check_files(path: Path, manifest: Manifest) -> tuple[list[str], int]:
    """The problems of all files beside the manifest, and the bytes of tensors that are right."""
    problems = list(attached_problems(path, manifest))
    payload_bytes = 0
    # Threads help: reads and checksums release Python's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        check = partial(_check_shard, path, manifest)
        files = [(which, index) for which in manifest.sets for index in range(which.num_shards)]
        checked = pool.map(lambda file: check(*file), files)
        with track(f"verify {path.name}", checked, len(files), "files") as shown:
            for found, nbytes in shown:
                problems += found
                payload_bytes += nbytes
    return problems, payload_bytes


def _check_shard(
    path: Path, manifest: Manifest, shard_set: ShardSet, index: int
) -> tuple[list[str], int]:
    """The problems of one shard's file, and the bytes of its slices that are right."""
    problems: list[str] = []
    nbytes = 0
    try:
        file = ShardFile(path, manifest, shard_set, index)
    except NOT_WHOLE as error:
        return [str(error)], 0
    slices = slices_of(shard_set, index, manifest.slice_elements)
    needed = {(part.state, part.parameter, part.start) for part in slices}
    for (state, parameter), found in file.slices.items():
        for stored in found:
            needed.discard((state, parameter, stored.start))
            values = torch.empty(stored.stop - stored.start, dtype=stored.dtype)
            try:
                file.read_into(stored, values)
                nbytes += values.nbytes
            except NOT_WHOLE as error:
                problems.append(str(error))
    file.close()
    problems += [f"{file.path}: {'/'.join(map(str, key))}: missing" for key in sorted(needed)[:1]]
    if not problems:  # a file may also be longer than opening allows
        try:
            check_size(path, shard_set.file(index), file_size(manifest, shard_set, index))
        except NOT_WHOLE as error:
            problems.append(str(error))
    return problems, nbytes
