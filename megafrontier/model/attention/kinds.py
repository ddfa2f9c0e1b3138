"""The kinds of attention by name, and the kind of each block of a model."""

import torch

from megafrontier.common.errors import need
from megafrontier.config import ModelConfig
from megafrontier.model.attention.base import Attention, Feature
from megafrontier.model.attention.delta import DeltaAttention
from megafrontier.model.attention.latent import LatentAttention
from megafrontier.model.attention.softmax import SoftmaxAttention

KINDS: dict[str, type[Attention]] = {
    "softmax": SoftmaxAttention,
    "latent": LatentAttention,
    "delta": DeltaAttention,
}
"""By their names in `AttentionConfig.kind_of`."""


def kind_of(config: ModelConfig, block: int) -> type[Attention]:
    """The kind of attention of a block, counted from 0."""
    return KINDS[config.attention.kind_of(block)]


def kinds_of(config: ModelConfig) -> dict[str, type[Attention]]:
    """The kinds of all blocks, by name, in the order of the first block of each."""
    names = dict.fromkeys(config.attention.kind_of(i) for i in range(config.trained_layers))
    return {name: KINDS[name] for name in names}


def blocks_with_logits(config: ModelConfig) -> dict[int, str]:
    """The numbers and names of the blocks whose attention has logits."""
    numbers = (i for i in range(config.trained_layers) if kind_of(config, i).has_logits)
    return {i: "prediction" if i == config.layers else f"blocks.{i}" for i in numbers}


def need_feature(config: ModelConfig, feature: Feature, key: str, value: object, fits: str) -> None:
    """Raises UserError with a key, its value and what fits, for a model of which some block's
    attention does not support a feature."""
    for name, kind in kinds_of(config).items():
        need(feature in kind.supports, key, value, f"{fits} with {name} attention")


def make_attention(config: ModelConfig, number: int) -> Attention:
    """The attention of the block of this number. Raises UserError for a model that it does not
    fit."""
    kind = kind_of(config, number)
    kind.check(config)
    if config.dropout:
        need_feature(config, "dropout", "model.dropout", config.dropout, "need 0")
    return kind(config, number)


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
        """`capacity` in tokens (default: the model's sequence length), for `batch` rows. Raises
        UserError for attention without a cache."""
        for name, kind in kinds_of(config).items():
            fits = "need a kind of attention with a cache"
            need("cache" in kind.supports, "model.attention", name, fits)
        self.capacity = capacity or config.sequence_length
        self.length = 0
        self.layers = [
            kind_of(config, i).make_cache(config, batch, self.capacity, dtype, device)
            for i in range(config.layers)
        ]
