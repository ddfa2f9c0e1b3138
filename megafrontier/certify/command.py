"""`megafrontier certify`: try the promises of a layout on small copies of it, here and now."""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from megafrontier.certify.blame import blame
from megafrontier.certify.certificate import (
    FILE_NAME,
    Certificate,
    Finding,
    hash_of_code,
    hash_of_config,
    versions,
)
from megafrontier.certify.miniature import Miniature, make_miniatures
from megafrontier.certify.promises import (
    Laboratory,
    Trial,
    try_configured,
    try_dropout,
    try_equality,
    try_export,
    try_reference,
)
from megafrontier.certify.runs import ForkedBody, TrialFailed, write_corpora
from megafrontier.certify.scale import read_scale, write_scale
from megafrontier.certify.segments import MOST_RANKS
from megafrontier.common.errors import need
from megafrontier.common.progress import Progress
from megafrontier.config import Config, load_config, load_machine
from megafrontier.launch.local import import_early
from megafrontier.plan.footprint import GIB
from megafrontier.plan.refuse import check_layout
from megafrontier.plan.resolve import RunPlan
from megafrontier.planner.auto import choose_layout
from megafrontier.planner.table import ranks_per_node

BROKEN = 4
"""The exit code if a promise is broken."""
RANK_GIB = 0.5
"""Memory of one small rank."""
SCALE_SECONDS = 300.0


def certify_command(
    path: str,
    overrides: Sequence[str],
    nodes: int | None,
    nproc: int | None,
    minutes: float | None = None,
    out: Path | None = None,
) -> Certificate:
    """Certify a configuration on so many nodes of its machine, or `nproc` ranks; default: one node.
    The certificate is written to `out`; default: into the run directory.

    Raises UserError for a configuration that cannot run.
    """
    config = load_config(path, overrides)
    need(nodes is None or nproc is None, "--nproc", nproc, "need one of --nodes and --nproc")
    need(minutes is None or 0 < minutes < math.inf, "--minutes", minutes, "need more than 0")
    ranks = nproc
    if ranks is None:
        nodes = 1 if nodes is None else nodes
        need(nodes >= 1, "--nodes", nodes, "need 1 or more")
        ranks = nodes * ranks_per_node(load_machine(config.machine))
    need(ranks >= 1, "--nproc", ranks, "need at least 1")
    out = Path(config.run.directory) / FILE_NAME if out is None else out
    with Progress("certify") as show:
        found = certify(config, ranks, minutes, show, out.with_suffix(""))
    found.write(out)
    return found


def certify(
    config: Config,
    ranks: int,
    minutes: float | None = None,
    progress: Callable[[str, float | None], None] = lambda line, done: None,
    broken: Path | None = None,
    until_broken: bool = False,
) -> Certificate:
    """Try every promise of a layout.

    minutes: begin nothing that would probably take longer; what is left out is named.
    progress: called before each run with a line, and the fraction of the trials that are done
        (None: all).
    broken: the start of the names of configurations that show a broken promise alone; None: none
        are written, and no cause is looked for.
    until_broken: stop at the first broken promise, and plan nothing: whether one is broken is all
        that the caller wants to know.

    Raises UserError for a configuration that cannot run, and a machine with too little memory.
    """
    config, _ = choose_layout(config, ranks)
    plan = check_layout(config, ranks)
    most = _most_ranks(ranks)
    certificate = Certificate(
        config.run.name,
        ranks,
        hash_of_config(config),
        hash_of_code(),
        versions(),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
    begin = time.monotonic()
    with _folder() as folder, computing_alone():
        miniatures = make_miniatures(config, plan, folder, most)
        write_corpora(miniatures[0].config)
        laboratory = Laboratory(folder)
        clock = _Clock(begin, minutes, progress)
        with ExitStack() as stack:
            scale = None
            if not until_broken:
                scale = stack.enter_context(_start_scale(config, plan, folder))
            for what, trial, miniature in clock.limited(_trials(config, miniatures), certificate):
                laboratory.progress = clock.of(what)
                for finding in _try(what, trial, laboratory, miniature):
                    certificate.findings.append(finding)
                    if until_broken and finding.status == "broken":
                        return certificate
            if scale is not None:
                certificate.findings += _read_scale(scale, folder)
        if broken is not None:
            laboratory.progress = clock.of("cause of a broken promise")
            certificate.findings = list(blame(certificate.findings, miniatures, laboratory, broken))
    certificate.left_out += [change for m in miniatures[:1] for change in m.changes]
    certificate.seconds = time.monotonic() - begin
    return certificate


def _most_ranks(ranks: int) -> int:
    """Ranks of the small meshes that the memory here has room for."""
    room = _available_bytes() / GIB
    most = min(MOST_RANKS, int(room / RANK_GIB))
    fits = f"need {RANK_GIB * min(2, ranks):g} of free memory here"
    need(most >= min(2, ranks), "certify", f"{room:.2g} GiB", fits)
    return max(2, most)


def _available_bytes() -> int:
    """Memory that new processes may take, by Linux; elsewhere all there is."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megafrontier-certify-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def computing_alone() -> Iterator[None]:
    """Compute on one thread, because this process forks ranks, and import once for all of them."""
    import_early()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


NamedTrial = tuple[str, Trial, Miniature]


def _trials(config: Config, miniatures: Sequence[Miniature]) -> Iterator[NamedTrial]:
    """All trials, those that say most first."""
    first = miniatures[0]
    yield "one process", try_reference, first
    for miniature in miniatures:
        yield f"{miniature.mesh}", try_equality, miniature
    for miniature in miniatures:
        yield f"{miniature.mesh}, as configured", try_configured, miniature
    if config.model.dropout:
        yield "dropout", try_dropout, first
    yield "export", try_export, first


def _try(
    what: str, trial: Trial, laboratory: Laboratory, miniature: Miniature
) -> Iterator[Finding]:
    """The findings of a trial. A run that fails is a broken promise of its own."""
    mesh = str(miniature.mesh)
    try:
        for finding in trial(laboratory, miniature):
            yield replace(finding, mesh=mesh)
    except TrialFailed as error:
        yield Finding(f"runs end well: {what}", "broken", where=str(error), mesh=mesh)


def _start_scale(config: Config, plan: RunPlan, folder: Path) -> ForkedBody:
    return ForkedBody(lambda: write_scale(config, plan, folder / "scale.json"), folder / "log")


def _read_scale(body: ForkedBody, folder: Path) -> list[Finding]:
    try:
        body.wait(SCALE_SECONDS)
    except TrialFailed as error:
        return [Finding("memory and time in full size", "open", where=str(error))]
    return read_scale(folder / "scale.json")


@dataclass
class _Clock:
    """Says how far a certificate is, and what there is no time for."""

    begin: float
    minutes: float | None
    progress: Callable[[str, float | None], None]
    done: int = 0
    number: int = 0

    def of(self, what: str) -> Callable[[str], None]:
        """The progress of one trial."""

        def say(line: str) -> None:
            at = f"{self.done} of {self.number} trials: {what}: {line}"
            self.progress(at, self.done / self.number if self.done < self.number else None)

        return say

    def limited(self, trials: Iterable[NamedTrial], to: Certificate) -> Iterator[NamedTrial]:
        """The trials that there is probably time for, by the mean of those before."""
        trials = list(trials)
        self.number = len(trials)
        for trial in trials:
            now = time.monotonic() - self.begin
            mean = now / max(1, self.done)
            if self.minutes is not None and self.done and now + mean > 60 * self.minutes:
                to.left_out.append(f"{trial[0]} (no time)")
                continue
            yield trial
            self.done += 1
