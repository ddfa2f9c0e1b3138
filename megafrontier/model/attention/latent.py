"""Multi-head latent attention."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.attention.softmax import SoftmaxAttention
from megafrontier.model.init import matrix_std
from megafrontier.model.kernels.flash import Heads
from megafrontier.model.linear import Linear
from megafrontier.model.norms import make_rms_norm
from megafrontier.model.positions import AttentionContext, rotate_both
from megafrontier.model.ranks import DividedModule
from megafrontier.parallel.param_spec import Cut


class LatentAttention(DividedModule, SoftmaxAttention):
    """Multi-head latent attention: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.

    Keys and values are expanded for all heads. Heads of queries and keys begin with their rotary
    part. Kernels need values as wide as keys, so zeros are appended to values.
    """

    def _add_projections(self, config: ModelConfig) -> None:
        latent = config.attention.latent
        assert latent is not None
        self.latent = latent

        linear = partial(Linear, std=matrix_std(config))
        self.query_down: Linear | None = None
        self.query_latent_norm: nn.RMSNorm | None = None
        if latent.query is not None:
            self.query_down = linear(config.hidden, latent.query)
            self.query_latent_norm = make_rms_norm(config, latent.query)
        inputs, size = latent.query or config.hidden, self.head_size
        # Ranks that divide the heads exchange latents, which are narrow, and expand those of all
        # tokens. Queries without a latent are projected as those of other attention.
        cut: Cut = "columns" if latent.query is None else "heads"
        self.query_up = linear(inputs, self.heads * size, head_rows=size, cut=cut)
        self.key_value_down = linear(config.hidden, latent.key_value + latent.rope_size)
        self.key_value_norm = make_rms_norm(config, latent.key_value)
        rows = latent.nope_size + latent.value_size
        self.key_value_up = linear(latent.key_value, self.heads * rows, head_rows=rows, cut="heads")

    @classmethod
    def shrunk_rows(cls, config: ModelConfig, shrink: Tensor) -> dict[str, Tensor]:
        """All heads share the rotary part of keys, so that part of a query shrinks alone."""
        latent = config.attention.latent
        assert latent is not None
        root = shrink.sqrt()[:, None]
        parts = [(shrink[:, None], latent.rope_size), (root, latent.nope_size)]
        kept = torch.ones_like(root).expand(-1, latent.value_size)
        return {
            "query_up.weight": torch.cat([part.expand(-1, n) for part, n in parts], 1).flatten(),
            "key_value_up.weight": torch.cat(
                [root.expand(-1, latent.nope_size), kept], 1
            ).flatten(),
        }

    def _project(self, hidden: Tensor, context: AttentionContext) -> tuple[Heads, Tensor | None]:
        latent, rotary = self.latent, context.rotary
        down, shared = self.key_value_down(hidden).split([latent.key_value, latent.rope_size], -1)
        found = [self.key_value_norm(down), shared]
        if self.query_down is not None and self.query_latent_norm is not None:
            found.append(self.query_latent_norm(self.query_down(hidden)))
        widths = [part.shape[-1] for part in found]
        latents = torch.cat(found, -1)
        if self.ranks is not None:
            latents = self.ranks.gather_tokens(latents.flatten(0, -2))
        down, shared, *own = latents.view(*context.shape, -1).split(widths, -1)
        query = self.query_up(own[0] if own else hidden).view(*context.shape, -1, self.head_size)
        raised = self.key_value_up(down).unflatten(-1, (-1, latent.nope_size + latent.value_size))
        key, value = raised.split([latent.nope_size, latent.value_size], -1)
        shared = shared[:, :, None]
        if rotary is not None:
            query, shared = rotate_both(query, shared, rotary)
        key = torch.cat([shared.expand(-1, -1, key.shape[2], -1), key], -1)
        return (query, key, F.pad(value, (0, self.head_size - self.value_size))), None
