"""Norms of hidden states, and of queries and keys."""

import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.init import with_specs


class OffsetRMSNorm(nn.RMSNorm):
    """An RMS norm that multiplies by 1 + weight, as Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        """x [.., normalized_shape] → the same shape and type."""
        # In fp32, because 1 + weight in bf16 would lose small weights.
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    """The configured norm of [..., hidden], with statistics in fp32 and the result in the input's
    type.

    Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    if config.norm == "rmsnorm":
        return make_rms_norm(config, config.hidden)
    norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.norm_bias)
    return with_specs(norm, "norm")


def make_rms_norm(config: ModelConfig, size: int) -> nn.RMSNorm:
    """An RMS norm of [..., size], with the model's epsilon and offset."""
    kind = OffsetRMSNorm if config.norm_unit_offset else nn.RMSNorm
    norm = kind(size, eps=config.norm_eps)
    return with_specs(norm, "norm", mean=0.0 if config.norm_unit_offset else 1.0)
