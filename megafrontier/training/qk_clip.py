"""QK-clip: queries and keys of a head shrink if its logits have become too large
(`optimizer.qk_clip`; Kimi Team 2025, arXiv:2507.20534, section 2.1)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megafrontier.common.errors import need
from megafrontier.config import Config, ModelConfig
from megafrontier.model.attention.base import Attention
from megafrontier.model.attention.kinds import blocks_with_logits, kind_of
from megafrontier.model.attention.softmax import SoftmaxAttention
from megafrontier.model.gpt import GPT
from megafrontier.model.kernels.backends import MASKED, Computed, form_of, sizes_of
from megafrontier.model.kernels.flash import returns_traced_shape
from megafrontier.optim.unit_optimizers import UnitOptimizers
from megafrontier.parallel.mesh import Mesh
from megafrontier.partition.unit import Unit
from megafrontier.plan.assemble import computed_with
from megafrontier.training.meters import StepMeter
from megafrontier.training.recorder import MetricRecorder

LOG_SUMS, CLIPPED = "attention_log_sum", "clipped_heads"


class ScaledParameter(NamedTuple):
    """A parameter whose first `rows` are scaled."""

    block: int
    """Among the blocks with logits."""
    kind: type[Attention]
    name: str
    """In `Attention.shrunk_rows`."""
    rows: int


class _Rows(NamedTuple):
    """Rows of one parameter in a unit's master."""

    block: int
    kind: type[Attention]
    name: str
    """As in `ScaledParameter`."""
    rows: slice
    """Of the global parameter."""
    columns: int
    skipped: int
    """Elements of the first row that are before `where`."""
    where: slice
    """The elements in the master."""


class QKClip(StepMeter):
    """Measures the logits of a step, and scales queries and keys after its update.

    A head whose largest logit S exceeds the limit t has its logits multiplied by t / S from the
    next step on. Attention says which rows of its matrices that scales (`Attention.shrunk_rows`).

    Note [Largest logits]
    Fused kernels return no logits, but the log-sum-exp of those of each query. The largest one of a
    head is taken for S. It is at least the head's largest logit, and at most the logarithm of the
    number of keys above it. So it costs no pass over the logits, and none exceeds the limit after
    the scaling. Kernels of several ranks or parts merge log-sums, so it is that of all keys.

    Recomputation measures the same values again, which changes no maximum.
    """

    def __init__(
        self,
        config: Config,
        model: GPT,
        units: Sequence[Unit],
        mesh: Mesh,
        optimizer: UnitOptimizers,
    ) -> None:
        """`units`: the trained ones of an engine, in the optimizer's order. Raises UserError if
        attention has no log-sums on this device."""
        self._limit, self._model = config.optimizer.qk_clip, config.model
        self._optimizer = optimizer
        computed = computed_with(config, mesh.world, mesh.splits.context > 1)
        fits = "need 0 on this device, whose attention has no log-sum for each token"
        need(_has_log_sums(config.model, computed), "optimizer.qk_clip", f"{self._limit:g}", fits)
        blocks = blocks_with_logits(config.model)
        self._largest = torch.zeros(len(blocks), config.model.heads, device=mesh.device)
        for number, block in model.numbered_blocks():
            if isinstance(block.attention, SoftmaxAttention):
                own = self._largest[[*blocks].index(number)]
                if (ranks := block.attention.out.ranks) is not None:
                    own = own.chunk(ranks.size)[ranks.index]
                block.attention.largest = own
        self.labels = {LOG_SUMS: [*blocks.values()]}
        scaled = scaled_parameters(config.model)
        self._rows = [self._rows_of(unit, scaled) for unit in units]
        optimizer.correct = self._scale

    def _rows_of(self, unit: Unit, parameters: dict[str, ScaledParameter]) -> list[_Rows]:
        """The rows to scale in this rank's master of a unit."""
        found = []
        for entry, first, last, at in unit.layout.within(*unit.range):
            spec = unit.specs[entry.name]
            if spec.name not in parameters:
                continue
            block, kind, name, rows = parameters[spec.name]
            start, columns = spec.box[0][0], entry.numel // entry.shape[0]
            last = min(last, (rows - start) * columns)
            if first < last:
                covered = slice(start + first // columns, start - (-last // columns))
                where = slice(at, at + last - first)
                found.append(_Rows(block, kind, name, covered, columns, first % columns, where))
        return found

    def _scale(self, index: int, master: torch.Tensor, shrink: torch.Tensor) -> None:
        """Scale the rows of a unit in its master. `shrink` [blocks with logits, heads]."""
        for block, kind, name, rows, columns, skipped, where in self._rows[index]:
            factors = kind.shrunk_rows(self._model, shrink[block])[name][rows].float()
            part = master[where]
            part.mul_(factors.repeat_interleave(columns)[skipped : skipped + len(part)])

    def begin_step(self, step: int) -> None:
        self._largest.zero_()

    def record(self, metrics: MetricRecorder, gradients: Sequence[torch.Tensor]) -> None:
        """Values of other ranks' blocks and heads are 0 here."""
        metrics.add(LOG_SUMS, self._largest, "max")

    def finish(
        self, results: dict[str, torch.Tensor], tokens: torch.Tensor, divisor: torch.Tensor
    ) -> None:
        largest = results[LOG_SUMS]
        is_clipped = (largest > self._limit) & largest.isfinite()
        self._optimizer.corrections = torch.where(is_clipped, self._limit / largest, 1.0)
        results[LOG_SUMS], results[CLIPPED] = largest.amax(1), is_clipped.sum(dtype=torch.float64)


def _has_log_sums(config: ModelConfig, computed: Computed) -> bool:
    """Whether attention returns a log-sum for each token. ROCm's kernel within documents has
    returned padded rows (`returns_traced_shape`); that of parts of sequences does not."""
    is_usual = computed.context or returns_traced_shape(*sizes_of(config, computed))
    return is_usual and form_of(config, computed, 0.0) is not MASKED


def scaled_parameters(config: ModelConfig) -> dict[str, ScaledParameter]:
    """The parameters that QK-clip scales, by their global names."""
    found = {}
    for block, (number, label) in enumerate(blocks_with_logits(config).items()):
        kind = kind_of(config, number)
        prefix = f"{label}.block" if label == "prediction" else label
        for name, factors in kind.shrunk_rows(config, torch.ones(config.heads)).items():
            parameter = ScaledParameter(block, kind, name, len(factors))
            found[f"{prefix}.attention.{name}"] = parameter
    return found
