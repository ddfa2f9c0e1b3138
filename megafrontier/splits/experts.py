"""Expert parallelism: each rank has some experts, and tokens move to theirs and back.

Tokens move level by level (token_routes.py): over each level once per distinct group beyond it,
however many of the token's experts lie there. Weighted results of the experts are summed inside
before they go back over the level. Gradients take the same routes in the other direction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.common.errors import UserError
from megafrontier.model.gpt import GPT
from megafrontier.model.moe.dispatch import run_experts
from megafrontier.model.moe.experts import Experts
from megafrontier.model.moe.layer import MoE
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition.engine import Engine
from megafrontier.splits.cut import cut_parameters
from megafrontier.splits.token_dispatch import Move, TokenExchange, TokenRoutes
from megafrontier.splits.token_routes import Counts


def check_expert_split(experts: int, size: int, key: str = "parallel.expert") -> None:
    """Raises UserError if `size` ranks cannot divide the experts of a block."""
    if experts % size:
        fits = ", ".join(str(n) for n in range(1, experts + 1) if not experts % n)
        raise UserError(
            f"{key}: {size}, does not divide model.moe.experts ({experts}), need one of {fits}"
        )


def split_experts(model: GPT, index: int, size: int, pieces: int = 1) -> "ExpertGroup":
    """Leave the `index`-th of `size` parts of each block's experts in a GPT, which may be on the
    meta device.

    Call it before `shard`, and connect the result to the engine after that. The model's forward
    then takes this rank's tokens, and returns the sum of their losses. Raises UserError for a
    number of experts that `size` does not divide.
    """
    group = ExpertGroup(pieces)
    if model.config.moe is not None:
        check_expert_split(model.config.moe.experts, size)
    cut_parameters(model, ["expert"], "expert", index, size)
    for block in model.trained_blocks():
        if isinstance(block.mlp, MoE):
            block.mlp.dispatch = group.dispatch
    return group


class ExpertGroup:
    """The ranks that share the experts of blocks."""

    def __init__(self, pieces: int = 1) -> None:
        """`pieces`: in which the tokens of a forward move. While the experts process one, the next
        is on its way, and so are the results of the one before."""
        self._pieces = pieces

    def connect(self, engine: Engine, hierarchy: Hierarchy, wires: WorkWires = UNCHANGED) -> None:
        """Let tokens move over the levels of `hierarchy`, on the streams of `engine`. Call it
        before the first forward."""
        self._exchange = TokenExchange(engine, hierarchy, wires)

    def dispatch(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor, experts: Experts
    ) -> Callable[[], Tensor]:
        """`model.moe.dispatch.Dispatch` over the ranks."""
        inputs = (values.tensor_split(self._pieces) for values in (hidden, chosen, weights))
        pieces = list(zip(*inputs, strict=True))
        # All counts first: those of a piece would wait for the tokens of the one before.
        counted = [self._exchange.chunks(owners // experts.count) for _, owners, _ in pieces]
        started = [
            _Passage(self._exchange, experts, chunks[0][1]).start(*piece)
            if len(chunks) == 1
            else partial(self._in_chunks, chunks, experts, *piece)
            for chunks, piece in zip(counted, pieces, strict=True)
        ]
        return partial(_finish, started)

    def _in_chunks(
        self,
        chunks: Sequence[tuple[Tensor, Counts]],
        experts: Experts,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor,
    ) -> Callable[[], Tensor]:
        """Process one chunk after another. Backward moves the tokens of each again, so that only
        one chunk's are held at a time."""

        def run(rows: Tensor, counts: Counts, *inputs: Tensor) -> Tensor:
            return _Passage(self._exchange, experts, counts).start(*inputs)()()

        found = [
            checkpoint(
                run,
                rows,
                counts,
                *(values[rows] for values in (hidden, chosen, weights)),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for rows, counts in chunks
        ]
        order = torch.cat([rows for rows, _ in chunks]).argsort()
        return lambda: torch.cat(found)[order]


def _finish(started: Sequence[Callable[[], Callable[[], Tensor]]]) -> Tensor:
    """Let the experts process one piece after another, then wait for the results."""
    found = [wait() for wait in [process() for process in started]]
    return found[0] if len(found) == 1 else torch.cat(found)


# The way of some tokens, for autograd


@dataclass
class _Passage:
    """The way of some tokens to their experts and back.

    Each way has two operators, one that starts it and one that waits. What the model computes
    between the two runs while tokens move. Backward runs through them in reverse, so that the
    gradients of what is computed between are computed while gradients of tokens move.
    """

    exchange: TokenExchange
    experts: Experts
    counts: Counts
    routes: TokenRoutes = field(default_factory=TokenRoutes)
    move: Move | None = None
    """In flight."""

    def start(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor
    ) -> Callable[[], Callable[[], Tensor]]:
        """Start hidden [n, h] on their way. The result waits for the rows that arrive, processes
        them and starts the results on their way. What it returns waits and returns the sums
        [n, h]."""
        started: Tensor = _StartDispatch.apply(hidden, chosen, weights, self)
        return partial(self._process, started)

    def _process(self, started: Tensor) -> Callable[[], Tensor]:
        rows, weights = _FinishDispatch.apply(started, self)
        pairs = self.counts.pairs(self.exchange.rank)
        outputs = run_experts(rows, self.routes.experts, weights, self.experts, pairs)
        # With `rows`, because without a row here the outputs may not depend on them. Backward has
        # to pass all ranks' operators.
        started = _StartCollect.apply(outputs, rows, self)
        return partial(_FinishCollect.apply, started, self)


class _StartDispatch(torch.autograd.Function):
    """hidden [n, h], chosen and weights [n, k] → an empty tensor that `_FinishDispatch` takes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, passage: _Passage
    ) -> Tensor:
        ctx.passage = passage
        passage.move, passage.routes = passage.exchange.start_dispatch(
            hidden, chosen, weights, passage.counts, passage.experts.count
        )
        return hidden.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        passage = ctx.passage
        by_hidden, by_weights = passage.exchange.wait(passage.move)
        passage.move = None
        return by_hidden, None, by_weights, None


class _FinishDispatch(torch.autograd.Function):
    """The rows [m, h] that arrive, and their weights [m, k]."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, passage: _Passage) -> tuple[Tensor, Tensor]:
        ctx.passage = passage
        assert passage.move is not None
        rows = passage.exchange.finish_dispatch(passage.move, passage.routes, passage.experts.count)
        passage.move = None
        # `passage` must not keep them: with their history they hold the passage.
        weights, passage.routes.weights = passage.routes.weights, rows.new_empty(0)
        return rows, weights

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        passage, (by_rows, by_weights) = ctx.passage, grad_outputs
        passage.move = passage.exchange.start_collect(by_rows, passage.routes, by_weights)
        return by_rows.new_empty(0), None


class _StartCollect(torch.autograd.Function):
    """Outputs of rows [m, h] → an empty tensor that `_FinishCollect` takes."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, rows: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        passage.move = passage.exchange.start_collect(outputs, passage.routes)
        return outputs.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor, None, None]:
        passage = ctx.passage
        by_outputs, _ = passage.exchange.wait(passage.move)
        passage.move = None
        return by_outputs, None, None


class _FinishCollect(torch.autograd.Function):
    """The sums by token [n, h]."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        assert passage.move is not None
        found, _ = passage.exchange.wait(passage.move)
        passage.move = None
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        passage = ctx.passage
        passage.move = passage.exchange.start_spread(grad_outputs[0], passage.routes)
        return grad_outputs[0].new_empty(0), None
