"""Causal softmax attention, with windows, capped scores and sinks."""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.attention.base import HeadAttention, LayerCache
from megafrontier.model.kernels import backends
from megafrontier.model.kernels.backends import (
    DOCUMENTS,
    MASKED,
    MASKED_PARTS,
    WHOLE,
    Computed,
    form_of,
    sizes_of,
    torch_backend,
)
from megafrontier.model.kernels.blockwise import Rule, add_sinks_, attend
from megafrontier.model.kernels.chunks import chunk_attention
from megafrontier.model.kernels.exchanges import Exchange
from megafrontier.model.kernels.flash import (
    Heads,
    Keep,
    Scope,
    keep_largest_,
    kernel_of,
    returns_traced_shape,
)
from megafrontier.model.kernels.varlen import document_attention
from megafrontier.model.positions import AttentionContext, row_documents
from megafrontier.model.scaling import multipliers, scaled
from megafrontier.parallel.param_spec import ParamSpec, set_spec


class KeyValueCache(LayerCache):
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


class SoftmaxAttention(HeadAttention):
    """Each token has weights for itself and those before it, which are the softmax of scores."""

    supports = frozenset(("documents", "context", "cache", "dropout"))
    has_logits = True

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        super().__init__(config, number)
        self.dropout = config.dropout
        # Kernels divide scores by the root of the head size.
        given = config.attention.scale
        scale = 1.0 if given is None else given * sqrt(config.head_dim)
        self.multiplier = scale * multipliers(config).query
        self.window = config.window_of(number) or 0
        self.softcap = config.attention.softcap or 0.0
        self.over_chunks: Callable[..., Tensor] | None = None
        """`chunk_attention`, up to the exchange, if this module gets parts of documents."""
        self.largest: Tensor | None = None
        """The largest log-sum of each head's logits in training, fp32 [heads], since it was set. If
        it is set, attention has a kernel with log-sums."""
        self.sinks: nn.Parameter | None = None
        if config.attention.sinks:
            self.sinks = nn.Parameter(torch.empty(self.heads))
            set_spec(self.sinks, ParamSpec("", (self.heads,), "bias", cut="heads"))

    def largest_norms(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        (query, key, _), _ = self._project(hidden, context)
        query, key = query.float() * self.multiplier, key.float()
        return torch.stack([part.norm(dim=-1).amax() for part in (query, key)])

    def attend(self, heads: Heads, context: AttentionContext, cache: LayerCache | None) -> Tensor:
        (query, key, value), documents = heads, context.documents
        query = scaled(query, self.multiplier)
        dropout = self.dropout if self.training else 0.0
        keep: Keep | None = None
        if self.largest is not None and self.training:
            keep = partial(keep_largest_, self.largest, context.counted)
        if self.over_chunks is not None:
            assert documents is not None
            return self.over_chunks(query, key, value, documents, dropout, self.sinks, keep)
        if keep is not None and documents is None:
            documents = row_documents(*context.shape, query.device)
        if documents is not None and context.mask is None:
            query, key, value = (part.flatten(0, 1) for part in (query, key, value))
            rule = self.sinks, self.window, self.softcap, keep
            return document_attention(query, key, value, documents, context.shape[1], *rule)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if isinstance(cache, KeyValueCache):
            key, value = cache.extend(key, value)
        if self.window or self.softcap or self.sinks is not None:
            attended = self._attend_cached(query, key, value)
        else:
            attended = self._attend(query, key, value, context.mask, dropout)
        return attended.transpose(1, 2)

    def _attend_cached(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the last tokens to all cached ones, [b, heads, s, d] → the same shape."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        rule = Rule(key.shape[1] - query.shape[1], self.window, self.softcap)
        attended, sums = attend(query, key, value, rule)
        if self.sinks is not None:
            for row, row_sums in zip(attended, sums, strict=True):
                add_sinks_(row, row_sums, self.sinks)
        return attended.transpose(1, 2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
    ) -> Tensor:
        sharing = query.shape[1] // key.shape[1]
        grouped = sharing > 1
        if grouped and not backends.supports_gqa(query.device, query.dtype, mask is not None):
            key, value = (t.repeat_interleave(sharing, 1) for t in (key, value))
            grouped = False
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and query.shape[2] > 1,
            enable_gqa=grouped,
        )

    def split_sequences(self, exchange: Exchange, size: int, keeps_keys: bool) -> None:
        self.over_chunks = partial(
            chunk_attention,
            exchange=exchange.of_window(self.window).number,
            size=size,
            keeps_keys=keeps_keys,
            window=self.window,
            softcap=self.softcap,
        )

    @classmethod
    def shrunk_rows(cls, config: ModelConfig, shrink: Tensor) -> dict[str, Tensor]:
        """A key that heads of queries share shrinks for the one that needs it most. The queries of
        the others grow by as much, so that their logits stay."""
        groups = shrink.view(config.num_kv_heads, -1)
        keys = groups.amin(1).sqrt()
        heads = torch.cat([(groups / keys[:, None]).flatten(), keys])
        rows = heads.repeat_interleave(config.head_dim)
        return {"qkv.weight": rows, "qkv.bias": rows}

    @classmethod
    def make_cache(
        cls, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: Any
    ) -> LayerCache:
        shape = batch, config.num_kv_heads, capacity, config.head_dim
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return KeyValueCache(keys, values)

    @classmethod
    def flops(cls, config: ModelConfig, block: int) -> float:
        """12 · heads · head_size for each token that a token attends to, on average over a full
        sequence. head_size is the mean of those of keys and of values."""
        length = config.sequence_length
        window = min(config.window_of(block) or length, length)
        attended = window - window * window / (2 * length)
        return 6.0 * config.heads * (config.head_dim + config.value_dim) * attended

    @classmethod
    def needs_rows(cls, config: ModelConfig) -> bool:
        return config.attention.has_rule

    @classmethod
    def needs_mask(cls, config: ModelConfig, computed: Computed, dropout: float) -> bool:
        return form_of(config, computed, dropout) is MASKED

    @classmethod
    def uncompilable(cls, config: ModelConfig, computed: Computed) -> str | None:
        # Evaluations have no dropout. Parts of sequences have the form of training there, too.
        form = form_of(config, computed, config.dropout if computed.context else 0.0)
        if form is MASKED_PARTS:
            return "attention over parts of sequences (parallel.context) has a mask here"
        if form is DOCUMENTS and not returns_traced_shape(*sizes_of(config, computed)):
            return "this GPU's attention within documents (data.document_mask) is of another shape"
        return None

    @classmethod
    def kernel(cls, config: ModelConfig, computed: Computed) -> str:
        """For example "flash" or "dense mask, math" of torch, "varlen flash" within documents,
        "chunks, flash" of parts of sequences; "plain torch" for windows that flash does not have.
        """
        form = form_of(config, computed, config.dropout)
        if form is MASKED_PARTS:
            return "chunks, masked"
        if form in (WHOLE, MASKED):
            return ("dense mask, " if form is MASKED else "") + torch_backend(config, computed)
        is_whole = form is DOCUMENTS
        scope = Scope(torch.empty(0) if is_whole else None, softcap=config.attention.softcap or 0.0)
        sizes, sinks = sizes_of(config, computed), config.attention.sinks and is_whole
        windows = {config.window_of(i) or 0 for i in range(config.layers)}
        names = {kernel_of(sizes, scope._replace(window=w), sinks).name for w in windows}
        return f"{'varlen' if is_whole else 'chunks,'} {' and '.join(sorted(names))}"
