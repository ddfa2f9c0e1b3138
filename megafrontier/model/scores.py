"""Log-probabilities of single tokens, for evaluations that ask for more than a loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from megafrontier.model.loss import IGNORE_INDEX, capped

Scores = Callable[[Tensor, Tensor, int], Tensor]
"""The type of `chunk_scores`."""


def chunk_scores(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """log softmax(logits)[target] and the most likely id of each token, float64 [c, 2].

    logits [c, rows], of which the columns from `vocab_size` on are padding; targets [c].
    """
    logits = logits[:, :vocab_size].float()
    chosen = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return torch.stack([chosen.double(), logits.argmax(-1).double()], 1)


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    scores: Scores = chunk_scores,
    softcap: float = 0.0,
) -> Tensor:
    """`chunk_scores` of the tokens with a target, 0 for the others, float64 [n, 2].

    Arguments as of `loss.linear_cross_entropy`; `scores` is called in place of `chunk_scores`.
    """
    found = torch.zeros(len(targets), 2, dtype=torch.float64, device=hidden.device)
    counted = (targets != IGNORE_INDEX).nonzero()[:, 0]
    for rows in counted.split(chunk_tokens) if len(counted) else ():
        found[rows] = scores(capped(hidden[rows] @ weight.t(), softcap), targets[rows], vocab_size)
    return found
