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
ABSENT = -1
"""In place of an expert that is on another rank."""


def sort_by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of the pairs (token, expert) of `chosen` [n, k] by expert, int64 [n · k], and how
    many pairs each of `count` experts has, int64 [count]. Without a synchronization."""
    keys, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(count, device=chosen.device)
    stops = torch.searchsorted(keys, experts, right=True)
    return order, stops.diff(prepend=stops.new_zeros(1))


def local_dispatch(
    hidden: Tensor, chosen: Tensor, weights: Tensor, experts: Experts
) -> Callable[[], Tensor]:
    """`Dispatch` on this rank alone."""
    return partial(run_experts, hidden, chosen, weights, experts)


def run_experts(
    rows: Tensor, chosen: Tensor, weights: Tensor, experts: Experts, pairs: int | None = None
) -> Tensor:
    """The weighted sums of the outputs of this rank's experts [m, h], for rows [m, h] with chosen
    experts int64 [m, k] and weights fp32 [m, k]. Sums are fp32.

    pairs: the number of all chosen experts that are not `ABSENT`. None: all are on this rank.
    """
    count, (size, active), is_whole = experts.count, chosen.shape, pairs is None
    order, counts = sort_by_expert(chosen.where(chosen != ABSENT, count), count)
    order = order[:pairs]
    places = torch.full((size * active,), len(order), device=chosen.device)
    places[order] = torch.arange(len(order), device=chosen.device)
    places = places.view(size, active)
    if not is_whole:  # the places of a row's pairs first, then the number of all pairs
        places = places.sort(1).values[:, : min(active, count)]
    copies: Tensor = _Copy.apply(rows, order // active, places, is_whole)
    sums: Tensor = _Combine.apply(experts(copies, counts), weights, order, places, is_whole)
    return sums


def _sum_at(pairs: Tensor, places: Tensor, is_whole: bool, weights: Tensor | None = None) -> Tensor:
    """fp32 [m, h]: the sum of pairs [p, h], times weights [p], at each row's places [m, n], where p
    stands for none unless `is_whole`.

    By reading, because additions with atomics have any order.
    """
    if is_whole:
        parts = pairs[places]
        parts = parts if weights is None else parts * weights[places][..., None]
        return parts.sum(1, dtype=torch.float32)
    total = torch.zeros(len(places), pairs.shape[1], device=pairs.device)
    if len(pairs):
        # One after another, because most rows have few pairs here.
        for column in places.unbind(1):
            is_there, index = column < len(pairs), column.clamp(max=len(pairs) - 1)
            part = pairs[index] if weights is None else pairs[index] * weights[index][:, None]
            total += torch.where(is_there[:, None], part, 0)
    return total


class _Copy(torch.autograd.Function):
    """rows [m, h] → the row of each pair [p, h]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, of: Tensor, places: Tensor, is_whole: bool) -> Tensor:
        ctx.save_for_backward(places)
        ctx.is_whole = is_whole
        return rows[of]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (places,), (by_pairs,) = ctx.saved_tensors, grad_outputs
        return _sum_at(by_pairs, places, ctx.is_whole).to(by_pairs.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """The outputs [p, h] of pairs, and the weights [m, k] → the weighted sum of each row [m, h]."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, weights: Tensor, order: Tensor, places: Tensor, is_whole: bool
    ) -> Tensor:
        ctx.save_for_backward(outputs, weights, order)
        sums = _sum_at(outputs, places, is_whole, weights.flatten()[order])
        return sums.to(outputs.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        outputs, weights, order = ctx.saved_tensors
        gradient = grad_outputs[0][order // weights.shape[1]]
        by_outputs = (gradient * weights.flatten()[order][:, None]).to(outputs.dtype)
        by_weights = torch.zeros_like(weights).flatten()
        by_weights[order] = (gradient.float() * outputs).sum(1)
        return by_outputs, by_weights.view_as(weights), None, None, None
