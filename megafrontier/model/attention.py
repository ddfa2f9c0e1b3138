"""Causal self-attention with grouped or latent keys and values, rotary positions and an optional
cache."""

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.init import matrix_std, with_specs
from megafrontier.model.kernels.backends import supports_gqa
from megafrontier.model.kernels.blockwise import Rule, add_sinks_, attend
from megafrontier.model.kernels.varlen import document_attention
from megafrontier.model.norms import make_rms_norm
from megafrontier.model.positions import AttentionContext, rotate
from megafrontier.model.scaling import multipliers, scaled
from megafrontier.parallel.param_spec import ParamSpec, set_spec


class LayerCache:
    """Keys and values of one block, each allocated as [b, kv_heads, capacity, head_size]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self._length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [b, kv_heads, s, head_size]. Returns all that are cached."""
        start, self._length = self._length, self._length + keys.shape[2]
        self._keys[:, :, start : self._length] = keys
        self._values[:, :, start : self._length] = values
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]


class KVCache:
    """The caches of all blocks, and how many tokens they hold."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int = 1,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`capacity` in tokens (default: the model's sequence length), for `batch` rows."""
        self.capacity = capacity or config.sequence_length
        self.length = 0
        shape = (batch, config.num_kv_heads, self.capacity, config.head_dim)
        self.layers = [
            LayerCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
            for _ in range(config.layers)
        ]


OverChunks = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, Tensor | None], Tensor]
"""Attention of parts of documents: query, key and value [1, n, heads, d], all documents, dropout
and sinks → [1, n, heads, d]. What `kernels.chunks.chunk_attention` does."""


class Attention(nn.Module):
    """`qkv` holds the rows of the query, key and value projections, in this order."""

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        """`number`: of the block, from 0."""
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.num_kv_heads
        self.head_size, self.value_size = config.head_dim, config.value_dim
        self.dropout = config.dropout
        # Kernels divide scores by the root of the head size.
        own = (
            1.0
            if config.attention.scale is None
            else config.attention.scale * sqrt(config.head_dim)
        )
        self.multiplier = own * multipliers(config).query
        self.window = config.window_of(number) or 0
        self.softcap = config.attention.softcap or 0.0
        self.over_chunks: OverChunks | None = None
        """Attends in place of this module, if it gets parts of documents."""
        self._add_projections(config)
        inner = self.heads * self.value_size
        out = nn.Linear(inner, config.hidden, bias=config.has_out_bias)
        self.out = with_specs(out, "matrix", matrix_std(config, to_residual=True))
        self.query_norm = self.key_norm = None
        if config.qk_norm != "none":
            is_full = config.qk_norm == "full"
            counts = (self.heads, self.kv_heads) if is_full else (1, 1)
            self.query_norm, self.key_norm = (
                make_rms_norm(config, count * self.head_size) for count in counts
            )
        self.sinks: nn.Parameter | None = None
        if config.attention.sinks:
            self.sinks = nn.Parameter(torch.empty(self.heads))
            set_spec(self.sinks, ParamSpec("", (self.heads,), "bias"))

    def _add_projections(self, config: ModelConfig) -> None:
        kv_inner = self.kv_heads * self.head_size
        self.widths = [self.heads * self.head_size, kv_inner, kv_inner]
        qkv = nn.Linear(config.hidden, sum(self.widths), bias=config.has_qkv_bias)
        self.qkv = with_specs(qkv, "matrix", matrix_std(config), head_rows=self.head_size)

    def _project(self, hidden: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [b, s, hidden] → queries, keys and values [b, s, heads, head_size], rotated."""
        rotary, (batch, length) = context.rotary, context.shape
        # With tensor parallelism `hidden` has some of the tokens, and the projection all of them.
        projected = self.qkv(hidden).view(batch, length, -1)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_size)) for part in projected.split(self.widths, -1)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = _normalised(self.query_norm, query), _normalised(self.key_norm, key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        return query, key, value

    def forward(
        self, hidden: Tensor, context: AttentionContext, cache: LayerCache | None = None
    ) -> Tensor:
        """hidden [b, s, hidden] → [b, s, hidden]."""
        mask, documents, (_, length) = context.mask, context.documents, context.shape
        query, key, value = self._project(hidden, context)
        query = scaled(query, self.multiplier)
        dropout = self.dropout if self.training else 0.0
        if self.over_chunks is not None:
            attended = self.over_chunks(query, key, value, documents, dropout, self.sinks)
            return self._merge(attended, context)
        if documents is not None:
            query, key, value = (heads.flatten(0, 1) for heads in (query, key, value))
            rule = self.sinks, self.window, self.softcap
            attended = document_attention(query, key, value, documents, length, *rule)
            return self._merge(attended, context)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        if cache is not None:
            key, value = cache.extend(key, value)
        if self.window or self.softcap or self.sinks is not None:
            attended = self._attend_cached(query, key, value)
        else:
            attended = self._attend(query, key, value, mask)
        return self._merge(attended.transpose(1, 2), context)

    def _merge(self, attended: Tensor, context: AttentionContext) -> Tensor:
        """The results of all heads [.., heads, head_size] → [b, s, hidden]."""
        if self.value_size < self.head_size:
            attended = attended[..., : self.value_size]
        found: Tensor = self.out(attended.reshape(*context.shape, -1))
        return found

    def _attend_cached(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the last tokens to all cached ones, [b, heads, s, d] → the same shape."""
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        rule = Rule(key.shape[1] - query.shape[1], self.window, self.softcap)
        attended, sums = attend(query, key, value, rule)
        if self.sinks is not None:
            for row, row_sums in zip(attended, sums, strict=True):
                add_sinks_(row, row_sums, self.sinks)
        return attended.transpose(1, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        grouped = self.kv_heads != self.heads
        if grouped and not supports_gqa(query.device, query.dtype, mask is not None):
            key, value = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (key, value))
            grouped = False
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and query.shape[2] > 1,
            enable_gqa=grouped,
        )


class LatentAttention(Attention):
    """Multi-head latent attention: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.

    Keys and values are expanded for all heads. Heads of queries and keys begin with their rotary
    part. Kernels need values as wide as keys, so zeros are appended to values.
    """

    def _add_projections(self, config: ModelConfig) -> None:
        latent = config.attention.latent
        assert latent is not None
        self.latent = latent

        def linear(inputs: int, outputs: int, head_rows: int = 0) -> nn.Linear:
            made = nn.Linear(inputs, outputs, bias=False)
            return with_specs(made, "matrix", matrix_std(config), head_rows=head_rows)

        self.query_down: nn.Linear | None = None
        self.query_latent_norm: nn.RMSNorm | None = None
        if latent.query is not None:
            self.query_down = linear(config.hidden, latent.query)
            self.query_latent_norm = make_rms_norm(config, latent.query)
        inputs = latent.query or config.hidden
        self.query_up = linear(inputs, self.heads * self.head_size, self.head_size)
        self.key_value_down = linear(config.hidden, latent.key_value + latent.rope_size)
        self.key_value_norm = make_rms_norm(config, latent.key_value)
        rows = latent.nope_size + latent.value_size
        self.key_value_up = linear(latent.key_value, self.heads * rows, rows)
        self.gather: nn.Module = nn.Identity()
        """With tensor parallelism: gets latents of some tokens, and returns those of all."""

    def _project(self, hidden: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        latent, rotary = self.latent, context.rotary
        down, shared = self.key_value_down(hidden).split([latent.key_value, latent.rope_size], -1)
        found = [self.key_value_norm(down), shared]
        if self.query_down is not None and self.query_latent_norm is not None:
            found.append(self.query_latent_norm(self.query_down(hidden)))
        widths = [part.shape[-1] for part in found]
        gathered = self.gather(torch.cat(found, -1)).view(*context.shape, -1)
        down, shared, *own = gathered.split(widths, -1)
        query = self.query_up(own[0] if own else hidden).view(*context.shape, -1, self.head_size)
        raised = self.key_value_up(down).unflatten(-1, (-1, latent.nope_size + latent.value_size))
        key, value = raised.split([latent.nope_size, latent.value_size], -1)
        shared = shared[:, :, None]
        if rotary is not None:
            query, shared = rotate(query, rotary), rotate(shared, rotary)
        key = torch.cat([shared.expand(-1, -1, key.shape[2], -1), key], -1)
        return query, key, F.pad(value, (0, self.head_size - self.value_size))


def make_attention(config: ModelConfig, number: int) -> Attention:
    """The attention of the block of this number."""
    kind = Attention if config.attention.latent is None else LatentAttention
    return kind(config, number)


def _normalised(norm: nn.RMSNorm, heads: Tensor) -> Tensor:
    """heads [b, s, heads, d], normalised each or all together, as the norm's size says."""
    rows = heads.flatten(2).unflatten(-1, (-1, *norm.normalized_shape))
    found: Tensor = norm(rows)
    return found.view_as(heads)
