"""Gated delta attention: a state for each head in place of keys and values."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafrontier.config import DeltaConfig, ModelConfig
from megafrontier.model.attention.base import Attention, LayerCache
from megafrontier.model.init import matrix_std, with_specs
from megafrontier.model.kernels.backends import Computed
from megafrontier.model.kernels.delta import (
    DeltaTokens,
    convolve,
    delta_chunks,
    states_between,
)
from megafrontier.model.kernels.delta_parts import attend_parts, convolve_parts
from megafrontier.model.kernels.exchanges import Exchange
from megafrontier.model.linear import Linear
from megafrontier.model.positions import AttentionContext, document_numbers
from megafrontier.parallel.param_spec import ParamSpec, set_spec

DECAY_MEAN, DECAY_STD = 1.8, 0.7
"""Of the logarithm of a head's rate of decay: rates around 6."""
STEP_MEAN, STEP_STD = -4.6, 1.2
"""Of the bias of a token's step, around 0.01 after the softplus. A state then lasts for tens of
tokens in the mean, and for thousands in some heads."""


class DeltaCache(LayerCache):
    """The last tokens before the convolution [b, convolution - 1, channels], and the states fp32
    [b, heads, key_size, value_size]. Its size does not grow with the tokens."""

    def __init__(self, tokens: Tensor, states: Tensor) -> None:
        self.tokens, self.states = tokens, states


class DeltaAttention(Attention):
    """Gated delta attention: Yang et al. 2024, arXiv:2412.06464, with the gates of Qwen3-Next.

    `inputs` holds the rows of queries, keys, values, output gates, strengths and steps, in this
    order. Of a head, a token's decay is exp(-exp(log_decay) · softplus(step + step_bias)).
    """

    supports = frozenset(("documents", "context", "cache"))

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        super().__init__()
        delta = _delta(config)
        self.delta = delta
        values, heads = delta.mixed[-1], delta.value_heads
        widths = [*delta.mixed, values, heads, heads]
        self.inputs = Linear(config.hidden, widths, matrix_std(config), cut="columns")
        self.convolution: nn.Parameter | nn.ParameterList = _parameter(
            (sum(delta.mixed), delta.convolution), std=delta.convolution**-0.5, parts=delta.mixed,
        )  # fmt: skip
        self.log_decay = _parameter((heads,), DECAY_MEAN, DECAY_STD)
        self.step_bias = _parameter((heads,), STEP_MEAN, STEP_STD)
        eps = delta.norm_eps or config.norm_eps
        self.norm = with_specs(nn.RMSNorm(delta.value_size, eps=eps), "norm")
        std = matrix_std(config, to_residual=True)
        self.out = Linear(values, config.hidden, std, cut="rows")
        self._exchange: Exchange | None = None

    def forward(
        self, hidden: Tensor, context: AttentionContext, cache: LayerCache | None = None
    ) -> Tensor:
        batch, length = context.shape
        projected = self.inputs(hidden).view(batch, length, -1)
        *mixed, gate, strength, step = projected.split(self.inputs.widths, -1)
        numbers = None
        if self._exchange is None and context.documents is not None:
            numbers = document_numbers(context.documents, batch, length)
        tokens = torch.cat(mixed, -1)
        convolved = self._convolve(tokens, numbers, context, cache)
        heads = self._heads(convolved, strength, step)
        attended = self._attend(heads, numbers, context, cache)
        gate = gate.unflatten(-1, (-1, self.delta.value_size))
        norm = self.norm.normalized_shape, self.norm.weight.float(), self.norm.eps
        gated = F.rms_norm(attended, *norm) * F.silu(gate.float())
        output: Tensor = self.out(gated.to(hidden.dtype).flatten(2))
        return output

    def _heads(self, convolved: Tensor, strength: Tensor, step: Tensor) -> DeltaTokens:
        """What each head gets of the convolved channels and the two gates [b, s, ..]."""
        delta = self.delta
        query, key, value = convolved.split(self.inputs.widths[:3], -1)
        query, key = (
            _normalized(part.unflatten(-1, (-1, delta.key_size))) for part in (query, key)
        )
        sharing = delta.value_heads // delta.key_heads
        if sharing > 1:
            query, key = (part.repeat_interleave(sharing, 2) for part in (query, key))
        value = value.unflatten(-1, (-1, delta.value_size))
        rate = -self.log_decay.float().exp()
        decay = rate * F.softplus(step.float() + self.step_bias.float())
        query = query * delta.key_size**-0.5
        most = 2.0 if delta.negative_eigenvalues else 1.0
        return DeltaTokens(query, key, value, decay, most * strength.float().sigmoid())

    def _convolve(
        self,
        tokens: Tensor,
        numbers: Tensor | None,
        context: AttentionContext,
        cache: LayerCache | None,
    ) -> Tensor:
        """The causal convolution of each channel, and SiLU: [b, s, channels]."""
        parts = self.convolution  # several, if a split has cut each of them
        taps = torch.cat(list(parts)) if isinstance(parts, nn.ParameterList) else parts
        if self._exchange is not None and self.delta.convolution > 1:
            assert context.documents is not None
            return convolve_parts(tokens, taps, context.documents, self._exchange)
        before = None
        if isinstance(cache, DeltaCache):
            before = cache.tokens
            cache.tokens = torch.cat([before, tokens], 1)[:, tokens.shape[1] :]
        return convolve(tokens, taps, numbers, before)

    def _attend(
        self,
        heads: DeltaTokens,
        numbers: Tensor | None,
        context: AttentionContext,
        cache: LayerCache | None,
    ) -> Tensor:
        """The results, fp32 [b, s, heads, value_size]."""
        if self._exchange is not None:
            assert context.documents is not None
            return attend_parts(heads, context.documents, self._exchange)
        if isinstance(cache, DeltaCache):
            attended, cache.states = _attend_rows(heads, None, cache.states)
            return attended
        attended, _ = checkpoint(
            _attend_rows, heads, numbers, None, use_reentrant=False, preserve_rng_state=False
        )
        return attended

    def split_sequences(self, exchange: Exchange, size: int, keeps_keys: bool) -> None:
        self._exchange = exchange

    @classmethod
    def make_cache(
        cls, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: Any
    ) -> LayerCache:
        delta = _delta(config)
        size = batch, delta.convolution - 1, sum(delta.mixed)
        tokens = torch.zeros(size, dtype=dtype, device=device)
        shape = batch, delta.value_heads, delta.key_size, delta.value_size
        return DeltaCache(tokens, torch.zeros(shape, device=device))

    @classmethod
    def flops(cls, config: ModelConfig, block: int) -> float:
        """18 · heads · key_size · value_size: a token reads, corrects and adds to each state (2
        operations an element each), and backward takes twice as many."""
        delta = _delta(config)
        return 18.0 * delta.value_heads * delta.key_size * delta.value_size

    @classmethod
    def divided(cls, config: ModelConfig) -> dict[str, int]:
        delta = _delta(config)
        return {"model.attention.delta.key_heads": delta.key_heads}

    @classmethod
    def uncompilable(cls, config: ModelConfig, computed: Computed) -> str | None:
        if computed.context:
            return "delta attention over parts of sequences (parallel.context)"
        return None

    @classmethod
    def kernel(cls, config: ModelConfig, computed: Computed) -> str:
        return "chunks, delta rule"


def _delta(config: ModelConfig) -> DeltaConfig:
    assert config.attention.delta is not None
    return config.attention.delta


def _parameter(
    shape: tuple[int, ...], mean: float = 0.0, std: float = 0.0, parts: tuple[int, ...] = ()
) -> nn.Parameter:
    """A parameter of channels or heads, which optimizers treat as a bias."""
    parameter = nn.Parameter(torch.empty(shape).normal_(mean, std))
    spec = ParamSpec("", shape, "bias", init_mean=mean, init_std=std, cut="heads", parts=parts)
    set_spec(parameter, spec)
    return parameter


def _attend_rows(
    tokens: DeltaTokens, numbers: Tensor | None, states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result, and the states after the last tokens."""
    chunks = delta_chunks(tokens, numbers)
    before, last = states_between(chunks.maps, states)
    return chunks.outputs(before), last


def _normalized(heads: Tensor) -> Tensor:
    """Heads [.., d] of length 1, fp32."""
    heads = heads.float()
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
