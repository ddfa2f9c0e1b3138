"""`megafrontier checkpoint list|show|verify PATH`."""

import json
from pathlib import Path
from typing import Any

from megafrontier.checkpoint.errors import CheckpointUnreadable
from megafrontier.checkpoint.folder import of_each, of_newest, step_of
from megafrontier.checkpoint.load import open_checkpoint, read_manifest
from megafrontier.checkpoint.manifest import DTYPE_NAMES, Manifest
from megafrontier.checkpoint.verify import VerifyReport, verify
from megafrontier.common.errors import UserError, print_error


def list_command(path: Path, as_json: bool) -> int:
    """Print step, size, date and state of every checkpoint. Returns 0, or 2 where one is not
    whole as far as can be told without reading it all."""
    rows = list(of_each(path, _row))
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            state = "whole" if row["whole"] else row["problem"]
            step = "?" if row["step"] is None else row["step"]
            print(f"{step:>10}  {row['gib']:>10.3f} GiB  {row['saved_at']:<25}  {state}")
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
    except (UserError, CheckpointUnreadable) as error:
        return row | {"whole": False, "problem": str(error)}
    return row | {"whole": True, "problem": None}


def show_command(path: Path, as_json: bool) -> int:
    """Print what one checkpoint holds (of several, the newest). Returns 0."""
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
        "pieces": manifest.pieces,
        "states": {state: DTYPE_NAMES[dtype] for state, dtype in manifest.states.items()},
        "files": [file.path for file in manifest.files],
        "rng": dict(manifest.rng),
        "extra": dict(manifest.extra),
        "parameters": sum(entry.numel for _, entry in manifest.tensors.values()),
        "config": dict(manifest.config),
        "tensors": tensors,
    }


def verify_command(path: Path, as_json: bool) -> int:
    """Read every byte of every checkpoint at `path`; print one line per problem on stderr.
    Returns 0, or 2 when anything is wrong."""
    reports = list(of_each(path, verify))
    if as_json:
        print(json.dumps([_report(report) for report in reports], indent=2))
    for report in reports:
        for problem in report.problems:
            print_error(f"megafrontier: {problem}")
        if report.whole and not as_json:
            gib = report.payload_bytes / 2**30
            print(f"{report.path}: whole, {report.files} files, {gib:.3f} GiB")
    return 0 if all(report.whole for report in reports) else 2


def _report(report: VerifyReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "whole": report.whole,
        "problems": list(report.problems),
        "files": report.files,
        "payload_bytes": report.payload_bytes,
        "seconds": round(report.seconds, 3),
    }
