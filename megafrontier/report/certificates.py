"""Rows of a report that say what the certificates in the run directories promise."""

import json
from collections.abc import Sequence
from typing import Any

from megafrontier.certify.certificate import FILE_NAME, describe_certificate
from megafrontier.report.read import Run


def certificate_rows(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Whether the certificate of each run is that of its config and of this code, and its promises
    by name. No rows if no run has one."""
    rows = {"certificate": [_state(run) for run in runs]}
    if not any(rows["certificate"]):
        return {}
    found = [_promises(run) for run in runs]
    for name in dict.fromkeys(name for promises in found for name in promises):
        rows[f"certificate: {name}"] = [promises.get(name, "") for promises in found]
    return rows


def _state(run: Run) -> str:
    newest = run.steps[-1]
    ranks = run.ranks(newest.get("tokens_per_second"), newest.get("tflops_per_device"))
    if run.config is None or ranks is None or not (run.directory / FILE_NAME).exists():
        return ""
    return describe_certificate(run.directory, run.config, ranks).removeprefix("certificate: ")


def _promises(run: Run) -> dict[str, str]:
    """`proved, 1.2e-07 of 1e-05` by promise; nothing of a file that is no certificate."""
    try:
        promises = json.loads((run.directory / FILE_NAME).read_text())["promises"]
        return {promise["promise"]: _cell(promise) for promise in promises}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _cell(promise: dict[str, Any]) -> str:
    figure, bound = promise["figure"], promise["bound"]
    numbers = "" if figure is None else f", {figure:.3g}"
    return f"{promise['status']}{numbers}" + (f" of {bound:.3g}" if bound is not None else "")
