"""Output projection and cross-entropy, fused and computed for a chunk of tokens at a time.

Logits are the largest tensor of a language model: 8 sequences of 2048 tokens over 50k ids are
3.3 GB in fp32, and their gradient as much again. Here only one chunk exists at a time, and forward
also computes the gradients, so that backward needs no logits.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Target of a token without loss."""

_FP16_SCALE = 1024.0
"""For gradients of logits in fp16, which underflows at 6e-8. Most are about 1 / vocabulary."""


def capped(logits: Tensor, softcap: float) -> Tensor:
    """softcap · tanh(logits / softcap), in fp32; `logits` if `softcap` is 0."""
    return softcap * (logits.float() / softcap).tanh() if softcap else logits


class ChunkLosses(NamedTuple):
    """What `chunk_losses` computes of a chunk of tokens."""

    losses: Tensor
    """The cross-entropies [c], 0 for ignored tokens."""
    gradient: Tensor | None
    """Of their sum and of the z-loss, by the logits, in their type. Rows for ignored tokens are
    not zero: the caller masks a smaller factor instead."""
    squares: Tensor | None
    """With a z-loss, and with a gradient: the sum of log² Z, []."""


Losses = Callable[[Tensor, Tensor, int, float, bool, float], ChunkLosses]
"""The type of `chunk_losses`, which may be compiled."""


class ZLoss:
    """The z-loss of the logits, coefficient · log² Z of each token, where Z is the sum of the
    exponentials of its logits (Chowdhery et al. 2022, arXiv:2204.02311, section 5). It keeps log Z
    near 0.

    It enters through its gradient alone, as the losses of routers do, so that the loss that is
    reported stays the cross-entropy.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._total: Tensor | None = None

    def add(self, squares: Tensor) -> None:
        """Count the sum of log² Z of some tokens, []."""
        self._total = squares if self._total is None else self._total + squares

    def take(self, device: torch.device) -> Tensor:
        """The sum of the z-losses since the last call, float64 [] on `device`."""
        total, self._total = self._total, None
        if total is None:
            return torch.zeros((), dtype=torch.float64, device=device)
        return total.double() * self.coefficient


class CorpusLosses:
    """The cross-entropies and the targets of each training corpus, since they were taken."""

    def __init__(self, labels: Sequence[str]) -> None:
        """`labels`: of each corpus. Those with the same one are counted together."""
        self.names = list(dict.fromkeys(labels))
        self._numbers = torch.tensor([self.names.index(label) for label in labels])
        self._of_tokens: Tensor | None = None
        self._totals: Tensor | None = None

    def begin(self, corpora: Tensor) -> None:
        """The next tokens are of the corpora with these numbers, int64 [n]."""
        self._numbers = self._numbers.to(corpora.device)
        self._of_tokens = self._numbers[corpora]

    def add(self, first: int, losses: Tensor, targets: Tensor) -> None:
        """Count the losses [c] and the targets [c] of the tokens from number `first` on."""
        if self._of_tokens is None:
            return
        if self._totals is None:
            shape = 2, len(self.names)
            self._totals = torch.zeros(shape, dtype=torch.float64, device=losses.device)
        both = torch.stack([losses.double(), (targets != IGNORE_INDEX).double()])
        self._totals.index_add_(1, self._of_tokens[first : first + len(losses)], both)

    def take(self, device: torch.device) -> Tensor:
        """The sums of losses and the numbers of targets by name since the last call, float64
        [2, names] on `device`."""
        totals, self._totals, self._of_tokens = self._totals, None, None
        if totals is None:
            return torch.zeros(2, len(self.names), dtype=torch.float64, device=device)
        return totals


class PredictionLoss:
    """The cross-entropies of predicted tokens after the next ones, which enter through their
    gradient, as the z-loss does."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._totals: Tensor | None = None

    def add(self, loss: Tensor, found: Tensor, targets: Tensor) -> Tensor:
        """`loss`, with the gradient of `found`, the sum of the cross-entropies of `targets`."""
        count = (targets != IGNORE_INDEX).sum()
        totals = torch.stack([found.detach().double(), count.double()])
        self._totals = totals if self._totals is None else self._totals + totals
        attached = _WithGradient.apply(loss, found, self.coefficient)
        assert isinstance(attached, Tensor)
        return attached

    def take(self, device: torch.device) -> Tensor:
        """The sum since the last call, and the number of targets, float64 [2] on `device`."""
        totals, self._totals = self._totals, None
        return torch.zeros(2, dtype=torch.float64, device=device) if totals is None else totals


class _WithGradient(torch.autograd.Function):
    """Returns `loss`. Backward also gives `other` its gradient times `factor`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad_outputs[0], grad_outputs[0] * ctx.factor, None


def later_targets(targets: Tensor, followed: Tensor) -> Tensor:
    """Return the target [b, s] of the next token of each token. A token that is not `followed`
    (`positions.followed_tokens`) has none."""
    return targets.roll(-1, 1).masked_fill(~followed, IGNORE_INDEX)


def chunk_losses(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    scale: float,
    with_gradient: bool,
    z_loss: float = 0.0,
) -> ChunkLosses:
    """The losses of a chunk, and their gradient: scale · (softmax · (1 + 2 · z_loss · log Z) -
    one-hot).

    logits [c, rows], of which the columns from `vocab_size` on are padding; targets [c].
    """
    has_loss = (targets != IGNORE_INDEX)[:, None]
    target_ids = targets.clamp(min=0)[:, None]
    fp32_logits = logits.float()
    if logits.shape[1] > vocab_size:
        fp32_logits[:, vocab_size:] = -torch.inf
    log_probabilities = fp32_logits.log_softmax(dim=-1)
    found = -torch.where(has_loss, log_probabilities.gather(1, target_ids), 0.0)[:, 0]
    if not with_gradient:
        return ChunkLosses(found, None, None)
    log_z = None
    if z_loss:
        log_z = fp32_logits.gather(1, target_ids) - log_probabilities.gather(1, target_ids)
    gradient = log_probabilities.exp_()
    if log_z is not None:
        gradient.mul_(1 + 2 * z_loss * log_z)
    if torch.compiler.is_compiling():
        # This fuses with the operations around it. A scatter would be one more pass, in fp32.
        columns = torch.arange(logits.shape[1], device=logits.device)
        gradient = gradient - (columns == target_ids).float()
    else:
        gradient.scatter_add_(1, target_ids, gradient.new_full(target_ids.shape, -1.0))
    gradient = (gradient if scale == 1 else gradient.mul_(scale)).to(logits.dtype)
    squares = None if log_z is None else torch.where(has_loss, log_z, 0.0).square().sum()
    return ChunkLosses(found, gradient, squares)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    losses: Losses = chunk_losses,
    z_loss: ZLoss | None = None,
    softcap: float = 0.0,
    corpora: CorpusLosses | None = None,
) -> Tensor:
    """Sum over tokens of -log softmax(hidden · weightᵀ)[target]: an fp32 scalar.

    hidden [n, h]; weight [rows, h] with rows ≥ vocab_size, of which those from vocab_size on are
    padding; targets [n] int64, `IGNORE_INDEX` for tokens without loss. Logits exist for
    `chunk_tokens` tokens at a time. The weight's gradient is summed over chunks in fp32. `losses`
    is called in place of `chunk_losses`. The gradient has that of `z_loss`, which counts the tokens
    if there is one. `softcap`: as for `capped`. `corpora` counts the losses, too.
    """
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss = _LinearCrossEntropy.apply(
        *(hidden, weight, targets, vocab_size, chunk_tokens, losses, z_loss, with_gradient),
        *(softcap, corpora),
    )
    assert isinstance(loss, Tensor)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients, and backward scales them.

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
        z_loss: ZLoss | None,
        with_gradient: bool,
        softcap: float,
        corpora: CorpusLosses | None,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        ctx.scale = _FP16_SCALE if hidden.dtype == torch.float16 else 1.0
        coefficient = 0.0 if z_loss is None else z_loss.coefficient
        hidden_grad = torch.empty_like(hidden) if with_gradient else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if with_gradient else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk = hidden[rows]
            logits = capped(chunk @ weight.t(), softcap)
            slope = 1 - (logits / softcap).square() if softcap and with_gradient else None
            found, error, squares = losses(
                logits, targets[rows], vocab_size, ctx.scale, with_gradient, coefficient
            )
            loss += found.sum()
            if corpora is not None:
                corpora.add(start, found, targets[rows])
            if z_loss is not None and squares is not None:
                z_loss.add(squares)
            if error is not None and hidden_grad is not None and weight_grad is not None:
                if slope is not None:
                    error = (error * slope).to(weight.dtype)
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
            # Write the result in its type at once: there is no memory for a second fp32 matrix.
            by_weight = torch.empty_like(weight_grad, dtype=ctx.weight_dtype)
            torch.mul(weight_grad, factor, out=by_weight)
        # On a GPU a factor in fp16 would be 0 below 2^-24 and infinite from 2^16.
        by_hidden = (hidden_grad.float() if factor.is_cuda else hidden_grad) * factor
        return by_hidden.to(hidden_grad.dtype), by_weight, *[None] * 8


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right to the fp32 total."""
    if right.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    elif _adds_products(right.device, right.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif right.dtype == torch.float16:
        # The sum for a frequent id, times _FP16_SCALE, can exceed fp16's 65,504, and the loss scale
        # comes too late to help. So the smaller factor is divided by a power of two, mostly 1.
        most = torch.linalg.vector_norm(left, 1, dim=1, dtype=torch.float32).max()
        factor = (most * right.abs().max() / 2**15).log2().ceil().clamp(min=0).exp2()
        total += (left @ (right / factor).to(right.dtype)).float().mul_(factor)
    else:
        total += left @ right


@cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device's products of this type can be added to an fp32 matrix as they are
    computed. Otherwise they are written, and read by an addition that also reads and writes the
    matrix."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = ones.float()
    try:
        torch.addmm(total, ones, ones, out_dtype=total.dtype, out=total)
        return bool((total == 17).all())
    except (RuntimeError, TypeError):  # not on this device, or not in this torch
        return False
