"""The layouts that a search may try, sorted by the estimate of their step.

Splits, placements, wires, schedules, micro-batches and modes of activation checkpointing make up to
millions of layouts. Those with the same splits, placement and wires hold the same state, so they
are estimated together, best splits first; splits whose fastest step would be far behind are left
out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations_with_replacement, product
from math import ceil, inf
from typing import Any, Literal, NamedTuple, cast

from megafrontier.common.errors import UserError
from megafrontier.config import Config, ExpertsPartitionConfig, ParallelConfig, WiresConfig
from megafrontier.data.sampling.batches import BatchSizes
from megafrontier.model.flops import flops_per_token
from megafrontier.model.recompute.checkpointing import Mode, Modes
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import MeshShape, Splits
from megafrontier.partition.placement import STATES, Placement, node_depth
from megafrontier.pipeline.balance import block_flops, head_flops
from megafrontier.pipeline.schedule import find_schedule
from megafrontier.plan.footprint import GIB, UnitSize, held_gib, unit_sizes
from megafrontier.plan.reserve import usable_gib
from megafrontier.plan.resolve import RunPlan, resolve_plan
from megafrontier.planner.checkpointing import cheapest, memory_budget, operations
from megafrontier.planner.estimate import (
    UnitGroup,
    backward_bytes,
    sent_bytes,
    sent_messages,
)
from megafrontier.planner.simulation.rates import Rates

Auto = Literal["auto"]
Preset = Literal["exact", "zero++", "low"]
MICRO_BATCHES = (1, 2, 4, 8, 16)
CHECKPOINTING: tuple[Mode, ...] = ("none", "selective", "block")
SCHEDULES = (("1f1b", 1), ("zero_bubble", 1), ("zero_bubble", 2), ("interleaved", 2))
"""Of a pipeline, with the stages of a rank, simplest first."""
LEAST_TOKENS = 2048
"""Of a sequence on each context rank: shorter sequences are tried with tensor parallelism alone."""
_NOWHERE = dict.fromkeys(("strategy", "weights", "backward_weights", "gradients", "optimizer"))
_BEHIND = 1.15
"""Splits are left out whose bound is behind the best estimates by this factor."""
_OF_FAMILY = 4
"""Layouts of a family that are kept."""
_LINKS = 1.02
"""A step's seconds in units of its computing, from which on other wires may gain anything."""
_SPLIT_COST = 1.05
"""What each split costs of the computing: smaller products, and messages that it waits for. Steps
of 20B parameters on the clock have 4 to 7 % for each."""
_KEPT = 16
"""Estimates that the bound is compared with."""


@dataclass(frozen=True)
class Free:
    """What a search may change."""

    placement: bool = True
    tensor: bool = True
    context: bool = True
    expert: bool = True
    pipeline: bool = True
    """With its schedule and the stages of a rank."""
    wires: bool = True
    memory: bool = True
    """The micro-batch and what is recomputed."""


@dataclass(frozen=True)
class Candidate:
    """A layout with the estimate of its step."""

    overrides: tuple[str, ...]
    config: Config
    seconds: float
    kind: "LayoutKind"
    computing: float
    """Seconds of the step without all that computation waits for."""


class StateKind(NamedTuple):
    """How the largest part of the parameters under some rules is sharded and sent."""

    depths: tuple[object, ...]
    wires: tuple[str, ...]
    is_low: bool


class LayoutKind(NamedTuple):
    """Equal for layouts that do the same under other names."""

    splits: Splits
    states: tuple[StateKind, ...]
    work: tuple[object, ...]
    """Schedule, micro-batch, what is recomputed, and overlap."""

    @property
    def is_low(self) -> bool:
        """Whether any message has a low-bit wire."""
        return any(state.is_low for state in self.states)

    @property
    def sibling(self) -> tuple[object, ...]:
        """Equal for layouts that differ in their wires alone."""
        return self.splits, tuple(state.depths for state in self.states), self.work

    @classmethod
    def of(cls, config: Config, plan: RunPlan) -> "LayoutKind":
        """Of a configuration, whose plan this is."""
        groups = by_levels(plan, unit_sizes(config, _of_model(plan)))
        return cls(plan.shape.splits, _states(plan, groups), _work(config))


def candidates(config: Config, ranks: int, free: Free) -> list[Candidate]:
    """Layouts that may fit into memory, by their estimates. `config.machine` is loaded."""
    levels = Levels.resolve(config.machine.levels, ranks)
    found: list[Candidate] = []
    seen: set[object] = set()
    seconds = flops_per_token(config.model) / Rates.of(config.machine).device.matrix_flops
    splits = _splits(config, levels, free)
    divided = [_Division(config, parallel, levels, seconds) for parallel in splits]
    for division in sorted(divided, key=lambda each: each.bound):
        best = sorted(each.seconds for each in found)[:_KEPT]
        limit = _BEHIND * best[-1] if len(best) == _KEPT else inf
        if division.bound > limit:
            break
        for by_wires in division.families(free, ranks):
            found += _members(by_wires, free.memory, limit, seen)
    return sorted(found, key=lambda each: each.seconds)


def _members(
    by_wires: "Sequence[Callable[[], _Family]]", memory: bool, limit: float, seen: set[object]
) -> list[Candidate]:
    """The layouts of a placement. Other wires, which need no less memory, are tried if some with
    the first ones fit and messages take time beside computing."""
    found: list[Candidate] = []
    for make in by_wires:
        with suppress(UserError):
            family = make()
            if family.key not in seen:
                seen.add(family.key)
                found += family.members(memory, limit)
        if all(each.seconds < _LINKS * each.computing for each in found):
            break
    return found


def by_levels(plan: RunPlan, units: Sequence[UnitSize]) -> list[UnitGroup]:
    """Elements of all units with the same levels, these, and how the units are sharded."""
    numels: Counter[tuple[str, ...]] = Counter()
    for unit in units:
        numels[unit.axes] += unit.numel
    return [(numel, plan.shape.over(axes), plan.of(axes)) for axes, numel in numels.items()]


def _of_model(plan: RunPlan) -> Splits:
    return replace(plan.shape.splits, pipeline=1, context=1)


def _states(plan: RunPlan, groups: Sequence[UnitGroup]) -> tuple[StateKind, ...]:
    """Placements are the same that, for most parameters, differ only at levels of one rank."""
    largest = []
    for rules in dict.fromkeys((plan.default, plan.experts)):
        own = [(numel, over) for numel, over, of in groups if of == rules]
        if own:
            _, over = max(own, key=lambda each: each[0])
            crossed = [i for i, size in enumerate(over.sizes) if size > 1]
            wires = [wire[i] for wire in (rules.wires.gather, rules.wires.reduce) for i in crossed]
            is_low = any(wire.is_delta or wire.codec.is_quantized for wire in wires)
            names = tuple(wire.name for wire in wires)
            largest.append(StateKind(_depths(rules.placement.on(over), over), names, is_low))
    return tuple(largest)


def _depths(placement: Placement, levels: Levels) -> tuple[object, ...]:
    """Those of a placement, without levels of one rank at their ends."""
    found = []
    for name in STATES:
        depth = getattr(placement, name)
        while depth and levels.sizes[depth - 1] == 1:
            depth -= 1
        found.append(depth)
    return *found, placement.has_copy


def _work(config: Config) -> tuple[object, ...]:
    parallel, given = config.parallel, config.train.activation_checkpointing
    modes = tuple(given) if isinstance(given, list) else given
    schedule = parallel.schedule, parallel.stages_per_rank, tuple(parallel.layers)
    return *schedule, config.train.micro_batch, modes, config.partition.overlap


def _splits(config: Config, levels: Levels, free: Free) -> Iterator[ParallelConfig]:
    """The splits to try, each once, with 1f1b; as configured where they are not free."""
    own, model, seen = config.parallel, config.model, set()
    node = levels.sizes[: node_depth(levels)]
    # Experts are not cut by tensor parallelism, which is then seldom worth much.
    within = node[:1] if model.moe is not None else node
    tensors: list[int | str] = [*_filling(within)] if free.tensor else [own.tensor]
    contexts: list[int | str] = [own.context]
    if free.context:
        most = max(1, model.sequence_length // LEAST_TOKENS)
        contexts = [size for size in _filling(node) if size <= most]
    experts: list[int | str] = [own.expert]
    if free.expert:
        number = 1 if model.moe is None else model.moe.experts
        experts = [size for size in _filling(levels.sizes) if not number % size]
    pipelines: list[int | str] = [own.pipeline]
    if free.pipeline:
        outer = _filling(levels.sizes[::-1])
        pipelines = [size for size in outer if size <= model.layers]
    for tensor, context, expert, pipeline in product(tensors, contexts, experts, pipelines):
        keys = {"tensor": tensor, "context": context, "expert": expert, "pipeline": pipeline}
        with suppress(UserError):
            splits = Splits.resolve(levels, keys)
            if splits in seen:
                continue
            seen.add(splits)
            given = replace(own, **cast(Any, keys))
            if free.pipeline:
                given = replace(given, schedule="1f1b", stages_per_rank=1, layers=[])
            yield given


class _Division:
    """How the work is divided, and the fastest step that it allows."""

    def __init__(
        self, config: Config, parallel: ParallelConfig, levels: Levels, seconds: float
    ) -> None:
        """`seconds`: that one device computes for a token."""
        self._config, self._parallel = config, parallel
        self.shape = MeshShape(levels, Splits.resolve(levels, asdict(parallel)))
        train, data = config.train, self.shape.over(("data",)).ranks
        number = max(1, train.global_batch // data)
        pipeline = self.shape.splits.pipeline
        idle = min(_Pipeline(name, pipeline, v, number).bubble for name, v in SCHEDULES)
        split = sum(size > 1 for size in asdict(self.shape.splits).values())
        seconds *= _uneven(config, pipeline) * _SPLIT_COST**split
        self._seconds = seconds / pipeline
        tokens = train.global_batch * config.model.sequence_length
        self.bound = seconds * tokens / levels.ranks * (1 + idle)

    def families(self, free: Free, ranks: int) -> "Iterator[list[Callable[[], _Family]]]":
        """The layouts with these splits: for each placement those by wires, exact ones first."""
        config, own = self._config, self._config.partition.wires.preset
        changed, overrides = _with_splits(config, self._parallel)
        places = _placements(self.shape.over(("context", "data"))) if free.placement else [{}]
        wires: list[Preset | None] = [None]
        if free.wires:
            known: Sequence[Preset] = ("exact", "low")
            wires = [None if name == own else name for name in known]
            wires += [None] * (own not in known)
        experts = list(_expert_places(config, self.shape, free))
        for place, expert in product(places, experts):
            makes: list[Callable[[], _Family]] = []
            for preset in wires:
                placed, more = _changed(changed, place, preset)
                placed, last = _with_experts(placed, expert)
                given = placed, (*overrides, *more, *last)
                makes.append(partial(_Family, *given, ranks, free.pipeline, self._seconds))
            yield makes


class _Pipeline(NamedTuple):
    """A schedule of `micro_batches` on `ranks` ranks, by the formulas of `pipeline.schedule`."""

    schedule: str
    ranks: int
    stages: int
    micro_batches: int

    @property
    def bubble(self) -> float:
        """Idle time as a share of the computing time."""
        parts = 3 if self.schedule == "zero_bubble" else 1
        return (self.ranks - 1) / (self.micro_batches * self.stages * parts)

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations a rank holds, each of all its blocks."""
        most = min(self.micro_batches, self.ranks)
        if self.schedule == "interleaved":
            return min(self.micro_batches, most * (1 + (self.ranks - 1) / (self.ranks * 2)))
        return most


def _uneven(config: Config, ranks: int) -> float:
    """The most expensive stage as a multiple of the mean."""
    if ranks == 1:
        return 1.0
    blocks = config.model.layers
    total = blocks + head_flops(config.model) / (sum(block_flops(config.model)) / blocks)
    return max(ceil(total / ranks - 0.5), 1 + total - blocks) * ranks / total


class _Family:
    """The layouts that differ in the schedule, the micro-batch and in what is recomputed: they hold
    the same state and send the same messages."""

    def __init__(
        self,
        config: Config,
        overrides: tuple[str, ...],
        ranks: int,
        has_schedules: bool,
        seconds: float,
    ) -> None:
        """`seconds`: that a rank computes for a token. Raises UserError for a layout that cannot
        be."""
        self._config, self._overrides, self._has_schedules = config, overrides, has_schedules
        least = replace(config.train, micro_batch=1, activation_checkpointing="offload")
        parallel, layers = config.parallel, config.model.layers
        if has_schedules and parallel.pipeline != 1:  # to balance the stages takes long
            shape = Levels.resolve(config.machine.levels, ranks)
            size = Splits.resolve(shape, asdict(parallel)).pipeline
            parallel = replace(parallel, layers=_even(layers, size))
        plan = resolve_plan(replace(config, train=least, parallel=parallel), ranks)
        self._plan, self._rates = plan, Rates.of(plan.machine)
        self._pipeline = plan.shape.splits.pipeline
        self._is_auto = config.train.activation_checkpointing == "auto"
        memory = memory_budget(config, plan)[1] if self._is_auto else usable_gib(plan)
        units = _units_of_rank(unit_sizes(config, _of_model(plan)), layers, self._pipeline)
        self._free = [float("inf")] * 2
        if memory is not None:
            held = held_gib(config, plan, units)
            self._free = [(memory - gib) * GIB for gib in held]
        self._units = by_levels(plan, units)
        self._blocks = len({unit.block for unit in units})
        self._states = _states(plan, self._units)
        self._computing = seconds

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for families with the same layouts."""
        return self._plan.shape.splits, self._states

    def members(self, changes_memory: bool, limit: float) -> Iterator[Candidate]:
        """The `_OF_FAMILY` best ones that may fit into memory and whose computing takes at most
        `limit` seconds. Without `changes_memory`, only the micro-batch and modes of the
        configuration itself."""
        found = sorted(self._estimates(changes_memory, limit), key=lambda each: each.seconds)
        for each in found[:_OF_FAMILY]:
            config, overrides = self._member(each, changes_memory)
            kind = LayoutKind(self._plan.shape.splits, self._states, _work(config))
            yield Candidate(overrides, config, each.seconds, kind, each.computing)

    def _estimates(self, changes_memory: bool, limit: float) -> "Iterator[_Estimate]":
        train, model, splits = self._config.train, self._config.model, self._plan.shape.splits
        data_size = self._plan.shape.over(("data",)).ranks
        parts, sizes = splits.tensor * splits.context, BatchSizes.of(train)
        choices: list[tuple[int, Auto | Modes]] = [
            (train.micro_batch, train.activation_checkpointing)
        ]
        if changes_memory:
            given: tuple[Auto | Mode, ...] = ("auto",) if self._is_auto else CHECKPOINTING
            choices = list(product(MICRO_BATCHES, given))
        for (micro_batch, mode), (schedule, stages) in product(choices, self._schedules()):
            if not sizes.divides(micro_batch * data_size):
                continue
            tokens = micro_batch * model.sequence_length / parts
            number = train.global_batch // (micro_batch * data_size)
            pipeline = _Pipeline(schedule, self._pipeline, stages, number)
            free = self._free[number == 1]
            room = partial(self._saves_within, free, tokens, pipeline)
            modes = self._modes(mode, room)
            computing = (
                self._computing * number * tokens * operations(modes) * (1 + pipeline.bubble)
            )
            if computing <= limit and room(modes):
                every = _spread(modes, model.trained_layers)
                chosen = replace(train, micro_batch=micro_batch, activation_checkpointing=every)
                links = self._link_seconds(replace(self._config, train=chosen), number)
                seconds = max(computing, *links) + 0.1 * sum(links)
                yield _Estimate(seconds, computing, micro_batch, mode, schedule, stages)

    def _link_seconds(self, config: Config, number: int) -> list[float]:
        """Of all messages of a step with so many micro-batches, by level."""
        sent = sent_bytes(config, self._plan, self._units, number)
        messages = sent_messages(self._plan, self._units, self._blocks, number)
        links = self._rates.links
        return [
            links[name].seconds(count, times)
            for name, count, times in zip(self._plan.levels.names, sent, messages, strict=True)
        ]

    def _schedules(self) -> Sequence[tuple[str, int]]:
        parallel = self._config.parallel
        if self._pipeline == 1 or not self._has_schedules:
            return [(parallel.schedule, parallel.stages_per_rank)]
        layers = self._config.model.layers
        return [each for each in SCHEDULES if each[1] * self._pipeline <= layers]

    def _member(self, found: "_Estimate", changes_memory: bool) -> tuple[Config, tuple[str, ...]]:
        """The layout of an estimate, and all overrides."""
        config, overrides = self._config, list(self._overrides)
        chosen = {"schedule": found.schedule, "stages_per_rank": found.stages}
        for key, value in chosen.items():
            if value != getattr(config.parallel, key):
                overrides.append(f"parallel.{key}={value}")
        memory = {"micro_batch": found.micro_batch, "activation_checkpointing": found.mode}
        if changes_memory:
            overrides += [f"train.{key}={value}" for key, value in memory.items()]
        parallel = replace(config.parallel, **cast(Any, chosen))
        train = replace(config.train, **cast(Any, memory))
        return replace(config, parallel=parallel, train=train), tuple(overrides)

    def _modes(self, given: Auto | Modes, fits: Callable[[Sequence[Mode]], bool]) -> Sequence[Mode]:
        """The modes of equal parts of the blocks."""
        if not isinstance(given, str):
            return given
        return cheapest(8, fits) if given == "auto" else [given]

    def _saves_within(
        self, free: float, tokens: float, pipeline: _Pipeline, modes: Sequence[Mode]
    ) -> bool:
        """Whether backward needs at most `free` bytes, with micro-batches of so many tokens on this
        rank. `modes`: of equal parts of the blocks."""
        model, expert = self._config.model, self._plan.shape.splits.expert
        blocks, in_flight = model.layers / pipeline.ranks, pipeline.in_flight
        splits = find_schedule(pipeline.schedule).splits_backward and pipeline.ranks > 1
        return backward_bytes(model, modes, blocks, tokens, in_flight, expert, splits) <= free


class _Estimate(NamedTuple):
    """Of a step's seconds, and those of its computing, with a micro-batch and schedule."""

    seconds: float
    computing: float
    micro_batch: int
    mode: Auto | Modes
    schedule: str
    stages: int


def _units_of_rank(units: Sequence[UnitSize], layers: int, ranks: int) -> Sequence[UnitSize]:
    """The units of a pipeline's rank with most blocks, and with the larger one of embedding and
    head."""
    if ranks == 1:
        return units
    most, ends = ceil(layers / ranks), [u for u in units if u.block in ("embedding", "head")]
    largest = max((unit.numel for unit in ends), default=0)
    blocks = {f"blocks.{number}" for number in range(most)}
    others = [u for u in units if not u.block.startswith("blocks.") and u not in ends]
    return [
        *others,
        *[unit for unit in ends if unit.numel == largest][:1],
        *(unit for unit in units if unit.block in blocks),
    ]


def _spread(modes: Sequence[Mode], blocks: int) -> list[Mode]:
    """The mode of each block, from those of equal parts."""
    return [modes[len(modes) * block // blocks] for block in range(blocks)]


def _even(layers: int, stages: int) -> list[int]:
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _with_splits(config: Config, parallel: ParallelConfig) -> tuple[Config, list[str]]:
    """A configuration with other splits, and the overrides that say so."""
    overrides = [
        f"parallel.{key}={value}"
        for key, value in asdict(parallel).items()
        if value != getattr(config.parallel, key)
    ]
    return replace(config, parallel=parallel), overrides


def _changed(
    config: Config, place: dict[str, str], preset: Preset | None
) -> tuple[Config, list[str]]:
    """A configuration with another placement (empty: its own) and other wires, and the overrides
    that say so."""
    partition, overrides = config.partition, []
    if place:
        partition = replace(partition, **cast(Any, {**_NOWHERE, **place}))
        overrides = ["partition.strategy=null", *(f"partition.{k}={v}" for k, v in place.items())]
    if preset is not None:
        partition = replace(partition, wires=WiresConfig(preset), error_feedback=None)
        overrides.append(f"partition.wires={preset}")
    return replace(config, partition=partition), overrides


def _expert_places(
    config: Config, shape: MeshShape, free: Free
) -> Iterator[ExpertsPartitionConfig | None]:
    """Placements of experts. None: that of the rest. With a split they may be unsharded, so that
    they need not be gathered."""
    yield None if free.placement else config.partition.experts
    if free.placement and shape.splits.expert != 1:
        last = shape.levels.names[-1]
        for gradients in (last, "none"):
            yield ExpertsPartitionConfig(weights="none", gradients=gradients, optimizer=last)


def _with_experts(config: Config, place: ExpertsPartitionConfig | None) -> tuple[Config, list[str]]:
    """A configuration with another placement of experts, and the overrides that say so."""
    overrides = []
    if place != config.partition.experts:
        given = {} if place is None else asdict(place)
        overrides = [f"partition.experts.{k}={v}" for k, v in given.items() if v is not None]
        overrides += ["partition.experts=null"] * (place is None)
    partition = replace(config.partition, experts=place)
    return replace(config, partition=partition), overrides


def _placements(levels: Levels) -> list[dict[str, str]]:
    """Every nesting of weights, gradients and optimizer state, without those that differ only at
    levels of a single rank. Backward weights of an inner level are left out: the engine holds and
    gathers what it does with weights of that level."""
    crossed = [n for n, size in zip(levels.names, levels.sizes, strict=True) if size > 1]
    return [
        dict(zip(("weights", "gradients", "optimizer"), nesting, strict=True))
        for nesting in combinations_with_replacement(("none", *crossed), 3)
    ]


def _filling(levels: Sequence[int]) -> list[int]:
    """Numbers of ranks that fill levels of these sizes one after the other."""
    sizes, total = [1], 1
    for size in levels:
        sizes += [total * part for part in range(2, size + 1) if size % part == 0]
        total *= size
    return sizes
