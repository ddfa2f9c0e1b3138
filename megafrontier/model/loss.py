"""Output projection and cross-entropy in one, a chunk of tokens at a time.

Logits are the largest tensor of a language model: 8 sequences of 2048 tokens over 50k ids are
3.3 GB in fp32, and their gradient as much again. Here only a chunk of them exists at a time, and
the gradients are computed beside the loss, so that backward needs no logits either.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Target of a token without loss."""

_FP16_SCALE = 1024.0
"""fp16 loses what is below 6e-8, and most gradients of logits are of the size 1 / vocabulary."""


Losses = Callable[[Tensor, Tensor, int, float, bool], tuple[Tensor, Tensor | None]]
"""What `chunk_losses` is, or that, compiled."""


def chunk_losses(
    logits: Tensor, targets: Tensor, vocab_size: int, scale: float, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Of one chunk: the sum of its losses, and scale · (softmax - one-hot) in the logits' type.

    logits [c, rows], of which those from `vocab_size` on are padding; targets [c]. The gradient's
    rows of ignored tokens are not zero: the caller leaves these out of a smaller factor.
    """
    has_loss = (targets != IGNORE_INDEX)[:, None]
    target_ids = targets.clamp(min=0)[:, None]
    fp32_logits = logits.float()
    if logits.shape[1] > vocab_size:
        fp32_logits[:, vocab_size:] = -torch.inf  # never likely
    log_probabilities = fp32_logits.log_softmax(dim=-1)
    loss = -torch.where(has_loss, log_probabilities.gather(1, target_ids), 0.0).sum()
    if not with_gradient:
        return loss, None
    gradient = log_probabilities.exp_()
    if torch.compiler.is_compiling():
        # One pass with what stands around it; a scatter would be one of its own, in fp32.
        columns = torch.arange(logits.shape[1], device=logits.device)
        gradient = gradient - (columns == target_ids).float()
    else:
        gradient.scatter_add_(1, target_ids, gradient.new_full(target_ids.shape, -1.0))
    return loss, (gradient if scale == 1 else gradient.mul_(scale)).to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    losses: Losses = chunk_losses,
) -> Tensor:
    """Sum over tokens of -log softmax(hidden · weightᵀ)[target]: an fp32 scalar.

    hidden [n, h]; weight [rows, h] with rows ≥ vocab_size, of which those from vocab_size on are
    padding; targets [n] int64, `IGNORE_INDEX` for tokens without loss. Logits exist for
    `chunk_tokens` tokens at a time. The weight's gradient is summed over chunks in fp32. `losses`
    is called in place of `chunk_losses`.
    """
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss = _LinearCrossEntropy.apply(
        hidden, weight, targets, vocab_size, chunk_tokens, losses, with_gradient
    )
    assert isinstance(loss, Tensor)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy`, whose forward computes the gradients and whose backward scales them.

    Saved for backward: the gradients of hidden [n, h] in its type and of weight [rows, h] in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk_tokens: int,
        losses: Losses,
        with_gradient: bool,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        ctx.scale = _FP16_SCALE if hidden.dtype == torch.float16 else 1.0
        hidden_grad = torch.empty_like(hidden) if with_gradient else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if with_gradient else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk = hidden[rows]
            logits = chunk @ weight.t()
            found, error = losses(logits, targets[rows], vocab_size, ctx.scale, with_gradient)
            loss += found
            if error is not None and hidden_grad is not None and weight_grad is not None:
                counted = (targets[rows] != IGNORE_INDEX)[:, None].to(weight.dtype)
                torch.mm(error, weight, out=hidden_grad[rows]).mul_(counted)
                _add_product_(weight_grad, error.t(), chunk * counted)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(hidden_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        factor = grad_outputs[0] / ctx.scale
        by_weight = None
        if ctx.needs_input_grad[1]:
            # Straight into its type: a device has no second fp32 matrix beside all activations.
            by_weight = torch.empty_like(weight_grad, dtype=ctx.weight_dtype)
            torch.mul(weight_grad, factor, out=by_weight)
        # On a device a factor in fp16 would be 0 below 2^-24 and infinite from 2^16.
        by_hidden = (hidden_grad.float() if factor.is_cuda else hidden_grad) * factor
        return by_hidden.to(hidden_grad.dtype), by_weight, *[None] * 5


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right to the fp32 total."""
    if right.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    elif right.dtype == torch.float16:
        # A chunk's sum, times _FP16_SCALE, can be more than fp16's 65,504 for an id that many of
        # its tokens have, and no loss scale would help: that comes later. So the thin factor
        # shrinks by a power of two, which in most chunks is 1.
        most = torch.linalg.vector_norm(left, 1, dim=1, dtype=torch.float32).max()
        factor = (most * right.abs().max() / 2**15).log2().ceil().clamp(min=0).exp2()
        total += (left @ (right / factor).to(right.dtype)).float().mul_(factor)
    else:
        total += left @ right
