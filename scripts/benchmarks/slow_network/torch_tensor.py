"""torch's own tensor parallelism as torchtitan sets it up: `parallelize_module` with sequence
parallelism and a loss over vocabulary parts, and FSDP2 over the ranks with other samples.

A rank takes neighbouring rows of the qkv matrix, not of each of its parts: the same products and
messages of a model with its rows in another order.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.config import Config
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.block import Block
from megafrontier.model.gpt import GPT, Head
from scripts.benchmarks.slow_network.fsdp2 import adamw


class TorchTensor:
    """A GPT, with rotary positions and untied embeddings, cut by torch over `tensor` ranks."""

    def __init__(self, model: GPT, config: Config, tensor: int, ranks: int) -> None:
        self.model = model
        self._clip = config.train.clip_grad_norm
        mesh = init_device_mesh("cpu", (ranks // tensor, tensor), mesh_dim_names=("data", "tensor"))
        self._data = ranks // tensor
        _use_plain_modules(model)
        parallelize_module(model, mesh["tensor"], _plan(model))
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attention.heads //= tensor
            block.attention.kv_heads //= tensor
            block.attention.widths = [width // tensor for width in block.attention.widths]
        dtype = DTYPES[config.train.precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for _, unit in model.units():
            fully_shard(unit, mesh=mesh["data"], mp_policy=policy)
        fully_shard(model, mesh=mesh["data"], mp_policy=policy)
        self._optimizer = adamw(model, config)

    def step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step; the mean loss of this rank's tokens."""
        total = 0.0
        for i, batch in enumerate(batches):
            self.model.set_requires_gradient_sync(i == len(batches) - 1)
            with loss_parallel():
                loss = self.model(batch.tokens, batch.targets, batch.documents)
                loss = loss / (batch.targets.numel() * len(batches))
                loss.backward()
            total += loss.item()
        if self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def _use_plain_modules(model: GPT) -> None:
    """Those of our modules that have code of their own for local tensors."""
    tokens = nn.Embedding(*model.embedding.tokens.weight.shape)
    tokens.weight = model.embedding.tokens.weight
    model.embedding.tokens = tokens
    model.add_module("head", _Head(model.head))


class _Head(nn.Module):
    def __init__(self, whole: Head) -> None:
        super().__init__()
        self.norm, self.output, self._vocab_size = whole.norm, whole.output, whole.vocab_size

    def forward(self, hidden: Tensor, targets: Tensor, _tied: Tensor | None = None) -> Tensor:
        logits = self.output(self.norm(hidden)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")


def _plan(model: GPT) -> dict[str, ColwiseParallel | RowwiseParallel | SequenceParallel]:
    by_tokens = Shard(1)
    plan: dict[str, ColwiseParallel | RowwiseParallel | SequenceParallel] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=by_tokens),
        "head.norm": SequenceParallel(use_local_output=True),
        "head.output": ColwiseParallel(
            input_layouts=by_tokens, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(len(model.blocks)):
        for name in ("norm1", "norm2"):
            plan[f"blocks.{i}.{name}"] = SequenceParallel(use_local_output=True)
        for name in ("attention.qkv", "mlp.up"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel(input_layouts=by_tokens)
        for name in ("attention.out", "mlp.down"):
            plan[f"blocks.{i}.{name}"] = RowwiseParallel(output_layouts=by_tokens)
    return plan
