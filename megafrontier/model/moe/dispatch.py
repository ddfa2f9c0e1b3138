"""Bring tokens to experts that are all on this rank, and back."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megafrontier.model.moe.experts import Experts

Dispatch = Callable[[Tensor, Tensor, Tensor, Experts], Callable[[], Tensor]]
"""hidden [n, h], the experts of each token int64 [n, k], their weights fp32 [n, k], and the experts
→ a function without arguments that returns for each token the weighted sum of its experts' outputs
[n, h]. What is computed before it is called runs while tokens move."""


def sort_by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of the pairs (token, expert) of `chosen` [n, k] by expert, int64 [n · k], and how
    many pairs each of `count` experts has, int64 [count]. Without a synchronization."""
    found, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(count, device=chosen.device)
    stops = torch.searchsorted(found, experts, right=True)
    return order, stops.diff(prepend=stops.new_zeros(1))


def local_dispatch(
    hidden: Tensor, chosen: Tensor, weights: Tensor, experts: Experts
) -> Callable[[], Tensor]:
    """`Dispatch` on this rank alone."""
    return partial(_process, hidden, chosen, weights, experts)


def _process(hidden: Tensor, chosen: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    order, counts = sort_by_expert(chosen, experts.count)
    copies: Tensor = _Spread.apply(hidden, order, chosen.shape[1])
    return combine(experts(copies, counts), weights, order)


def combine(outputs: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The weighted sums of outputs [n · k, h] of pairs in the order of `sort_by_expert` → [n, h].
    Sums are fp32."""
    by_token: Tensor = _Unsort.apply(outputs, order)
    products = by_token.view(*weights.shape, -1) * weights[..., None]
    return products.sum(1).to(outputs.dtype)


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


class _Spread(torch.autograd.Function):
    """hidden [n, h] → the token of each pair in the given order, [n · k, h].

    Backward sums by reading, in fp32. Autograd's own would add with atomics, in any order.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, active: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.active = active
        return hidden[order // active]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        by_token = grad_outputs[0][_inverse(order)].unflatten(0, (-1, ctx.active))
        return by_token.sum(1, dtype=torch.float32).to(by_token.dtype), None, None


class _Unsort(torch.autograd.Function):
    """Pairs [n · k, h] in a sorted order → in their own."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return outputs[_inverse(order)]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad_outputs[0][order], None
