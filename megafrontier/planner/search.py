"""The layouts of a configuration on a machine, simulated and ranked.

A quick estimate by formulas sorts all layouts. Only the most promising ones are simulated.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations_with_replacement, product, repeat
from multiprocessing import get_context
from operator import itemgetter
from typing import Any, Literal, cast

from megafrontier.common.errors import UserError
from megafrontier.config import Config, ExpertsPartitionConfig, WiresConfig, load_machine
from megafrontier.data.sampling.batches import BatchSizes
from megafrontier.model.flops import flops_per_token
from megafrontier.model.recompute.checkpointing import RECOMPUTES_BLOCK, Mode, Modes, modes_of
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition.placement import node_depth
from megafrontier.plan.footprint import GIB, buffer_gib, fits_host, state_gib, unit_sizes
from megafrontier.plan.reserve import usable_gib
from megafrontier.plan.resolve import RunPlan, resolve_plan
from megafrontier.planner.checkpointing import (
    cheapest,
    check_budget,
    fill_memory,
    memory_budget,
    operations,
)
from megafrontier.planner.estimate import UnitGroup, sent_bytes
from megafrontier.planner.layers import simulate_blocks
from megafrontier.planner.simulation.rank import Simulated
from megafrontier.planner.simulation.rates import Rates
from megafrontier.splits.token_dispatch import PEAK

Auto = Literal["auto"]
Preset = Literal["exact", "zero++", "low"]
MICRO_BATCHES = (1, 2, 4, 8, 16)
CHECKPOINTING: tuple[Mode, ...] = ("none", "selective", "block")
WIRES: tuple[Preset, ...] = ("exact", "low")
SAVED_BYTES = {"none": 34.0, "selective": 20.0, "block": 2.0, "offload": 0.0}
"""For backward by checkpointing mode, for each token, block and hidden element, in 16 bits without
the attention matrix (Korthikanti et al. 2022, arXiv:2205.05198), for the estimate."""
_NOWHERE = dict.fromkeys(("strategy", "weights", "backward_weights", "gradients", "optimizer"))
SIMULATED = 8
"""Layouts that fit, besides the configuration's own."""
WORKERS = 16
"""Processes at most."""


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
    def fits(self) -> bool:
        """Whether device and host have the memory, if it is stated; with the
        device's reserve, and any routing to experts."""
        usable = usable_gib(self.plan)
        return (usable is None or self.step.worst_gib <= usable) and fits_host(
            self.config, self.plan
        )


@dataclass(frozen=True)
class Free:
    """What a search may change."""

    placement: bool = True
    tensor: bool = True
    expert: bool = True
    wires: bool = True
    memory: bool = True
    """The micro-batch and what is recomputed."""


def search(
    config: Config,
    ranks: int,
    most: int = SIMULATED,
    free: Free | None = None,
    workers: int = WORKERS,
) -> list[CandidateLayout]:
    """The configuration's own layout and the `most` best others that fit into memory, fastest
    first; one that does not fit comes last.

    A configuration with `auto` in it has no layout of its own. `workers`: processes at most.

    Raises UserError if no layout can be, with the reason of the configuration's own.
    """
    free, given = free or Free(), config
    config = replace(config, machine=load_machine(config.machine))  # once
    if config.train.activation_checkpointing == "auto":
        check_budget(config)  # or all layouts would be left out without it
    families = _families(config, ranks, free)
    candidates = [found for family in families for found in family.members(free.memory)]
    candidates.sort(key=lambda each: each.seconds)
    tried = candidates[: 2 * most]
    key = "partition.strategy" if config.partition.strategy == "auto" else "parallel"
    problem = UserError(f"{key}: auto, but no layout fits on {ranks} ranks, need more")
    if not config.has_auto_layout:
        try:
            resolve_plan(config, ranks)
            tried.insert(0, _Candidate((), config, 0.0))
        except UserError as error:
            problem = error
    found = _simulate(tried, ranks, workers, most) if tried else []
    own = [layout for layout in found if not layout.overrides]
    others = [layout for layout in found if layout.overrides and layout.fits][:most]
    if not own and not others:
        if not (free.placement and config.partition.weights_copy):
            raise problem
        return _search_without_copies(given, ranks, most, free, workers, problem)
    best = sorted([*own, *others], key=lambda layout: (not layout.fits, layout.step.seconds))
    return [
        replace(layout, config=replace(layout.config, machine=given.machine)) for layout in best
    ]


def _search_without_copies(
    config: Config, ranks: int, most: int, free: Free, workers: int, problem: UserError
) -> list[CandidateLayout]:
    """`search` with `partition.weights_copy=false`, because no layout fits with a copy of the
    weights. Raises `problem` if none fits without it."""
    partition = replace(config.partition, weights_copy=False)
    try:
        found = search(replace(config, partition=partition), ranks, most, free, workers)
    except UserError:
        raise problem from None
    chosen = ("partition.weights_copy=false",)
    return [replace(layout, overrides=(*layout.overrides, *chosen)) for layout in found]


def _simulate(
    candidates: "Sequence[_Candidate]", ranks: int, workers: int, most: int
) -> list[CandidateLayout]:
    """Layouts in their order, in processes side by side, until `most` that fit are found."""
    first, *rest = candidates  # the processes need not import its modules again
    found = [CandidateLayout.of(first.overrides, first.config, ranks)]
    workers = min(os.cpu_count() or 1, len(rest), workers)
    pool = ProcessPoolExecutor(workers, get_context("fork")) if workers > 1 else None
    try:
        while (
            rest
            and (missing := most - sum(bool(each.overrides) and each.fits for each in found)) > 0
        ):
            now, rest = rest[:missing], rest[missing:]
            overrides, configs = zip(*((c.overrides, c.config) for c in now), strict=True)
            run = map if pool is None else pool.map
            found += run(CandidateLayout.of, overrides, configs, repeat(ranks))
    finally:
        if pool is not None:
            pool.shutdown()
    return found


@dataclass(frozen=True)
class _Candidate:
    """A layout with the estimate of its step."""

    overrides: tuple[str, ...]
    config: Config
    seconds: float


class _Family:
    """The layouts that differ in the micro-batch and in what is recomputed: they hold the same
    state and send the same messages."""

    def __init__(self, config: Config, overrides: Sequence[str], ranks: int) -> None:
        """Raises UserError for a layout that cannot be or whose state does not fit."""
        self._config, self._overrides = config, overrides
        least = replace(config.train, micro_batch=1, activation_checkpointing="offload")
        plan = self._plan = resolve_plan(replace(config, train=least), ranks)
        self._rates = Rates.of(plan.machine)
        self._is_auto = config.train.activation_checkpointing == "auto"
        memory = memory_budget(config, plan)[1] if self._is_auto else usable_gib(plan)
        self._free = [float("inf")] * 2
        if memory is not None:
            buffers = buffer_gib(config, plan)
            states = [state_gib(config, plan, is_first) for is_first in (False, True)]
            self._free = [(memory - state - buffers) * GIB for state in states]
        self._units = _by_levels(config, plan)

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for placements that, for most parameters, differ only at levels of a single
        rank."""
        plan, largest = self._plan, []
        for state in dict.fromkeys((plan.default, plan.experts)):
            units = [(numel, over) for numel, over, of in self._units if of == state]
            if units:
                _, over = max(units, key=itemgetter(0))
                largest.append((state.placement.on(over), state.wires))
        return plan.shape.splits, *largest

    def members(self, changes_memory: bool) -> Iterator[_Candidate]:
        """Those that may fit into memory. Without `changes_memory`, only that of the configuration
        itself."""
        train, model, splits = self._config.train, self._config.model, self._plan.shape.splits
        data_size = self._plan.shape.over(("data",)).ranks
        parts, sizes = splits.tensor * splits.context, BatchSizes.of(train)
        choices: list[tuple[int, Auto | Mode | list[Mode]]] = [
            (train.micro_batch, train.activation_checkpointing)
        ]
        if changes_memory:
            given: tuple[Auto | Mode, ...] = ("auto",) if self._is_auto else CHECKPOINTING
            choices = list(product(MICRO_BATCHES, given))
        for micro_batch, mode in choices:
            tokens = micro_batch * model.sequence_length / parts
            number = train.global_batch // (micro_batch * data_size)
            free = self._free[number == 1]
            estimated = self._modes(mode, tokens, free)
            saved = self._saved_bytes(estimated, tokens)
            if not sizes.divides(micro_batch * data_size) or saved > free:
                continue
            chosen = replace(train, micro_batch=micro_batch, activation_checkpointing=mode)
            config, overrides = replace(self._config, train=chosen), list(self._overrides)
            if changes_memory:
                overrides += [f"train.micro_batch={micro_batch}"]
                overrides += [f"train.activation_checkpointing={mode}"]
            known = replace(chosen, activation_checkpointing=estimated)
            seconds = self._estimate(replace(config, train=known), number, tokens)
            yield _Candidate(tuple(overrides), config, seconds)

    def _modes(self, given: Auto | Modes, tokens: float, free: float) -> list[Mode]:
        """The modes of blocks; with `auto` an estimate, in eighths of the blocks."""
        blocks = self._config.model.trained_layers
        if given != "auto":
            return modes_of(given, blocks)
        parts = cheapest(8, lambda modes: self._saved_bytes(modes, tokens) <= free)
        return [parts[8 * block // blocks] for block in range(blocks)]

    def _saved_bytes(self, modes: Sequence[Mode], tokens: float) -> float:
        """For the backward of a micro-batch of so many tokens on this rank. `modes`: of equal parts
        of the blocks."""
        model = self._config.model
        mean = sum(SAVED_BYTES[mode] for mode in modes) / len(modes)
        return tokens * (mean * model.hidden * model.layers + self._expert_bytes(modes))

    def _expert_bytes(self, modes: Sequence[Mode]) -> float:
        """What experts save for the backward of a token, in 16 bits, if tokens come to this rank
        that need the most."""
        model, moe = self._config.model, self._config.model.moe
        if moe is None:
            return 0.0
        ranks = self._plan.shape.splits.expert
        there = min(moe.active, moe.experts // ranks)
        most = min(PEAK, ranks * there / moe.active)
        kept = sum(mode not in RECOMPUTES_BLOCK for mode in modes)
        blocks = max(1, moe.blocks(model.layers) * kept / len(modes))
        width = moe.ffn_hidden or model.mlp_hidden
        return 2 * most * moe.active * (2 * model.hidden + 3 * width) * blocks

    def _estimate(self, config: Config, number: int, tokens: float) -> float:
        """Seconds of a step of `number` micro-batches of `tokens` tokens: computation, or the
        busiest level if that takes longer, and a part of the rest, which is seldom hidden
        wholly."""
        plan, names = self._plan, self._plan.levels.names
        flops = flops_per_token(config.model) * number * tokens
        flops *= operations(config.checkpointing)
        computing = flops / self._rates.device.matrix_flops
        sent = sent_bytes(config, plan, self._units, number)
        links = self._rates.links
        seconds = [links[name].seconds(count, 0) for name, count in zip(names, sent, strict=True)]
        return max(computing, *seconds) + 0.1 * sum(seconds)


def _by_levels(config: Config, plan: RunPlan) -> list[UnitGroup]:
    """Elements of all units with the same levels, these, and how the units are sharded."""
    numels: Counter[tuple[str, ...]] = Counter()
    for unit in unit_sizes(config, plan.shape.splits):
        numels[unit.axes] += unit.numel
    return [(numel, plan.shape.over(axes), plan.of(axes)) for axes, numel in numels.items()]


def _families(config: Config, ranks: int, free: Free) -> Iterator[_Family]:
    levels = Levels.resolve(load_machine(config.machine).levels, ranks)
    seen: set[tuple[object, ...]] = set()
    own = config.partition.wires.preset
    wires: list[Preset | None] = [None, *(name for name in WIRES if free.wires and name != own)]
    places = _placements(levels) if free.placement else [{}]
    sizes: list[int | str] = [config.parallel.tensor]
    if free.tensor:
        # Experts are not cut by tensor parallelism, which is then seldom worth much.
        within = 1 if config.model.moe is not None else node_depth(levels)
        sizes = [*_filling(levels.sizes[:within])]
    experts = list(_expert_layouts(config, levels, free))
    for place, preset, tensor, expert in product(places, wires, sizes, experts):
        changed, overrides = _changed(config, place, preset, tensor)
        changed, more = _with_experts(changed, *expert)
        overrides += more
        with suppress(UserError):
            family = _Family(changed, overrides, ranks)
            if family.kind not in seen:
                seen.add(family.kind)
                yield family


def _changed(
    config: Config, place: dict[str, str], preset: Preset | None, tensor: int | str
) -> tuple[Config, list[str]]:
    """A configuration with another placement (empty: its own), wires and tensor split, and the
    overrides that say so."""
    partition, overrides = config.partition, []
    if place:
        partition = replace(partition, **cast(Any, {**_NOWHERE, **place}))
        overrides = ["partition.strategy=null", *(f"partition.{k}={v}" for k, v in place.items())]
    if preset is not None:
        partition = replace(partition, wires=WiresConfig(preset), error_feedback=None)
        overrides.append(f"partition.wires={preset}")
    if tensor != config.parallel.tensor:
        overrides.append(f"parallel.tensor={tensor}")
    parallel = replace(config.parallel, tensor=tensor)
    return replace(config, partition=partition, parallel=parallel), overrides


def _expert_layouts(
    config: Config, levels: Levels, free: Free
) -> Iterator[tuple[int | str, ExpertsPartitionConfig | None]]:
    """Expert splits, and placements of experts. None: that of the rest. With a split they may be
    unsharded, so that they need not be gathered."""
    moe, own = config.model.moe, config.partition.experts
    sizes = [config.parallel.expert]
    if free.expert:
        most = 1 if moe is None else moe.experts
        sizes = [size for size in _filling(levels.sizes) if not most % size]
    for size in sizes:
        yield size, None if free.placement else own
        if free.placement and size != 1:
            last = levels.names[-1]
            for gradients in (last, "none"):
                yield (
                    size,
                    ExpertsPartitionConfig(weights="none", gradients=gradients, optimizer=last),
                )


def _with_experts(
    config: Config, size: int | str, place: ExpertsPartitionConfig | None
) -> tuple[Config, list[str]]:
    """A configuration with another expert split and placement of experts, and the overrides that
    say so."""
    overrides = []
    if size != config.parallel.expert:
        overrides = [f"parallel.expert={size}"]
    if place != config.partition.experts:
        given = {} if place is None else asdict(place)
        overrides += [f"partition.experts.{k}={v}" for k, v in given.items() if v is not None]
        overrides += ["partition.experts=null"] * (place is None)
    parallel = replace(config.parallel, expert=size)
    partition = replace(config.partition, experts=place)
    return replace(config, parallel=parallel, partition=partition), overrides


def _placements(levels: Levels) -> list[dict[str, str]]:
    """Every nesting of weights, gradients and optimizer state. Backward weights of an inner level
    are left out: the engine holds and gathers what it does with weights of that level."""
    names = "none", *levels.names
    return [
        dict(zip(("weights", "gradients", "optimizer"), nesting, strict=True))
        for nesting in combinations_with_replacement(names, 3)
    ]


def _filling(levels: Sequence[int]) -> list[int]:
    """Numbers of ranks that fill levels of these sizes one after the other."""
    sizes, total = [1], 1
    for size in levels:
        sizes += [total * part for part in range(2, size + 1) if size % part == 0]
        total *= size
    return sizes
