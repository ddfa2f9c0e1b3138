"""Context parallelism of a GPT, applied from outside: each rank has some tokens of each sequence.

A sequence is 2 · c equal chunks for c ranks. The i-th rank has the chunks i and 2 · c - 1 - i, so
that under the causal mask all ranks have the same number of pairs (query, key). Only keys and
values cross ranks: all ranks gather them in forward and again in backward, and their gradients are
summed. Heads that queries share travel once. Everything else in the model works on single tokens.

Parameters are replicated over these ranks as over those with other samples.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megafrontier.common.errors import UserError
from megafrontier.model.block import Block
from megafrontier.model.gpt import GPT
from megafrontier.model.kernels.chunks import chunk_attention, register
from megafrontier.model.recompute.checkpointing import RECOMPUTES_BLOCK
from megafrontier.splits.tokens import TokenGroup


def check_context_split(length: int, size: int, key: str = "parallel.context") -> None:
    """Raises UserError for sequences of `length` tokens that `size` ranks cannot divide."""
    if size > 1 and length % (2 * size):
        fits = ", ".join(
            ["1", *(str(n) for n in range(2, length // 2 + 1) if not length % (2 * n))]
        )
        raise UserError(
            f"{key}: {size}, cuts sequences into {2 * size} chunks, which do not divide "
            f"model.sequence_length ({length}), need one of {fits}"
        )


def split_sequences(model: GPT, index: int, size: int) -> TokenGroup:
    """Let a GPT, which may be on the meta device, process the part of each sequence that the
    `index`-th of `size` ranks has.

    Call it before `shard`, and connect the result to the engine after that. The model's forward
    then takes whole micro-batches on each of the ranks, and returns the sum of the losses of
    `GPT.part` of them. Raises UserError as `check_context_split` does.
    """
    check_context_split(model.config.sequence_length, size)
    split = ContextSplit(TokenGroup(index, size))
    model.part = split.part
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.over_chunks = partial(
            chunk_attention,
            exchange=split.number,
            keeps_keys=block.checkpointing in RECOMPUTES_BLOCK,
        )
    return split.group


class ContextSplit:
    """The ranks that share sequences, as an exchange of keys and values (`kernels.chunks`)."""

    def __init__(self, group: TokenGroup) -> None:
        self.group = group
        self.number = register(self)

    @property
    def size(self) -> int:
        return self.group.size

    def starts(self, length: int) -> tuple[int, int]:
        index, count = self.group.index, 2 * self.group.size
        size = length // count
        return index * size, (count - 1 - index) * size

    def part(self, values: Tensor) -> Tensor:
        """This rank's part [b, s / size, …] of values of all tokens [b, s, …]."""
        chunks = values.chunk(2 * self.group.size, 1)
        return torch.cat([chunks[self.group.index], chunks[-1 - self.group.index]], 1)

    def begin_gather(self, heads: Tensor) -> Callable[[], Tensor]:
        chain, parts = self.group.start_gather(heads[None])

        def wait() -> Tensor:
            self.group.wait(chain)
            return self._joined(parts)

        return wait

    def reduce(self, heads: Tensor) -> Tensor:
        return self.group.reduce(self._divided(heads))[0]

    def _joined(self, parts: Tensor) -> Tensor:
        """Whole sequences [b, s, …] of the parts [size, b, s / size, …] of all ranks."""
        first, last = parts.chunk(2, 2)
        return torch.cat([first, last.flip(0)]).transpose(0, 1).flatten(1, 2)

    def _divided(self, whole: Tensor) -> Tensor:
        """The inverse of `_joined`."""
        chunks = whole.unflatten(1, (2 * self.group.size, -1)).transpose(0, 1)
        first, last = chunks.chunk(2)
        return torch.cat([first, last.flip(0)], 2)
