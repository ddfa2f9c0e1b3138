"""Where tokens go in a simulation: what a router would decide, and a host read from the device.

| routing | |
|---|---|
| uniform | each expert gets equally many tokens, and a token's experts are independent |
| full | so many tokens go to the experts of the simulated rank that no more fit into one chunk |
| one | all tokens go to the same experts, in several chunks if one is too small |

The simulated rank has the first experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import ceil, comb
from typing import Literal

import torch
from torch import Tensor

from megafrontier.config import Config, DeviceConfig, MoEConfig
from megafrontier.model.moe.products import (
    PADDED_LIMIT,
    PRODUCTS,
    ExpertMLPs,
    Product,
    grouped_product,
    loop_product,
    pad_product,
)
from megafrontier.model.recompute.checkpointing import RECOMPUTES_BLOCK
from megafrontier.parallel.hierarchy import Levels
from megafrontier.planner.simulation.meter import running_meter
from megafrontier.splits.token_dispatch import PEAK, READERS
from megafrontier.splits.token_routes import Counts

RoutingKind = Literal["uniform", "full", "one"]
WITHOUT_GROUPED = ("MI100", "MI210", "MI250")
"""Parts of the names of accelerators for which torch has no grouped matrix product."""
_current: ContextVar["Routing"] = ContextVar("routing")


@dataclass(frozen=True)
class Routing:
    """The routing of all micro-batches of a simulation."""

    kind: RoutingKind
    moe: MoEConfig
    device: DeviceConfig

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tokens on the meta device go these ways in the body."""
        token = _current.set(self)
        PRODUCTS["meta"] = self.product
        try:
            yield
        finally:
            _current.reset(token)

    def counts(self, levels: Levels, tokens: int) -> Tensor:
        """The counts of every rank with `tokens` tokens each, as `Counts.of` would have them:
        int32 [ranks, n]."""
        ranks, active = levels.ranks, self.moe.active
        own = self.moe.experts // ranks
        there = min(active, own)
        chosen = 0 if self.kind == "uniform" else tokens
        if self.kind == "full":
            chosen = min(tokens, int(PEAK * tokens * active / (ranks * there)))
        others = tokens - chosen
        pairs = [others * active / ranks] * ranks
        if chosen:  # a token's first experts are those of the first rank
            pairs = [(others * active + chosen * (active - there)) / max(ranks - 1, 1)] * ranks
            pairs[0] = chosen * there
        # Rounded up, so that the first rank has no more than its share of all.
        row = [ceil(count) for count in pairs]
        for stride in levels.strides:
            share = distinct_share(self.moe, own * stride)
            reached = -(-active // (own * stride))
            row += [
                round(others * share * (index > 0 or not chosen)) + chosen * (index < reached)
                for index in range(ranks // stride)
            ]
        table: Tensor = torch.tensor([[*row, tokens]], dtype=torch.int32).expand(ranks, -1)
        return table

    @property
    def product(self) -> Product:
        """How the device multiplies the tokens of several experts."""
        if not self.device.is_accelerator:
            return _loop
        is_old = any(part in self.device.name for part in WITHOUT_GROUPED)
        return _padded if is_old else grouped_product


def worst_routing(config: Config) -> RoutingKind:
    """The routing that needs the most memory. Chunks are computed again in backward, so that many
    tokens in one chunk need more than several chunks, unless blocks are computed again anyway."""
    again = all(mode in RECOMPUTES_BLOCK for mode in config.checkpointing)
    return "one" if again else "full"


def _read_counts(levels: Levels, tokens: int) -> Counts:
    running_meter().synchronize()
    return Counts(levels, _current.get().counts(levels, tokens))


def _loop(tokens: Tensor, counts: Tensor, mlps: ExpertMLPs) -> Tensor:
    """`loop_product` of experts with equally many tokens, which needs as much memory as others."""
    each, more = divmod(len(tokens), len(counts))
    equal = torch.tensor([each + (index < more) for index in range(len(counts))])
    return loop_product(tokens, equal, mlps)


def _padded(tokens: Tensor, counts: Tensor, mlps: ExpertMLPs) -> Tensor:
    """`pad_product` of experts with equally many tokens, or with the most that are padded."""
    running_meter().synchronize()
    most = -(-len(tokens) // len(counts))
    if _current.get().kind != "uniform":
        padded = int(PADDED_LIMIT * len(tokens) / len(counts))
        most = max(most, min(padded, len(tokens)))  # an expert has no more than all tokens
    return pad_product(tokens, counts, mlps, most)


READERS["meta"] = _read_counts


def distinct_share(moe: MoEConfig, experts: int) -> float:
    """The share of tokens that have any of `experts` neighbouring experts, if a router chooses
    its groups, and experts in them, with equal probability."""
    size, groups = moe.experts // moe.groups.number, moe.groups
    whole, part = divmod(experts, size)
    total, missed = size * groups.active, 0.0
    for parts in range(min(1, part) + 1):
        for wholes in range(groups.active - parts + 1):
            rest = groups.number - whole - min(1, part)
            ways = comb(whole, wholes) * comb(rest, groups.active - wholes - parts)
            chance = ways / comb(groups.number, groups.active)
            free = total - wholes * size - parts * part
            missed += chance * comb(max(free, 0), moe.active) / comb(total, moe.active)
    return 1 - missed
