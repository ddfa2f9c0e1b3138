"""Embeddings whose gradients are summed in fp32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _FP32GradLookup(torch.autograd.Function):
    """An embedding whose gradient is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        (grad_output,) = grad_outputs
        grad = torch.ops.aten.embedding_dense_backward(
            grad_output.float(), ids, ctx.rows, -1, False
        )
        return grad.to(grad_output.dtype), None


class FP32GradEmbedding(nn.Embedding):
    """nn.Embedding that also sums its gradient in fp32 if a 16-bit weight is on a CPU.

    There torch adds up the gradients of a row in the weight's type, so that those of frequent ids
    soon add nothing.
    """

    def reset_parameters(self) -> None:
        """Nothing on meta, where drawing values would take seconds to import torch's compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] → [b, s, hidden]."""
        if self.weight.device.type == "cpu" and self.weight.dtype != torch.float32:
            found: Tensor = _FP32GradLookup.apply(self.weight, ids)
            return found
        return super().forward(ids)
