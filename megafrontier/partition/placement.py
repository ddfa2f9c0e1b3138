"""A placement: over how many levels each state is sharded, and the bytes that follow from it.

The named strategies are placements. Any other combination of levels that nest is one too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from megafrontier.common.errors import UserError
from megafrontier.config import ExpertsPartitionConfig, PartitionConfig
from megafrontier.parallel.hierarchy import Levels

STRATEGIES = {
    "ddp": ("none", "none", "none", "none"),
    "zero1": ("none", "none", "none", "world"),
    "zero2": ("none", "none", "world", "world"),
    "zero3": ("world", "world", "world", "world"),
    "mics": ("node", "node", "node", "node"),
    "hpz": ("world", "node", "world", "world"),
    "topo": ("pair", "pair", "node", "world"),
}
"""Levels of weights, backward weights, gradients, optimizer state."""
STATES = ("weights", "backward_weights", "gradients", "optimizer")
"""The keys of a placement."""


@dataclass(frozen=True)
class Placement:
    """Depths: the number of levels, fastest first, over which each state is sharded. 0: none.

    All gathers read the copy of the weights at depth `backward_weights`, which publishing updates.
    If that is below `weights`, it is the secondary copy of ZeRO++'s hpZ. A primary copy at depth
    `weights` is not kept then, because publishing reads the masters.
    """

    weights: int
    backward_weights: int
    gradients: int
    optimizer: int
    has_copy: bool = field(default=True, kw_only=True)
    """Whether a copy of the weights in the computing type is kept beside the fp32 masters. Without
    it, every gather casts this rank's masters and sends the result. `on` makes it true if the two
    are sharded through different levels, because the masters have to be published then."""

    def __post_init__(self) -> None:
        if not self.backward_weights <= self.weights <= self.gradients <= self.optimizer:
            raise UserError(
                f"partition: placement {self} does not nest, need "
                "backward_weights within weights within gradients within optimizer"
            )

    @classmethod
    def named(cls, strategy: str, levels: Levels) -> "Placement":
        """The named strategy on these levels. Raises UserError for an unknown name."""
        if strategy not in STRATEGIES:
            raise UserError(
                f"partition.strategy: {strategy!r}, need one of {', '.join(STRATEGIES)}"
            )
        return cls(*(_depth(name, levels) for name in STRATEGIES[strategy]))

    @classmethod
    def from_config(
        cls,
        config: PartitionConfig | ExpertsPartitionConfig,
        levels: Levels,
        prefix: str = "partition",
        default: "Placement | None" = None,
    ) -> "Placement":
        """The placement of a configuration; `default`, or that of topo, if it names none. `prefix`
        precedes the keys in errors. Raises UserError for one that is not valid."""
        if isinstance(config, PartitionConfig):
            has_copy = config.weights_copy
        else:
            has_copy = default is None or default.has_copy
        return replace(cls._from_keys(config, levels, prefix, default), has_copy=has_copy)

    @classmethod
    def _from_keys(
        cls,
        config: PartitionConfig | ExpertsPartitionConfig,
        levels: Levels,
        prefix: str,
        default: "Placement | None",
    ) -> "Placement":
        chosen = {key: getattr(config, key) for key in STATES}
        given = {key: value for key, value in chosen.items() if value is not None}
        if not given:
            if config.strategy is None and default is not None:
                return default
            return cls.named(config.strategy or "topo", levels)
        if config.strategy is not None:
            raise UserError(
                f"{prefix}.strategy: {config.strategy}, and also {prefix}.{next(iter(given))}: "
                f"give a strategy or a placement, not both ({prefix}.strategy=null drops a file's)"
            )
        missing = [k for k in chosen if k not in given and k != "backward_weights"]
        if missing:
            raise UserError(
                f"{prefix}.{missing[0]}: missing, a placement needs weights, gradients, optimizer"
            )
        depths = {k: levels.depth(v, f"{prefix}.{k}") for k, v in given.items()}
        depths.setdefault("backward_weights", depths["weights"])
        _check_nesting(given, depths, prefix)
        return cls(*(depths[state] for state in chosen))

    @property
    def error_feedback_levels(self) -> range:
        """Levels whose gradient messages may have error feedback: those reduced over once a step,
        or, if there are none, those reduced over in every micro-batch."""
        first = self.gradients if self.gradients < self.optimizer else 0
        return range(first, self.optimizer)

    def on(self, levels: Levels) -> "Placement":
        """The same placement without levels of a single rank at the end of its depths: they do not
        shard anything. Raises UserError if it needs more levels than there are."""
        if self.optimizer > len(levels.sizes):
            raise UserError(f"partition: placement {self}, need depths up to {len(levels.sizes)}")

        def tight(depth: int) -> int:
            while depth and levels.sizes[depth - 1] == 1:
                depth -= 1
            return depth

        depths = (self.weights, self.backward_weights, self.gradients, self.optimizer)
        here = [tight(depth) for depth in depths]
        return Placement(*here, has_copy=self.has_copy or here[1] != here[3])

    @property
    def is_persistent(self) -> bool:
        """Whether the weights stay unsharded from step to step."""
        return self.backward_weights == 0 and self.has_copy


def reason_for_copy(
    placements: Sequence[Placement], precision: str, have_deltas: bool
) -> str | None:
    """What to change so that there may be no copy of the weights beside the masters; None if some
    of the placements, each `on` its levels, does without. `have_deltas`: wires send changes."""
    # Unsharded fp32 weights are the masters.
    if not any(not p.has_copy and (p.optimizer or precision != "fp32") for p in placements):
        fits = "need true, or weights and optimizer sharded through the same levels"
        return f"{fits}, in fp32 over more than one rank"
    return "need wires without deltas" if have_deltas else None


def _depth(name: str, levels: Levels) -> int:
    """Depth of a strategy's level. On a machine without that name, `pair` is the fastest level and
    `world` the slowest."""
    if name in levels.names:
        return levels.depth(name, "partition.strategy")
    return {"none": 0, "pair": 1, "node": node_depth(levels), "world": len(levels.names)}[name]


def node_depth(levels: Levels) -> int:
    """How many levels lie within a node: up to the one named `node`, or else all but the last."""
    return levels.depth("node") if "node" in levels.names else max(1, len(levels.names) - 1)


def _check_nesting(given: dict[str, str], depths: dict[str, int], prefix: str) -> None:
    order = ("backward_weights", "weights", "gradients", "optimizer")
    for inner, outer in pairwise(order):
        if depths[inner] > depths[outer]:
            raise UserError(
                f"{prefix}.{inner}: {given.get(inner)} reaches further than {prefix}.{outer} "
                f"({given.get(outer)}), need a level within it"
            )
