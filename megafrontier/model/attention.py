"""Causal self-attention with grouped keys and values, rotary positions and an optional cache."""

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
        self.head_size = config.head_dim
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
        inner, kv_inner = self.heads * self.head_size, self.kv_heads * self.head_size
        self.widths = [inner, kv_inner, kv_inner]
        qkv = nn.Linear(config.hidden, sum(self.widths), bias=config.has_qkv_bias)
        out = nn.Linear(inner, config.hidden, bias=config.has_out_bias)
        self.qkv = with_specs(qkv, "matrix", matrix_std(config), head_rows=self.head_size)
        self.out = with_specs(out, "matrix", matrix_std(config, to_residual=True))
        self.query_norm = self.key_norm = None
        if config.qk_norm != "none":
            is_full = config.qk_norm == "full"
            sizes = (inner, kv_inner) if is_full else (self.head_size, self.head_size)
            self.query_norm, self.key_norm = (make_rms_norm(config, size) for size in sizes)
        self.sinks: nn.Parameter | None = None
        if config.attention.sinks:
            self.sinks = nn.Parameter(torch.empty(self.heads))
            set_spec(self.sinks, ParamSpec("", (self.heads,), "bias"))

    def forward(
        self, hidden: Tensor, context: AttentionContext, cache: LayerCache | None = None
    ) -> Tensor:
        """hidden [b, s, hidden] → [b, s, hidden]."""
        rotary, mask, documents, (batch, length) = context
        # With tensor parallelism `hidden` has some of the tokens, and the projection all of them.
        projected = self.qkv(hidden).view(batch, length, -1)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_size)) for part in projected.split(self.widths, -1)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = _normalised(self.query_norm, query), _normalised(self.key_norm, key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        query = scaled(query, self.multiplier)
        dropout = self.dropout if self.training else 0.0
        if self.over_chunks is not None:
            attended = self.over_chunks(query, key, value, documents, dropout, self.sinks)
            return self.out(attended.flatten(2))
        if documents is not None:
            query, key, value = (heads.flatten(0, 1) for heads in (query, key, value))
            rule = self.sinks, self.window, self.softcap
            attended = document_attention(query, key, value, documents, length, *rule)
            return self.out(attended.reshape(batch, length, -1))
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        if cache is not None:
            key, value = cache.extend(key, value)
        if self.window or self.softcap or self.sinks is not None:
            attended = self._attend_cached(query, key, value)
        else:
            attended = self._attend(query, key, value, mask)
        return self.out(attended.transpose(1, 2).flatten(2))

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


def _normalised(norm: nn.RMSNorm, heads: Tensor) -> Tensor:
    """heads [b, s, heads, d], normalised each or all together, as the norm's size says."""
    rows = heads.flatten(2).unflatten(-1, (-1, *norm.normalized_shape))
    found: Tensor = norm(rows)
    return found.view_as(heads)
