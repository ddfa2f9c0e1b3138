"""Context parallelism of a GPT, applied from outside: each rank has some tokens of a micro-batch.

`documents.py` says which. Only keys and values cross ranks: each rank gets those of its documents'
earlier tokens in forward and again in backward, and sends back their gradients, which their owner
adds up. Heads that queries share travel once. Everything else in the model works on single tokens.

Parameters are replicated over these ranks as over those with other samples.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megafrontier.comm.rows import RouteStep
from megafrontier.comm.streams import AsyncChain
from megafrontier.common.async_copy import copy_async
from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig
from megafrontier.model.attention.kinds import need_feature
from megafrontier.model.gpt import GPT
from megafrontier.model.kernels.delta import Maps
from megafrontier.model.kernels.exchanges import AttentionPart, register
from megafrontier.model.recompute.checkpointing import RECOMPUTES_BLOCK
from megafrontier.splits.documents import assign, assign_over
from megafrontier.splits.key_routes import find_routes
from megafrontier.splits.state_scan import cut_documents, scan_states
from megafrontier.splits.tokens import TokenGroup

PIECES = 2
"""Of the heads of keys and values that travel, if there is overlap."""


def check_context_split(config: ModelConfig, size: int, key: str = "parallel.context") -> None:
    """Raises UserError for a model whose sequences `size` ranks cannot divide."""
    if size > 1:
        need_feature(config, "context", key, size, "need 1")
    length = config.sequence_length
    if size > 1 and length % (2 * size):
        fits = ", ".join(
            ["1", *(str(n) for n in range(2, length // 2 + 1) if not length % (2 * n))]
        )
        raise UserError(
            f"{key}: {size}, cuts sequences into {2 * size} chunks, which do not divide "
            f"model.sequence_length ({length}), need one of {fits}"
        )


def work_imbalance(documents: Tensor, size: int) -> float:
    """By what fraction the busiest of `size` ranks has more pairs (query, key) than the mean."""
    return assign(tuple(documents.tolist()), size).imbalance


def split_sequences(model: GPT, index: int, size: int) -> TokenGroup:
    """Let a GPT, which may be on the meta device, process the tokens of each micro-batch that the
    `index`-th of `size` ranks has.

    Call it before `shard`, and connect the result to the engine after that. The model's forward
    then takes whole micro-batches on each of the ranks, and returns the sum of the losses of
    `GPT.part` of them. Raises UserError as `check_context_split` does.
    """
    check_context_split(model.config, size)
    split = ContextSplit(TokenGroup(index, size))
    model.part = split.part
    for block in model.trained_blocks():
        keeps_keys = block.checkpointing in RECOMPUTES_BLOCK
        block.attention.split_sequences(split, size, keeps_keys)
    return split.group


class ContextSplit:
    """The ranks that share micro-batches, as an exchange of keys and values (`kernels.chunks`)."""

    def __init__(self, group: TokenGroup, window: int = 0) -> None:
        """`window`: the tokens that a token attends to, 0: all before it."""
        self.group, self.window = group, window
        self.number = register(self)
        self._windows: dict[int, ContextSplit] = {}

    def of_window(self, window: int) -> "ContextSplit":
        """The same ranks, for blocks whose tokens attend to `window` tokens."""
        if window == self.window:
            return self
        if window not in self._windows:
            self._windows[window] = ContextSplit(self.group, window)
        return self._windows[window]

    def part(self, values: Tensor, documents: Tensor) -> Tensor:
        """This rank's part [1, b · s / size, …] of values of all tokens [b, s, …]."""
        return values.flatten(0, 1)[self._routes(documents).tokens][None]

    def parts(self, documents: Tensor) -> Sequence[AttentionPart]:
        return self._routes(documents).parts

    def bounds(self, documents: Tensor) -> Tensor:
        return self._routes(documents).bounds

    def pieces(self, kv_heads: int) -> int:
        return PIECES if self.group.overlaps and kv_heads % PIECES == 0 else 1

    def has_cuts(self, documents: Tensor) -> bool:
        return bool(cut_documents(tuple(documents.tolist()), self.group.size))

    def cut_parts(self, documents: Tensor) -> Sequence[int]:
        bounds, sizes = tuple(documents.tolist()), self.group.levels
        cut = cut_documents(bounds, self.group.size)
        own = [part for part in assign_over(bounds, sizes) if part.rank == self.group.index]
        return [number for number, part in enumerate(own) if part.document in cut]

    def scan(self, maps: Maps, documents: Tensor, backwards: bool = False) -> Tensor:
        return scan_states(self.group, maps, tuple(documents.tolist()), backwards)

    def begin_gather(self, heads: Tensor, documents: Tensor) -> Callable[[], Tensor]:
        routes, exchange = self._routes(documents), self.group.rows
        room = heads.new_empty(routes.rows, *heads.shape[1:])
        room[: len(heads)] = heads
        chain = AsyncChain(room[: len(heads)], "gather activations", kind="activations")
        for step in routes.steps:
            exchange.then(chain, step.level, partial(exchange.spread, step, chain, room=room))
        return lambda: self.group.wait(chain).index_select(0, routes.past)

    def begin_reduce(
        self, heads: Tensor, documents: Tensor, dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        routes, exchange = self._routes(documents), self.group.rows
        rows = heads.new_zeros(routes.rows, *heads.shape[1:])
        rows[routes.past] = heads[: len(routes.past)]
        chain = AsyncChain(rows, "reduce activations", kind="activations")
        for step in reversed(routes.steps):
            exchange.then(chain, step.level, partial(exchange.collect, step, chain, dtype=dtype))
        return lambda: self.group.wait(chain)[: len(routes.tokens)]

    def _routes(self, documents: Tensor) -> "_DeviceRoutes":
        group = self.group
        ranks = group.levels, group.index, group.device
        return _find_routes(tuple(documents.tolist()), *ranks, self.window)


class _DeviceRoutes(NamedTuple):
    """`KeyRoutes`, with all numbers on the device."""

    parts: list[AttentionPart]
    bounds: Tensor
    """The start of each part among this rank's tokens, and their number, int32."""
    tokens: Tensor
    """This rank's tokens among all of the micro-batch."""
    past: Tensor
    steps: list[RouteStep]
    rows: int


@lru_cache(maxsize=32)
def _find_routes(
    documents: tuple[int, ...],
    sizes: tuple[int, ...],
    index: int,
    device: torch.device,
    window: int,
) -> _DeviceRoutes:
    own, pasts, past, planned, count = find_routes(documents, sizes, index, window)
    bounds = [*accumulate((part.stop - part.start for part in own), initial=0)]
    parts = [
        AttentionPart(slice(*at), past) for at, past in zip(pairwise(bounds), pasts, strict=True)
    ]
    tokens = torch.cat([torch.arange(part.start, part.stop) for part in own])
    steps, rows = [], bounds[-1]
    for level, numbers, sends, receives in planned:
        send = copy_async(torch.from_numpy(numbers), device)
        steps.append(RouteStep(level, send, sends, receives, rows))
        rows += sum(receives)
    starts = torch.tensor(bounds, dtype=torch.int32)
    at, before = copy_async(tokens, device), copy_async(torch.from_numpy(past), device)
    return _DeviceRoutes(parts, copy_async(starts, device), at, before, steps, count)
