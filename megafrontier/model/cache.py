"""Keys and values of the tokens a model has already seen, so that generation runs each once."""

import torch
from torch import Tensor

from megafrontier.config import ModelConfig
from megafrontier.model.sizes import head_size, kv_heads


class LayerCache:
    """Keys and values of one block: room for [b, kv_heads, capacity, head_size] each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self._length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values [b, kv_heads, s, head_size] of s tokens; returns all so far."""
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
        """Room for `capacity` tokens (default: the model's sequence length) of `batch` rows."""
        self.capacity = capacity or config.sequence_length
        self.length = 0
        shape = (batch, kv_heads(config), self.capacity, head_size(config))
        self.layers = [
            LayerCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
            for _ in range(config.layers)
        ]
