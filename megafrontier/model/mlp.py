"""The MLP of a block, and its activations."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.init import matrix_std
from megafrontier.model.kernels.gates import clipped, gated
from megafrontier.model.linear import Linear


def up_rows(config: ModelConfig, width: int) -> int:
    """Rows of the first matrix of an MLP of this width: with a gate those of the gate, then those
    of the up projection."""
    return 2 * width if config.is_gated else width


def activate(raised: Tensor, activation: str) -> Tensor:
    """The activation of [n, up_rows] → [n, width].

    GELU: Hendrycks and Gimpel 2016, arXiv:1606.08415 (`gelu_tanh` approximates it).
    SwiGLU and GEGLU: Shazeer 2020, arXiv:2002.05202. relu2, the square of ReLU: So et al. 2021,
    arXiv:2109.08668.
    """
    if activation == "swiglu":
        return gated(raised, "silu")
    if activation == "swiglu_clipped":
        return clipped(raised)
    if activation == "relu2":
        return F.relu(raised).square()
    approximate = "tanh" if activation.endswith("_tanh") else "none"
    if activation.startswith("geglu"):
        return gated(raised, f"gelu {approximate}")
    return F.gelu(raised, approximate=approximate)


class MLP(nn.Module):
    """With a gate, `up` holds the rows of the gate, then those of the up projection."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """`width`: default `config.mlp_hidden`."""
        super().__init__()
        self.activation = config.activation
        self.activate: Callable[[Tensor, str], Tensor] = activate
        """May be compiled where `forward` is not."""
        width = width or config.mlp_hidden
        bias, to_residual = config.has_mlp_bias, matrix_std(config, to_residual=True)
        rows = [width] * (up_rows(config, width) // width)
        self.up = Linear(config.hidden, rows, matrix_std(config), bias=bias, cut="columns")
        self.down = Linear(width, config.hidden, to_residual, bias=bias, cut="rows")

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [b, s, hidden] → [b, s, hidden]."""
        lowered: Tensor = self.down(self.activate(self.up(hidden), self.activation))
        return lowered
