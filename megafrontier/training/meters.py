"""What a step measures besides loss and gradient norm: one class for each kind of metric."""

from collections.abc import Mapping, Sequence

import torch

from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from megafrontier.model.loss import CorpusLosses, PredictionLoss, ZLoss
from megafrontier.parallel.mesh import Mesh
from megafrontier.training.recorder import MetricRecorder


class StepMeter:
    """Measures something in each step, on every rank alike: all ranks add the same names with the
    same shapes. The values travel in the message that ends the step (`MetricRecorder`)."""

    labels: Mapping[str, Sequence[str]] = {}
    """By metric: names of its numbers. metrics.jsonl then has an object in place of a list."""

    def begin_step(self, step: int) -> None:
        """The forwards of a step follow. `step`: how many steps came before it."""

    def begin_forward(self, batch: Batch) -> None:
        """A forward of a micro-batch follows."""

    def record(self, metrics: MetricRecorder, gradients: Sequence[torch.Tensor]) -> None:
        """Add this rank's values. `gradients`: as for `finish_step`."""
        raise NotImplementedError

    def finish(
        self, results: dict[str, torch.Tensor], tokens: torch.Tensor, divisor: torch.Tensor
    ) -> None:
        """Replace the reduced values in `results` by the metrics. `tokens` []: of the step, at
        least 1. `divisor` []: of the summed gradients, before clipping."""


class ZLossMeter(StepMeter):
    """`z_loss`: the mean z-loss of a token."""

    def __init__(self, model: GPT, mesh: Mesh) -> None:
        self._head, self._mesh = getattr(model, "head", None), mesh

    def record(self, metrics: MetricRecorder, gradients: Sequence[torch.Tensor]) -> None:
        """The sum counts on the same ranks as the loss. It is 0 without the last stage of a
        pipeline."""
        loss = self._head.z_loss if self._head else ZLoss(0.0)
        metrics.add("z_loss", loss.take(self._mesh.device) * self._mesh.counts_loss, "sum")

    def finish(
        self, results: dict[str, torch.Tensor], tokens: torch.Tensor, divisor: torch.Tensor
    ) -> None:
        results["z_loss"] = results["z_loss"] / tokens


class PredictionMeter(StepMeter):
    """`prediction_loss`: the mean cross-entropy of the tokens after the next ones."""

    def __init__(self, model: GPT, mesh: Mesh) -> None:
        head = getattr(model, "head", None)
        self._loss, self._mesh = PredictionLoss(0.0) if head is None else head.prediction, mesh

    def record(self, metrics: MetricRecorder, gradients: Sequence[torch.Tensor]) -> None:
        """The sum and the number of tokens, which count on the same ranks as the loss: 0 without
        the last stage of a pipeline."""
        found = self._loss.take(self._mesh.device) * self._mesh.counts_loss
        metrics.add("prediction_loss", found, "sum")

    def finish(
        self, results: dict[str, torch.Tensor], tokens: torch.Tensor, divisor: torch.Tensor
    ) -> None:
        total, number = results["prediction_loss"]
        results["prediction_loss"] = total / number.clamp(min=1)


class CorpusMeter(StepMeter):
    """`corpus_tokens` and `corpus_loss`: the targets of each training corpus in a step, and their
    mean cross-entropy."""

    def __init__(self, model: GPT, mesh: Mesh, labels: Sequence[str]) -> None:
        self._losses, self._model, self._mesh = CorpusLosses(labels), model, mesh
        if hasattr(model, "head"):
            model.head.corpora = self._losses
        self.labels = dict.fromkeys(("corpus_tokens", "corpus_loss"), self._losses.names)

    def begin_forward(self, batch: Batch) -> None:
        if batch.corpora is not None and hasattr(self._model, "head"):
            corpora = batch.corpora[:, None].expand_as(batch.tokens)
            self._losses.begin(self._model.own_part(corpora, batch.documents).flatten())

    def record(self, metrics: MetricRecorder, gradients: Sequence[torch.Tensor]) -> None:
        losses, tokens = self._losses.take(self._mesh.device) * self._mesh.counts_loss
        metrics.add("corpus_loss", losses, "sum")
        metrics.add("corpus_tokens", tokens, "sum")

    def finish(
        self, results: dict[str, torch.Tensor], tokens: torch.Tensor, divisor: torch.Tensor
    ) -> None:
        """A corpus without a token has no loss: NaN, which metrics.jsonl has as null."""
        results["corpus_loss"] = results["corpus_loss"] / results["corpus_tokens"]
