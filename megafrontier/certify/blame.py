"""Which axis breaks a promise, found by taking axes away one by one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megafrontier.certify.certificate import Finding
from megafrontier.certify.miniature import Miniature
from megafrontier.certify.promises import Laboratory, Trial, try_configured, try_equality
from megafrontier.certify.runs import TrialFailed
from megafrontier.common.errors import UserError
from megafrontier.config import save_config


def blame(
    findings: Iterable[Finding],
    miniatures: Sequence[Miniature],
    laboratory: Laboratory,
    broken: Path,
) -> Iterator[Finding]:
    """The findings, with the cause of the first broken promise of each mesh and the command that
    shows it alone. Its configuration is written to BROKEN-N.yaml."""
    meshes = {str(m.mesh): m for m in miniatures}
    blamed: set[str] = set()
    for finding in findings:
        if finding.status != "broken" or finding.mesh not in meshes or finding.mesh in blamed:
            yield finding
            continue
        blamed.add(finding.mesh)
        path = broken.with_name(f"{broken.name}-{len(blamed)}.yaml")
        yield _blamed(finding, meshes[finding.mesh], laboratory, path)


def _blamed(finding: Finding, miniature: Miniature, laboratory: Laboratory, path: Path) -> Finding:
    needed = []
    for segment in miniature.mesh.segments:
        smaller = miniature.mesh.without(segment)
        try:
            without = miniature.on(smaller)
        except UserError:  # the wires or the placement need it
            needed.append(segment)
            continue
        if _is_broken(finding.promise, without, laboratory):
            miniature = without
        else:
            needed.append(segment)
    config = miniature.config
    config.run.directory = "runs/miniature"
    config.log.callbacks = []
    path.parent.mkdir(parents=True, exist_ok=True)
    save_config(config, path)
    cause = f"holds without {' or without '.join(map(str, needed))}" if needed else "on one rank"
    command = f"megafrontier certify {path} --nproc {miniature.mesh.ranks}"
    return replace(finding, cause=cause, command=command)


def _is_broken(promise: str, miniature: Miniature, laboratory: Laboratory) -> bool:
    trials: tuple[Trial, ...] = (try_equality, try_configured)
    for trial in trials:
        try:
            found = {f.promise: f.status for f in trial(laboratory, miniature)}
        except TrialFailed:
            return promise.startswith("runs end well")
        if promise in found:
            return found[promise] == "broken"
    return False
