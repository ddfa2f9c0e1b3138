"""Norms of all queries, or of all keys, whose heads are divided over the ranks of a split."""

import torch
from torch import Tensor, nn

from megafrontier.model.norms import OffsetRMSNorm
from megafrontier.splits.tokens import TokenGroup, gather_tokens


class DividedHeadsNorm(nn.Module):
    """An RMS norm of all heads together, of which this rank has some: the ranks exchange a sum of
    squares for each token.

    Its weight is whole on each rank, which uses the part of its heads: the engine sums the gradient
    over the ranks, as of other norms. With fewer heads of keys than ranks, `copies` ranks have the
    same head.
    """

    def __init__(self, whole: nn.RMSNorm, first: int, width: int, copies: int, group: TokenGroup):
        """This rank's heads are the elements [first, first + width) of the whole norm's."""
        super().__init__()
        self.weight = whole.weight
        self.normalized_shape = (width,)
        self.has_offset = isinstance(whole, OffsetRMSNorm)
        self.group = group
        self._whole_width, self._eps = whole.normalized_shape[0], whole.eps or 0.0
        self._first, self._copies = first, copies

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, 1, width] → the same shape and type."""
        values = x.float()
        own = values.square().sum(-1).view(-1, 1)
        squares = gather_tokens(own, self.group.number).view(self.group.size, -1).sum(0)
        scale = torch.rsqrt(squares / (self._copies * self._whole_width) + self._eps)
        weight = self.weight[self._first : self._first + self.normalized_shape[0]].float()
        weight = 1.0 + weight if self.has_offset else weight
        return (values * scale.view(*x.shape[:-1], 1) * weight).to(x.dtype)
