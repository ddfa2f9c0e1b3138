"""Where the tokens of expert parallelism go: over each level once per distinct group beyond it.

The experts lie on the ranks of some levels in order: the rank with number r has the r-th of equal
parts. On its way to its experts a token first crosses the outermost level, once for each group of
ranks that has some of them, to the rank of that group with the same inner coordinates. There it
crosses the next level in the same way. What a rank receives of a token on the last level is used by
all the token's experts there.

`Routes` holds the tables of one micro-batch. `ExpertGroup` (experts.py) moves the tokens.
"""

import torch
from torch import Tensor

from megafrontier.comm.rows import RouteStep
from megafrontier.model.moe.dispatch import ABSENT
from megafrontier.parallel.hierarchy import Levels


class Counts:
    """How many rows and pairs (token, expert) go where, of a number of tokens on every rank.

    A rank counts its own with `of`. The counts of all ranks say how many rows each step has.
    """

    def __init__(self, levels: Levels, table: Tensor) -> None:
        """table int32 [ranks, n], on the CPU: the counts of every rank, by its number."""
        self._levels = levels
        self.tokens = int(table[:, -1].max())
        """Tokens of the rank that has most."""
        parts = table[:, :-1].long().split([levels.ranks, *_widths(levels)], 1)
        self._pairs, self._rows = parts[0], parts[1:]

    @staticmethod
    def of(levels: Levels, owners: Tensor) -> Tensor:
        """This rank's counts int32 [n] of tokens whose experts lie on the ranks `owners` [tokens,
        k]: pairs for each rank, tokens for each group of ranks at each level, and all tokens."""
        ones = torch.ones_like(owners.flatten())
        pairs = ones.new_zeros(levels.ranks).scatter_add_(0, owners.flatten(), ones)
        rows = [
            _distinct(owners // stride, levels.ranks // stride).sum(0) for stride in levels.strides
        ]
        return torch.cat([pairs, *rows, pairs.new_tensor([len(owners)])]).int()

    @property
    def all_pairs(self) -> int:
        """Pairs on all ranks."""
        return int(self._pairs.sum())

    def pairs(self, rank: int) -> int:
        """Pairs that `rank` computes."""
        return int(self._pairs[:, rank].sum())

    @property
    def most(self) -> int:
        """Pairs, or rows after a step, of the rank that has most."""
        found = [self._pairs.sum(0)]
        for stride, rows in zip(self._levels.strides, self._rows, strict=True):
            # Those that a rank has come from all ranks with its inner coordinates.
            found.append(rows.view(-1, stride, rows.shape[1]).sum(0))
        return max(int(counts.max()) for counts in found)

    def received(self, rank: int, level: int) -> list[int]:
        """Rows that `rank` gets over a level from the peer with each coordinate, itself too."""
        stride, size = self._levels.strides[level], self._levels.sizes[level]
        rows = self._rows[level][:, rank // stride].view(-1, size, stride)
        return [int(count) for count in rows[:, :, rank % stride].sum(0)]

    def sent(self, rank: int, level: int) -> list[int]:
        """Rows that `rank` sends over a level to the peer with each coordinate, itself too."""
        stride, size = self._levels.strides[level], self._levels.sizes[level]
        beyond = stride * size
        rows = self._rows[level][rank % beyond :: beyond].sum(0)
        return [int(count) for count in rows.view(-1, size)[rank // beyond]]


def _widths(levels: Levels) -> list[int]:
    return [levels.ranks // stride for stride in levels.strides]


def _distinct(numbers: Tensor, count: int) -> Tensor:
    """Which of the numbers 0 … count - 1 are in each row [rows, k]; others are ignored. Bool [rows,
    count]."""
    found = torch.zeros(len(numbers), count + 1, dtype=torch.bool, device=numbers.device)
    is_there = (numbers >= 0) & (numbers < count)
    return found.scatter_(1, numbers.where(is_there, count), True)[:, :count]


def plan_step(levels: Levels, rank: int, level: int, counts: Counts, owners: Tensor) -> RouteStep:
    """The step over `level` of this rank's rows, whose experts lie on `owners` [rows, k]: ranks of
    its group beyond the level, or `ABSENT`."""
    stride, size = levels.strides[level], levels.sizes[level]
    own = rank // stride % size
    targets = torch.where(owners == ABSENT, ABSENT, owners // stride % size)
    goes = _distinct(targets, size).t()
    sent, received = counts.sent(rank, level), counts.received(rank, level)
    keep = _positions(goes[own : own + 1], sent[own])
    sent[own] = received[own] = 0
    others = goes.clone()
    others[own] = False
    send = _positions(others, sum(sent))
    return RouteStep(level, send, sent, received, len(owners), keep)


def _positions(mask: Tensor, count: int) -> Tensor:
    """The column of each of the `count` true elements of a mask, row by row."""
    # The count is known, and a device need not stop to tell it.
    return torch.nonzero_static(mask, size=count)[:, 1]


def is_inside(levels: Levels, rank: int, level: int, owners: Tensor) -> Tensor:
    """Which of the ranks `owners` [rows, k] are in this rank's group at `level` and beyond."""
    stride = levels.strides[level]
    return owners // stride == rank // stride
