"""The layouts of a configuration on a machine, simulated and ranked.

A quick estimate by formulas sorts all layouts (`candidates`). Only the most promising ones are
simulated. Among those whose times differ by less than the prediction's own error, the simplest one
comes first.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice, repeat
from multiprocessing import get_context

from megafrontier.comm.streams import Policy
from megafrontier.common.errors import UserError
from megafrontier.config import Config, load_machine
from megafrontier.plan.describe import uses_rccl
from megafrontier.plan.footprint import fits_host
from megafrontier.plan.reserve import usable_gib
from megafrontier.plan.resolve import RunPlan, resolve_plan
from megafrontier.planner.candidates import Candidate, Free, LayoutKind, candidates
from megafrontier.planner.checkpointing import (
    check_budget,
    fill_memory,
    memory_budget,
    operations,
)
from megafrontier.planner.layers import simulate_blocks
from megafrontier.planner.simulation.rank import Simulated

SIMULATED = 6
"""Layouts that fit, besides the configuration's own."""
WORKERS = 16
"""Processes at most."""
ERROR = 0.035
"""The mean error of a predicted time (docs/planning.md). Times that differ by less are equal."""
LOW_GAIN = 0.03
"""What low-bit wires must gain to be listed."""
_SAME_SPLITS = 2
"""Layouts with the same splits that are simulated at most."""
_BEHIND = 1.2
"""Layouts are not simulated whose estimate is behind the best by this factor, if some fit."""
OnSimulated = Callable[[int], object]
"""Is told how many layouts have been simulated."""


@dataclass(frozen=True)
class CandidateLayout:
    """A configuration with some overrides, and what a step of it takes."""

    overrides: tuple[str, ...]
    config: Config
    plan: RunPlan
    step: Simulated

    @classmethod
    def of(cls, overrides: tuple[str, ...], config: Config, ranks: int) -> "CandidateLayout":
        """Simulate a layout. Raises UserError for one that cannot be."""
        plan = resolve_plan(config, ranks)
        if config.train.activation_checkpointing == "auto":
            config, _ = fill_memory(config, plan, memory_budget(config, plan)[1])
        return cls(overrides, config, plan, simulate_blocks(config, plan))

    @property
    def is_configured(self) -> bool:
        """Whether it is the configuration as it was given."""
        return not self.overrides

    @cached_property
    def kind(self) -> LayoutKind:
        """Equal for layouts that do the same."""
        return LayoutKind.of(self.config, self.plan)

    @property
    def fits(self) -> bool:
        """Whether device and host have the memory, if it is stated, with the device's reserve, and
        any routing to experts."""
        usable = usable_gib(self.plan)
        fits_device = usable is None or self.step.worst_gib <= usable
        return fits_device and fits_host(self.config, self.plan)

    @property
    def complexity(self) -> tuple[float, ...]:
        """Less is simpler: low-bit wires, splits, recomputation, and GiB."""
        splits = sum(size > 1 for size in asdict(self.kind.splits).values())
        return self.kind.is_low, splits, operations(self.config.checkpointing), self.step.worst_gib


def search(
    config: Config,
    ranks: int,
    most: int = SIMULATED,
    free: Free | None = None,
    workers: int = WORKERS,
    report: OnSimulated = lambda count: None,
) -> list[CandidateLayout]:
    """The configuration's own layout and the `most` best others that fit into memory, best first;
    one that does not fit comes last.

    Fastest first, but simplest first among those whose times differ by less than `ERROR`. One with
    low-bit wires must gain `LOW_GAIN`, and is followed by the same layout with exact ones.

    A configuration with `auto` in it has no layout of its own. `workers`: processes at most.

    Raises UserError if no layout can be, with the reason of the configuration's own.
    """
    free, given = free or Free(), config
    config = replace(config, machine=load_machine(config.machine))  # once
    if config.train.activation_checkpointing == "auto":
        check_budget(config)  # or all layouts would be left out without it
    tried = candidates(config, ranks, free)
    key = "partition.strategy" if config.partition.strategy == "auto" else "parallel"
    problem = UserError(f"{key}: auto, but no layout fits on {ranks} ranks, need more")
    own: list[CandidateLayout] = []
    if not config.has_auto_layout:
        try:
            own = [CandidateLayout.of((), config, ranks)]
            tried = [each for each in tried if each.kind != own[0].kind]
        except UserError as error:
            problem = error
    with _Runner(ranks, workers, report) as runner:
        others = _others(tried, runner, most, own, free.wires)
        if free.memory:
            others += _with_other_overlap([*own, *others], runner)
    if not own and not others:
        if not (free.placement and config.partition.weights_copy):
            raise problem
        return _search_without_copies(given, ranks, most, free, workers, report, problem)
    return [
        replace(layout, config=replace(layout.config, machine=given.machine))
        for layout in ranked([*own, *others], most + len(own))
    ]


def _search_without_copies(
    config: Config,
    ranks: int,
    most: int,
    free: Free,
    workers: int,
    report: OnSimulated,
    problem: UserError,
) -> list[CandidateLayout]:
    """`search` with `partition.weights_copy=false`, because no layout fits with a copy of the
    weights. Raises `problem` if none fits without it."""
    partition = replace(config.partition, weights_copy=False)
    try:
        found = search(replace(config, partition=partition), ranks, most, free, workers, report)
    except UserError:
        raise problem from None
    chosen = ("partition.weights_copy=false",)
    return [replace(layout, overrides=(*layout.overrides, *chosen)) for layout in found]


class _Runner:
    """Simulates layouts, in processes side by side."""

    def __init__(self, ranks: int, workers: int, report: OnSimulated) -> None:
        self._ranks, self._report, self._count = ranks, report, 0
        workers = min(os.cpu_count() or 1, workers)
        self.width = workers
        self._pool = ProcessPoolExecutor(workers, get_context("fork")) if workers > 1 else None

    def __enter__(self) -> "_Runner":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, tried: Sequence[tuple[tuple[str, ...], Config]]) -> list[CandidateLayout]:
        """Layouts of overrides and configurations, in their order."""
        if not tried:
            return []
        overrides, configs = zip(*tried, strict=True)
        run = map if self._pool is None or len(tried) == 1 else self._pool.map
        found: list[CandidateLayout] = []
        for layout in run(CandidateLayout.of, overrides, configs, repeat(self._ranks)):
            found.append(layout)
            self._count += 1
            self._report(self._count)
        return found


def _others(
    tried: Sequence[Candidate],
    runner: _Runner,
    most: int,
    own: Sequence[CandidateLayout],
    has_wires: bool,
) -> list[CandidateLayout]:
    """The layouts that fit of the most promising ones: those with exact wires, and with low-bit
    ones where these gain, with the same layout with exact wires."""
    keeps_low = any(each.kind.is_low for each in own)
    exact = [each for each in tried if not (has_wires and each.kind.is_low)]
    low = [each for each in tried if has_wires and each.kind.is_low]
    found = _simulate(exact, runner, most)
    reached = min((each.seconds for each in exact[:1]), default=float("inf"))
    gains = [each for each in low if each.seconds < (1 - LOW_GAIN) * reached or keeps_low]
    chosen = list(islice(_distinct(gains), 2))
    wanted = {each.kind.sibling for each in chosen}
    known = {each.overrides for each in found}
    pairs = [e for e in exact if e.kind.sibling in wanted and e.overrides not in known]
    found += runner.run([(each.overrides, each.config) for each in (*chosen, *pairs)])
    return [layout for layout in found if layout.fits]


def _simulate(tried: Sequence[Candidate], runner: _Runner, most: int) -> list[CandidateLayout]:
    """Candidates in their order, until `most` that fit are found or all others are far behind."""
    found: list[CandidateLayout] = []
    rest, fit = list(_distinct(tried)), 0
    first = rest[0].seconds if rest else 0.0
    for start in range(0, len(rest), runner.width):
        now = rest[start : start + runner.width][: max(1, most - fit)]
        if fit >= most or len(found) >= 3 * most or (fit and now[0].seconds > _BEHIND * first):
            break
        layouts = runner.run([(each.overrides, each.config) for each in now])
        if not fit and any(layout.fits for layout in layouts):
            first = now[0].seconds
        found += layouts
        fit += sum(layout.fits for layout in layouts)
    return found


def _distinct(tried: Sequence[Candidate]) -> Iterator[Candidate]:
    """At most some with the same splits."""
    counts: Counter[object] = Counter()
    for each in tried:
        counts[each.kind.splits] += 1
        if counts[each.kind.splits] <= _SAME_SPLITS:
            yield each


def _with_other_overlap(
    layouts: Sequence[CandidateLayout], runner: _Runner
) -> list[CandidateLayout]:
    """The fastest layout with the other ways to overlap, where they gain. Several communicators in
    flight are not offered where they have hung."""
    # The pieces of tokens need the overlap that they have.
    fitting = [each for each in layouts if each.fits and each.config.parallel.token_pieces == 1]
    if not fitting:
        return []
    best = min(fitting, key=lambda layout: layout.step.seconds)
    if not any(best.step.sent.values()):
        return []
    ways: list[Policy] = ["none", "safe"]
    if not uses_rccl(best.plan.machine.device.name):
        ways.append("full")
    tried = []
    for way in ways:
        if way != best.config.partition.overlap:
            changed = replace(best.config.partition, overlap=way)
            overrides = *best.overrides, f"partition.overlap={way}"
            tried.append((overrides, replace(best.config, partition=changed)))
    found = runner.run(tried)
    limit = (1 - ERROR) * best.step.seconds
    return [layout for layout in found if layout.fits and layout.step.seconds < limit]


def ranked(layouts: Sequence[CandidateLayout], most: int) -> list[CandidateLayout]:
    """Layouts that fit first, in the order of `search`, `most` of them, and the configured one."""
    left = sorted(_worthwhile(layouts), key=lambda each: (not each.fits, each.step.seconds))
    found: list[CandidateLayout] = []
    while left:
        head = left[0]
        limit = (1 + ERROR) * head.step.seconds
        equal = [each for each in left if each.fits == head.fits and each.step.seconds <= limit]
        first = min(equal, key=lambda each: (each.complexity, each.step.seconds))
        found.append(first)
        left = [each for each in left if each is not first]
    kept = found[:most] + [each for each in found[most:] if each.is_configured]
    return _beside(kept, found)


def _worthwhile(layouts: Sequence[CandidateLayout]) -> list[CandidateLayout]:
    """Without layouts whose low-bit wires do not gain enough over the best exact one, and over the
    same layout with exact ones."""
    exact = [each for each in layouts if each.fits and not each.kind.is_low]
    fastest = min((each.step.seconds for each in exact), default=float("inf"))
    same = {each.kind.sibling: each.step.seconds for each in exact}

    def gains(low: CandidateLayout) -> bool:
        beside = min(fastest, same.get(low.kind.sibling, float("inf")))
        return low.step.seconds <= (1 - LOW_GAIN) * beside

    return [each for each in layouts if not each.kind.is_low or each.is_configured or gains(each)]


def _beside(
    kept: Sequence[CandidateLayout], found: Sequence[CandidateLayout]
) -> list[CandidateLayout]:
    """`kept` with each layout with low-bit wires followed by that with exact ones, of those
    `found`."""
    rows: list[CandidateLayout] = []
    for layout in kept:
        exact = [
            other
            for other in found
            if layout.kind.is_low
            and not other.kind.is_low
            and other.kind.sibling == layout.kind.sibling
        ]
        rows += [each for each in (layout, *exact) if not any(each is row for row in rows)]
    return rows
