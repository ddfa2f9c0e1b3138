"""What a step does with its micro-batches, and the runner of a model that each rank has whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from megafrontier.model.positions import followed_tokens
from megafrontier.partition.engine import Engine


@dataclass(frozen=True)
class Work:
    """Micro-batches, and what is called while they run.

    before: is called with a batch before a forward of it, and with the number of the first block.
    scaled: gives the loss that backward starts from.
    after: is called after each forward and backward of a stage, or of the whole model.
    scores: if given, `Runner.evaluate` calls it with a batch and `token_scores` of it, and sums no
        losses.
    """

    batches: Sequence[Batch]
    before: Callable[[Batch, int], None] = lambda batch, block: None
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss
    after: Callable[[], None] = lambda: None
    scores: Callable[[Batch, Tensor], None] | None = None


class Runner(Protocol):
    """Runs the forwards and backwards of a step."""

    model: GPT

    def train(self, work: Work) -> Tensor:
        """Forward and backward of a step's micro-batches; gradients go to their shards.

        Returns this rank's sum of losses and its number of tokens, float64 [2] on the device.
        """
        ...

    def evaluate(self, work: Work) -> Tensor:
        """Forward of micro-batches. Returns as `train` does."""
        ...


class WholeModel:
    """Runs a model of which this rank has all blocks, one micro-batch after another."""

    def __init__(self, model: GPT, engine: Engine) -> None:
        self.model, self._engine = model, engine

    def train(self, work: Work) -> Tensor:
        """Forward and backward, as `Runner.train`."""
        totals = self._zeros()
        for number, batch in enumerate(work.batches, start=1):
            loss = self._forward(work, batch)
            with self._engine.no_sync(number < len(work.batches)):
                work.scaled(loss).backward()
            work.after()
            totals += count_targets(self.model, batch, loss)
        return totals

    @torch.no_grad()
    def evaluate(self, work: Work) -> Tensor:
        """Forward, as `Runner.evaluate`."""
        totals = self._zeros()
        for batch in work.batches:
            totals += count(self.model, work, batch, self._forward(work, batch))
            work.after()
        return totals

    def _forward(self, work: Work, batch: Batch) -> Tensor:
        work.before(batch, 0)
        out: Tensor = self.model(
            batch.tokens,
            batch.targets,
            batch.documents,
            scores=work.scores is not None,
            padding=batch.padding,
        )
        return out

    def _zeros(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._engine.hierarchy.device)


def count(model: GPT, work: Work, batch: Batch, out: Tensor) -> Tensor:
    """Hand the scores of a batch to `work.scores`, or else return `count_targets`."""
    if work.scores is None:
        return count_targets(model, batch, out)
    work.scores(batch, out)
    return torch.zeros(2, dtype=torch.float64, device=out.device)


def count_targets(model: GPT, batch: Batch, loss: Tensor) -> Tensor:
    """The loss and the number of tokens that it is a sum over, float64 [2]."""
    tokens = (model.own_part(batch.targets, batch.documents) >= 0).sum()
    return torch.stack([loss.detach().double(), tokens.double()])


def count_routed(batch: Batch) -> Tensor:
    """The targets of a batch, the tokens that the routers of its blocks count, and those that the
    router of `model.prediction` counts, float64 [3]."""
    padding = 0 if batch.padding is None else batch.padding.sum()
    followed = followed_tokens(batch.tokens, batch.documents, batch.padding).sum()
    tokens = torch.full_like(followed, batch.tokens.numel()) - padding
    return torch.stack([(batch.targets >= 0).sum(), tokens, followed]).double()
