"""Norms of gradients and of updates by kind of parameter and by block, and a bound of attention's
logits: `log.tensor_norms`."""

from collections.abc import Sequence
from math import sqrt

import torch

from megafrontier.common.async_copy import to_device
from megafrontier.config import ModelConfig
from megafrontier.model.attention.kinds import blocks_with_logits
from megafrontier.model.flops import parameter_specs
from megafrontier.model.gpt import GPT
from megafrontier.optim.gradients import SquareSums
from megafrontier.optim.unit_optimizers import UnitOptimizers
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.partition.unit import Unit
from megafrontier.training.meters import StepMeter
from megafrontier.training.recorder import MetricRecorder

OF_GRADIENTS = "grad_norm_kinds", "grad_norm_blocks"
OF_UPDATES = "update_norm_kinds", "update_norm_blocks"
LOGITS = "attention_logit_bound"


class TensorNorms(StepMeter):
    """Measures every `every` steps. In all other steps it costs nothing.

    Note [Norms of updates]
    The masters are updated after the message that ends a step, or under the next forward. So a step
    that is measured has the norms of its own gradients, and those of the update before it.

    Note [Bound of logits]
    Fused kernels return no logits. A measured step computes the queries and keys of each rank's
    first micro-batch once more, and the largest norm of a query and of a key in each block. Their
    product, divided by the root of the head size, bounds the logits before `softcap` and masks.
    """

    def __init__(
        self,
        every: int,
        config: ModelConfig,
        model: GPT,
        units: Sequence[Unit],
        optimizer: UnitOptimizers,
    ) -> None:
        """`units`: the trained ones of an engine, in the optimizer's order."""
        self._every, self._optimizer = every, optimizer
        specs = parameter_specs(config).values()
        kinds = list(dict.fromkeys(spec.kind for spec in specs))
        blocks = list(dict.fromkeys(block_of(spec.name) for spec in specs))
        self._cells = len(kinds), len(blocks)

        def cell(spec: ParamSpec) -> int:
            return kinds.index(spec.kind) * len(blocks) + blocks.index(block_of(spec.name))

        self._sums = SquareSums(units, cell, len(kinds) * len(blocks))
        self._scale = 1 / sqrt(config.head_dim)
        attending = blocks_with_logits(config)
        self._blocks = dict(model.numbered_blocks())
        self._attending = [*attending]
        self.labels = {LOGITS: [*attending.values()]}
        for names in (OF_GRADIENTS, OF_UPDATES):
            self.labels |= dict(zip(names, (kinds, blocks), strict=True))
        self._is_due = self._knows_update = False
        self._updates: dict[int, torch.Tensor] = {}

    def begin_step(self, step: int) -> None:
        self._knows_update = self._optimizer.observe is not None
        self._is_due = (step + 1) % self._every == 0
        is_next_due = (step + 2) % self._every == 0
        self._optimizer.observe = self._observe if is_next_due else None
        if self._is_due:
            for number in self._blocks.keys() & {*self._attending}:
                self._blocks[number].measure_next()

    def _observe(self, indices: Sequence[int], changes: Sequence[torch.Tensor]) -> None:
        # Of late units on a stream or thread of their own, which has ended before `record`. The
        # tensors stay until the next time, because that stream may reuse their memory.
        self._updates[indices[0]] = self._sums.of(indices, changes)

    def record(self, metrics: MetricRecorder, gradients: Sequence[torch.Tensor]) -> None:
        if not self._is_due:
            return
        self._add(metrics, OF_GRADIENTS, [self._sums.of(range(len(gradients)), gradients)])
        if self._knows_update:
            self._add(metrics, OF_UPDATES, list(self._updates.values()))
        if self._attending:
            metrics.add(LOGITS, self._largest_norms(metrics.device), "max")

    def _largest_norms(self, device: torch.device) -> torch.Tensor:
        """Of queries and keys [2, blocks with logits]; 0 for blocks of other ranks."""
        norms = torch.zeros(2, len(self._attending), device=device)
        for at, number in enumerate(self._attending):
            if number in self._blocks:
                norms[:, at] = self._blocks[number].take_measured()
        return norms

    def _add(
        self, metrics: MetricRecorder, names: Sequence[str], sums: Sequence[torch.Tensor]
    ) -> None:
        """Add the sums of squares of some units, by kind and by block."""
        total = torch.zeros(self._cells, dtype=torch.float64, device=metrics.device)
        for each in sums:
            total += (each if each.is_cuda else to_device(each, metrics.device)).view(self._cells)
        for dimension, name in zip((1, 0), names, strict=True):
            metrics.add(name, total.sum(dimension), "sum")

    def finish(
        self, results: dict[str, torch.Tensor], tokens: torch.Tensor, divisor: torch.Tensor
    ) -> None:
        for names, unit in ((OF_GRADIENTS, divisor), (OF_UPDATES, torch.ones_like(divisor))):
            for name in names:
                if name in results:
                    results[name] = results[name].sqrt() / unit
        if LOGITS in results:
            query, key = results[LOGITS]
            results[LOGITS] = query * key * self._scale


def block_of(name: str) -> str:
    """The block of a parameter by its global name: `blocks.3`, or `embedding`, `prediction`,
    `head`."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "blocks" else first
