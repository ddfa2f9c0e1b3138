"""Norms of hidden states, and of queries and keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.init import with_specs
from megafrontier.model.ranks import DividedModule


class OffsetRMSNorm(nn.RMSNorm):
    """An RMS norm that multiplies by 1 + weight, as Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        """x [.., normalized_shape] → the same shape and type."""
        return _rms_norm(x, self.weight, self.eps, has_offset=True)


class AllHeadsNorm(DividedModule, nn.RMSNorm):
    """An RMS norm of all heads of queries, or of keys, together.

    If ranks divide the heads, they exchange a sum of squares for each token. The weight is whole on
    each rank, which uses the part of its heads: the engine sums the gradient over the ranks, as of
    other norms. If there are more ranks than heads of keys, several have the same head.
    """

    def __init__(self, size: int, eps: float, has_offset: bool) -> None:
        super().__init__(size, eps=eps)
        self._has_offset = has_offset

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, heads, d] → the same shape and type."""
        rows, ranks = x.flatten(2), self.ranks
        if ranks is None:
            return _rms_norm(rows, self.weight, self.eps, self._has_offset).view_as(x)
        values, width, whole = rows.float(), rows.shape[-1], len(self.weight)
        squares = ranks.gather_tokens(values.square().sum(-1).view(-1, 1))
        squares = squares.view(ranks.size, -1).sum(0)
        copies = width * ranks.size // whole
        scale = torch.rsqrt(squares / (copies * whole) + (self.eps or 0.0))
        first = ranks.index // copies * width
        weight = self.weight[first : first + width].float()
        weight = 1.0 + weight if self._has_offset else weight
        return (values * scale.view(*rows.shape[:-1], 1) * weight).to(x.dtype).view_as(x)


def _rms_norm(x: Tensor, weight: Tensor, eps: float | None, has_offset: bool) -> Tensor:
    if not has_offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    # In fp32, because 1 + weight in bf16 would lose small weights.
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    """The configured norm of [..., hidden], with statistics in fp32 and the result in the input's
    type.

    Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    if config.norm == "rmsnorm":
        return make_rms_norm(config, config.hidden)
    norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.norm_bias)
    return with_specs(norm, "norm")


def make_rms_norm(config: ModelConfig, size: int, all_heads: bool = False) -> nn.RMSNorm:
    """An RMS norm of [..., size], with the model's epsilon and offset. `all_heads`: of the heads
    [..., heads, d] of a token together."""
    eps, has_offset = config.norm_eps, config.norm_unit_offset
    kind = OffsetRMSNorm if has_offset else nn.RMSNorm
    norm = AllHeadsNorm(size, eps, has_offset) if all_heads else kind(size, eps=eps)
    return with_specs(norm, "norm", mean=0.0 if has_offset else 1.0)
