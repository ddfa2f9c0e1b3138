"""Attention with a window, capped scores or sinks, in plain torch, where no fused kernel has it.

It works in blocks of queries, so that scores exist for one block at a time. Backward computes them
again from the log-sums, as flash attention does (Dao et al. 2022, arXiv:2205.14135).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES = 256
"""Of a block."""


class Rule(NamedTuple):
    """Which keys a query attends to, and how. The i-th query is at position `offset` + i among the
    keys, and attends to none after it."""

    offset: int = 0
    window: int = 0
    """Keys that a query attends to, those directly before it and its own. 0: all."""
    softcap: float = 0.0
    """Scores become softcap · tanh(score / softcap). 0: they do not."""
    numbers: Tensor | None = None
    """The document of each key [k]: a query attends to its own document alone."""


def attend(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Attention [b, q, heads, d] of queries [b, q, heads, d] to keys and values [b, k, kv_heads,
    d], and the fp32 log-sum-exp [b, heads, q] of the scores: -inf and 0 without any key."""
    attended = torch.empty_like(query)
    batch, queries, heads, _ = query.shape
    sums = query.new_empty(batch, heads, queries, dtype=torch.float32)
    for rows, columns in _blocks(query.shape[1], key.shape[1], rule):
        scores = _masked(_scores(query[:, rows], key[:, columns], rule), rows, columns, rule)
        total = scores.logsumexp(-1)
        weights = _weights(scores, total)
        found = torch.einsum("bhgqk,bkhd->bqhgd", weights, value[:, columns].float())
        attended[:, rows] = found.flatten(2, 3)
        sums[:, :, rows] = total.flatten(1, 2)
    return attended, sums


def attend_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of `attend`. `attended` and `sums` may be those of more
    keys; the gradients are then what these keys contribute."""
    heads, scale = key.shape[2], query.shape[-1] ** -0.5
    by_query = torch.empty_like(query)
    by_key, by_value = (torch.zeros_like(t, dtype=torch.float32) for t in (key, value))
    shared = (grad_output.float() * attended.float()).sum(-1)  # [b, q, heads]
    for rows, columns in _blocks(query.shape[1], key.shape[1], rule):
        own, keys, values = query[:, rows], key[:, columns].float(), value[:, columns].float()
        scores = _scores(own, keys, rule)
        total = sums[:, :, rows].unflatten(1, (heads, -1))
        weights = _weights(_masked(scores.clone(), rows, columns, rule), total)
        grad = grad_output[:, rows].float().unflatten(2, (heads, -1))
        by_value[:, columns] += torch.einsum("bhgqk,bqhgd->bkhd", weights, grad)
        by_scores = torch.einsum("bqhgd,bkhd->bhgqk", grad, values)
        by_scores -= shared[:, rows].transpose(1, 2).unflatten(1, (heads, -1))[..., None]
        by_scores *= weights
        if rule.softcap:
            by_scores *= 1 - (scores / rule.softcap).square()
        by_scores *= scale
        by_query[:, rows] = torch.einsum("bhgqk,bkhd->bqhgd", by_scores, keys).flatten(2, 3)
        own = own.float().unflatten(2, (heads, -1))
        by_key[:, columns] += torch.einsum("bhgqk,bqhgd->bkhd", by_scores, own)
    return by_query, by_key.to(key.dtype), by_value.to(value.dtype)


def add_sinks_(attended: Tensor, sums: Tensor, sinks: Tensor) -> None:
    """Let sinks [heads] take part in the softmax of attention [t, heads, d] with log-sums
    [heads, t], in place."""
    total = torch.logaddexp(sums, sinks.float()[:, None])
    attended *= (sums - total).exp().t()[..., None].to(attended.dtype)
    sums.copy_(total)


def sinks_backward(grad_output: Tensor, attended: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks [heads]; `attended` and `sums` are with them."""
    shared = (grad_output.float() * attended.float()).sum(-1).t()
    return -((sinks.float()[:, None] - sums).exp() * shared).sum(1).to(sinks.dtype)


def _blocks(queries: int, keys: int, rule: Rule) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and the keys that some of them attend to."""
    for start in range(0, queries, QUERIES):
        stop = min(start + QUERIES, queries)
        last = min(stop + rule.offset, keys)
        first = max(0, start + rule.offset - rule.window + 1) if rule.window else 0
        yield slice(start, stop), slice(min(first, last), last)


def _scores(query: Tensor, key: Tensor, rule: Rule) -> Tensor:
    """fp32 [b, kv_heads, heads / kv_heads, q, k], capped, without a mask."""
    query = query.float().unflatten(2, (key.shape[2], -1)) * query.shape[-1] ** -0.5
    scores = torch.einsum("bqhgd,bkhd->bhgqk", query, key.float())
    return rule.softcap * (scores / rule.softcap).tanh_() if rule.softcap else scores


def _masked(scores: Tensor, rows: slice, columns: slice, rule: Rule) -> Tensor:
    """Scores of a block, -inf where there is no attention, in place."""
    at = torch.arange(rows.start, rows.stop, device=scores.device)[:, None] + rule.offset
    keys = torch.arange(columns.start, columns.stop, device=scores.device)
    masked = keys > at
    if rule.window:
        masked |= keys <= at - rule.window
    if rule.numbers is not None:
        own = rule.numbers[rows.start + rule.offset : rows.stop + rule.offset]
        masked |= own[:, None] != rule.numbers[columns]
    return scores.masked_fill_(masked, -torch.inf)


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    # Without any key the sum is -inf, and the weights are 0.
    return (scores - sums.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp_()
