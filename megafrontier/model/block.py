"""One transformer block: norms, attention, MLP and residual sums."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.attention.base import LayerCache
from megafrontier.model.attention.kinds import make_attention
from megafrontier.model.init import matrix_std
from megafrontier.model.linear import Linear
from megafrontier.model.mlp import MLP
from megafrontier.model.moe.layer import MoE, has_experts
from megafrontier.model.norms import make_norm
from megafrontier.model.positions import AttentionContext
from megafrontier.model.recompute.checkpointing import Mode, run_checkpointed
from megafrontier.model.recompute.offload import Offload
from megafrontier.model.scaling import multipliers


class Block(nn.Module):
    """Attention and MLP, sequential (GPT-2, Llama) or parallel (GPT-NeoX), with norms before them
    (GPT-2, Llama), after them (OLMo-2) or both (Gemma 2).

    Compilation and activation checkpointing happen inside `forward`, so that hooks on the block run
    once per call, outside both.
    """

    def __init__(
        self,
        config: ModelConfig,
        number: int = 0,
        *,
        checkpointing: Mode = "none",
        offload: Offload | None = None,
        run: Callable[..., Tensor] | None = None,
        attend: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """`number`: of the block, from 0. `offload` keeps the input on the host until backward.
        `run` is called in place of `Block.forward_recomputed`, and `attend` in place of
        `Block.attend`, for example compiled versions."""
        super().__init__()
        self.parallel = config.parallel_residual
        self.dropout = config.dropout
        self.multiplier = multipliers(config).residual
        self.checkpointing = checkpointing
        self.offload = offload
        self._run = run or Block.forward_recomputed
        self._attend = attend or Block.attend
        position = config.norm_position_of(number)
        before, after = (position in (place, "both") for place in ("before", "after"))
        self.norm1 = make_norm(config) if before else None
        self.attention = make_attention(config, number)
        self.post_norm1 = make_norm(config) if after else None
        self.norm2 = make_norm(config) if before else None
        moe = config.moe if has_experts(config, number) else None
        self.mlp = MLP(config) if moe is None else MoE(config, moe, number)
        self.post_norm2 = make_norm(config) if after else None
        self._measures, self._measured = False, Tensor()

    def forward(
        self, hidden: Tensor, context: AttentionContext, cache: LayerCache | None = None
    ) -> Tensor:
        """hidden [b, s, hidden] → [b, s, hidden]."""
        if cache is not None:
            return self._compute(hidden, context, cache)
        if self._measures:
            self._measures = False
            self._measured = self._measure(hidden, context)
        with nullcontext() if self.offload is None else self.offload.applied_to(hidden):
            return self._run(self, hidden, context)

    def measure_next(self) -> None:
        """Let the next forward keep `Attention.largest_norms` for `take_measured`."""
        self._measures = True

    def take_measured(self) -> Tensor:
        """What the forward after `measure_next` has kept."""
        return self._measured

    @torch.no_grad()
    def _measure(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        # By an extra projection, because a compiled or recomputed block cannot keep anything.
        return self.attention.largest_norms(_normalised(self.norm1, hidden), context)

    def forward_recomputed(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """`forward` without a cache, saving for backward what the checkpointing mode says."""
        draws = self.training and self.dropout > 0
        return run_checkpointed(
            self.checkpointing, self._compute, hidden, context, draws_random_numbers=draws
        )

    def _compute(
        self, hidden: Tensor, context: AttentionContext, cache: LayerCache | None = None
    ) -> Tensor:
        attend = self._attend if cache is None else Block.attend
        hidden, normed = attend(self, hidden, context, cache)
        return self._add(hidden, _normalised(self.post_norm2, self._feed(normed, context)))

    def attend(
        self, hidden: Tensor, context: AttentionContext, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden [b, s, hidden] → the sum after attention, and the MLP's input."""
        branch = self.attention(_normalised(self.norm1, hidden), context, cache)
        attended = self._add(hidden, _normalised(self.post_norm1, branch))
        return attended, _normalised(self.norm2, hidden if self.parallel else attended)

    def _feed(self, normed: Tensor, context: AttentionContext) -> Tensor:
        """The output of the MLP or of the experts."""
        inputs = (normed, context.counted) if isinstance(self.mlp, MoE) else (normed,)
        output: Tensor = self.mlp(*inputs)
        return output

    def _add(self, hidden: Tensor, branch: Tensor) -> Tensor:
        dropped = F.dropout(branch, self.dropout, self.training)
        return torch.add(hidden, dropped, alpha=self.multiplier)


class Prediction(nn.Module):
    """A block that predicts the token after the next one: DeepSeek-AI 2024, arXiv:2412.19437,
    section 2.2, with a depth of 1."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        """`options`: of the block."""
        super().__init__()
        self.hidden_norm, self.token_norm = make_norm(config), make_norm(config)
        self.projection = Linear(2 * config.hidden, config.hidden, matrix_std(config))
        self.block = Block(config, config.layers, **options)
        self.norm = make_norm(config)

    def forward(self, hidden: Tensor, following: Tensor, context: AttentionContext) -> Tensor:
        """The last hidden state and the embedding of the next tokens, each [b, s, hidden] → the
        input of the head's matrix [b, s, hidden]."""
        both = torch.cat([self.hidden_norm(hidden), self.token_norm(following)], -1)
        found: Tensor = self.norm(self.block(self.projection(both), context))
        return found


def _normalised(norm: nn.Module | None, hidden: Tensor) -> Tensor:
    return hidden if norm is None else norm(hidden)
