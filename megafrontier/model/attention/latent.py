"""Multi-head latent attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.attention.softmax import SoftmaxAttention
from megafrontier.model.init import matrix_std, with_specs
from megafrontier.model.norms import make_rms_norm
from megafrontier.model.positions import AttentionContext, rotate


class LatentAttention(SoftmaxAttention):
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
