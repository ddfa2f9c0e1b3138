"""The router of a mixture of experts: which experts process a token, and with which weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig, MoEConfig
from megafrontier.model.init import matrix_std
from megafrontier.model.moe.statistics import RouterStatistics
from megafrontier.parallel.param_spec import ParamSpec, set_spec

TINY = 1e-20


class _AttachLoss(torch.autograd.Function):
    """Returns a tensor as it is. Backward also gives `loss` the gradient `scale`, as if it had been
    added to the model's loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad_outputs[0], scale, None


class Router(nn.Module):
    """A linear layer that scores the experts for each token, in fp32.

    Note [Losses of the router]
    `GPT.forward` returns the sum of the losses of tokens, which the step divides once by the number
    of targets in the global batch. The losses of the router are therefore sums over tokens, too,
    and enter through their gradient alone. Their factor `loss_scale` has targets / tokens of the
    global batch, which the step counts before its first forward. So each loss is a mean over
    tokens, whatever the share of targets. A token without a target counts, because it occupies an
    expert. Padding does not, and in the block of `model.prediction` nor does a token without a next
    one. The shares of tokens in the load-balancing loss are those of the previous global batch,
    from a buffer: so the gradient does not depend on how the batch is divided over ranks and
    micro-batches.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        shape = moe.experts, config.hidden
        self.weight = nn.Parameter(torch.empty(shape))
        set_spec(self.weight, ParamSpec("", shape, "router", init_std=matrix_std(config)))
        self.logit_bias: nn.Parameter | None = None
        if moe.router_bias:
            self.logit_bias = nn.Parameter(torch.empty(moe.experts))
            set_spec(self.logit_bias, ParamSpec("", shape[:1], "bias"))
        # Not on the meta device, where the model may be built: checkpoints do not always have them.
        if moe.balance == "bias":
            self.register_buffer("bias", torch.zeros(moe.experts, device="cpu"))
        if moe.balance == "loss":
            share = torch.full((moe.experts,), 1 / moe.experts, device="cpu")
            self.register_buffer("load", share)
        self.loss_scale: Tensor | None = None
        """What the loss is multiplied by before backward. None: 1."""
        self.statistics = RouterStatistics()

    def forward(self, tokens: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """tokens [n, hidden] → the experts of each token int64 [n, active], and their weights fp32
        [n, active]. `counted` bool [n]: the tokens of losses and statistics. None: all."""
        bias = None if self.logit_bias is None else self.logit_bias.float()
        logits = F.linear(tokens.float(), self.weight.float(), bias)
        scores = logits.softmax(-1) if self.moe.router == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(1, experts)
        if self.moe.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        weights = weights * self.moe.scale
        probabilities = scores
        if self.moe.router == "sigmoid":
            probabilities = scores / (scores.sum(-1, keepdim=True) + TINY)
        if self.training:
            self.statistics.add(experts, probabilities, counted)
        return experts, self._with_losses(weights, logits, probabilities, counted)

    @torch.no_grad()
    def update(self, counts: Tensor, skip: Tensor) -> None:
        """Update the buffers by the tokens of each expert in the global batch, float64 [experts],
        unless `skip` [] is 1."""
        keep = 1 - skip
        if self.moe.balance == "bias":
            sign = (counts.mean() - counts).sign()
            self.bias += (keep * self.moe.bias_rate * sign).float()
        if self.moe.balance == "loss":
            shares = (counts / counts.sum().clamp(min=1)).float()
            self.load.copy_(torch.where(skip > 0, self.load, shares))

    def _choose(self, scores: Tensor) -> Tensor:
        """The experts with the best scores [n, experts], plus the bias, in the best groups."""
        moe = self.moe
        if moe.balance == "bias":
            scores = scores + self.bias
        if moe.groups.active < moe.groups.number:
            grouped = scores.unflatten(-1, (moe.groups.number, -1))
            best = grouped.topk(min(moe.groups.best, grouped.shape[-1]), dim=-1).values.sum(-1)
            chosen = best.topk(moe.groups.active, dim=-1).indices
            is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
            scores = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
        return scores.topk(moe.active, dim=-1).indices

    def _with_losses(
        self, weights: Tensor, logits: Tensor, probabilities: Tensor, counted: Tensor | None
    ) -> Tensor:
        """`weights`, with the gradients of the router's losses attached."""
        if not (torch.is_grad_enabled() and self.training):
            return weights
        losses = []
        if self.moe.balance == "loss":
            shares = _kept(probabilities, counted).sum(0) @ self.load
            losses.append(self.moe.loss_coefficient * self.moe.experts * shares)
        if self.moe.z_loss:
            squares = logits.logsumexp(-1, keepdim=True).square()
            losses.append(self.moe.z_loss * _kept(squares, counted).sum())
        scale = torch.ones_like(logits[0, 0]) if self.loss_scale is None else self.loss_scale
        for loss in losses:
            attached = _AttachLoss.apply(weights, loss, scale.to(loss.dtype))
            assert isinstance(attached, Tensor)
            weights = attached
        return weights


def _kept(values: Tensor, counted: Tensor | None) -> Tensor:
    """`values` [n, m], with 0 for tokens that do not count."""
    return values if counted is None else values.where(counted[:, None], 0.0)
