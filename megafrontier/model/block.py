"""One transformer block: normalisation, attention, MLP, and the residual sums around them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafrontier.config import ModelConfig
from megafrontier.model.attention import Attention
from megafrontier.model.cache import LayerCache
from megafrontier.model.positions import Rotary
from megafrontier.model.sizes import ffn_hidden


def make_norm(config: ModelConfig) -> nn.Module:
    """The configured norm of [..., hidden]: statistics in fp32, the result in its input's type.

    Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps)


class MLP(nn.Module):
    """With swiglu `up` holds the rows of the gate, then those of the up projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        width = ffn_hidden(config)
        rows = 2 * width if self.activation == "swiglu" else width
        self.up = nn.Linear(config.hidden, rows, bias=config.bias)
        self.down = nn.Linear(width, config.hidden, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [b, s, hidden] → [b, s, hidden].

        GELU: Hendrycks and Gimpel 2016, arXiv:1606.08415 (`gelu_tanh` is its approximation);
        SwiGLU: Shazeer 2020, arXiv:2002.05202.
        """
        return self.down(self._activate(self.up(hidden)))

    def _activate(self, raised: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, up = raised.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.gelu(raised, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class Block(nn.Module):
    """A pre-norm block, sequential (GPT-2, Llama) or parallel (GPT-NeoX).

    With `keep_input_only` the activations inside are dropped after forward and computed again in
    backward. That happens inside `forward`, so that hooks on the block run once per call.
    """

    def __init__(self, config: ModelConfig, *, keep_input_only: bool = False) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.dropout = config.dropout
        self.keep_input_only = keep_input_only
        self.norm1 = make_norm(config)
        self.attention = Attention(config)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        hidden: Tensor,
        rotary: Rotary | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """hidden [b, s, hidden] → [b, s, hidden]; the others as Attention takes them."""
        if not (self.keep_input_only and torch.is_grad_enabled()):
            return self._run(hidden, rotary, mask, documents, cache)
        # Saving the state of the generators costs a synchronisation, so only where one is used.
        return checkpoint(
            self._run,
            hidden,
            rotary,
            mask,
            documents,
            use_reentrant=False,
            preserve_rng_state=self.training and self.dropout > 0,
        )

    def _run(
        self,
        hidden: Tensor,
        rotary: Rotary | None,
        mask: Tensor | None,
        documents: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        attended = self._drop(self.attention(self.norm1(hidden), rotary, mask, documents, cache))
        if self.parallel:
            return hidden + attended + self._drop(self.mlp(self.norm2(hidden)))
        hidden = hidden + attended
        return hidden + self._drop(self.mlp(self.norm2(hidden)))

    def _drop(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.dropout, self.training)
