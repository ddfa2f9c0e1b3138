"""What the modules of a model need from ranks that divide their matrices and their tokens.

The parameters that they divide say so in their specs (`ParamSpec.cut`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from megafrontier.model.loss import Losses
from megafrontier.model.scores import Scores


class TensorRanks(Protocol):
    """The ranks of a tensor split, each with an equal part of the tokens between the matrices.

    All methods but `part` and those that begin with `start` are differentiable.
    """

    index: int
    size: int

    def part(self, values: Tensor) -> Tensor:
        """Values of all tokens [n, …] → those of this rank's tokens [n / size, …]."""

    def gather_tokens(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens [m, w] → those of all ranks' [size · m, w], in their
        order."""

    def reduce_tokens(self, values: Tensor) -> Tensor:
        """Values of all tokens [n, w] → this rank's part [n / size, w] of their sum over ranks."""

    def gather_linear(
        self, part: Tensor, weights: list[Tensor], biases: list[Tensor], float8: int | None
    ) -> Tensor:
        """This rank's tokens [m, h] → the products of all ranks' tokens with each matrix, side by
        side [size · m, w]."""

    def linear_reduce(self, inputs: Tensor, weight: Tensor, float8: int | None) -> Tensor:
        """inputs [n, w] of all tokens → this rank's part [n / size, h] of the sum over ranks of
        their products."""

    def start_gather_linear_weights(
        self, part: Tensor, gradient: Tensor, weights: Sequence[Tensor], float8: int | None
    ) -> Callable[[], list[Tensor]]:
        """Begin to gather `part` again. The result gives the gradients of the weights."""

    def start_linear_reduce_weight(
        self, inputs: Tensor, gradient: Tensor, float8: int | None
    ) -> Callable[[], list[Tensor]]:
        """Begin to gather the gradient of this rank's tokens [n / size, h]. The result gives the
        gradient of the weight."""

    @property
    def chunk_losses(self) -> Losses:
        """Of this rank's columns of the logits: the losses over all columns."""

    @property
    def chunk_scores(self) -> Scores:
        """Of this rank's columns of the logits: the scores over all columns."""


class DividedModule(nn.Module):
    """A module that computes differently if ranks divide its parameters or its tokens."""

    ranks: TensorRanks | None = None
    """These ranks. A tensor split sets it (`splits/tensor.py`)."""
