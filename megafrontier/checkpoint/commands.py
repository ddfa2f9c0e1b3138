"""`megafrontier checkpoint list|show|verify PATH`."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.folder import of_each, of_newest, step_of
from megafrontier.checkpoint.format import DTYPE_NAMES, CheckpointUnreadable, Manifest, shard_path
from megafrontier.checkpoint.load import attached_problems, open_checkpoint, read_manifest
from megafrontier.checkpoint.shard_file import ShardFile
from megafrontier.common.errors import UserError, print_error

NOT_WHOLE = (UserError, CheckpointUnreadable)
CheckedSlices = list[tuple[tuple[str, str], int, int]]
"""(state, parameter), start and stop of slices that are right."""


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
    tensors = {name: list(entry.shape) for name, (_, entry) in manifest.tensors.items()}
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
        "parameters": sum(entry.numel for _, entry in manifest.tensors.values()),
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
    """Read all of the checkpoint at `path`: whether every checksum is right, and whether every
    element of every tensor in every state is there once."""
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
    checked: CheckedSlices = []
    # Threads help: reads and checksums release Python's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        check = partial(_check_shard, path, manifest)
        for found, right in pool.map(check, range(manifest.num_shards)):
            problems += found
            checked += right
    if not problems:
        problems = list(_coverage_problems(path, manifest, checked))
    sizes = ((stop - start) * manifest.states[key[0]].itemsize for key, start, stop in checked)
    return problems, sum(sizes)


def _check_shard(path: Path, manifest: Manifest, index: int) -> tuple[list[str], CheckedSlices]:
    """The problems of one shard's file, and its slices that are right."""
    problems: list[str] = []
    checked: CheckedSlices = []
    try:
        file = ShardFile(path, shard_path(index), manifest, index)
    except NOT_WHOLE as error:
        return [str(error)], checked
    for key, slices in file.slices.items():
        for stored in slices:
            try:
                file.read_into(stored, torch.empty(stored.stop - stored.start, dtype=stored.dtype))
                checked.append((key, stored.start, stored.stop))
            except NOT_WHOLE as error:
                problems.append(str(error))
    file.close()
    return problems, checked


def _coverage_problems(path: Path, manifest: Manifest, checked: CheckedSlices) -> Iterator[str]:
    """Elements that no slice holds, or two slices."""
    ends = {(state, name): 0 for state in manifest.states for name in manifest.tensors}
    for key, start, stop in sorted(checked):
        if key not in ends:
            yield f"{path}: {'/'.join(key)}: in the shard files but not in the manifest"
        elif start != ends[key]:
            what = "missing" if start > ends[key] else "held twice"
            first, last = sorted((start, ends[key]))
            yield f"{path}: {'/'.join(key)}: elements {first} to {last} {what}"
        ends[key] = stop
    for (state, name), end in ends.items():
        if name in manifest.tensors and end != (numel := manifest.tensors[name][1].numel):
            yield f"{path}: {state}/{name}: ends at element {end}, need {numel}"
