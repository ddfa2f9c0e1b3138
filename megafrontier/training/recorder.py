"""Metrics that are recorded by name during a step and reduced over the ranks in one message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megafrontier.common.async_copy import to_device
from megafrontier.common.errors import UserError
from megafrontier.parallel.world import World

Reduce = Literal["mean", "sum", "max"]
MetricValue = torch.Tensor | float | Sequence[float]

# The fields of a line in metrics.jsonl, which other metrics must not replace.
STEP_FIELDS = frozenset(
    {
        "step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second",
        "tflops_per_device", "mfu", "memory_gib", "comm", "loss_scale", "skipped", "samples",
        "spike", "valid_loss", "stops", "saving", "save_requests", "snapshots", "waiting_seconds",
        "average_valid_loss", "averaged", "comm_bytes", "comm_seconds", "comm_hidden",
        "expert_tokens", "expert_imbalance", "expert_rank_imbalance", "router_entropy",
        "dropped_tokens", "context_imbalance", "z_loss", "prediction_loss", "tasks", "clipped",
        "corpus_tokens", "corpus_loss", "grad_norm_kinds", "grad_norm_blocks",
        "update_norm_kinds", "update_norm_blocks", "attention_logit_bound",
        "attention_log_sum", "clipped_heads",
        "at", "between_seconds", "goodput",
    }
)  # fmt: skip


@dataclass
class _Entry:
    """What was recorded under one name: the sum or the maximum of `count` values."""

    reduce: Reduce
    value: torch.Tensor
    count: int = 1


class MetricRecorder:
    """Collects one rank's metrics until the next step's end reduces them.

    All values travel in the one message per level that a step sends for its loss, so a metric costs
    no collective. Therefore every rank has to record the same names with the same shapes in each
    step. That is checked in the first one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._entries: dict[str, _Entry] = {}
        self._is_checked = False

    def record(self, name: str, value: MetricValue, reduce: Reduce = "mean") -> None:
        """Record a metric of the present step; metrics.jsonl has it under `name`.

        value: a number or numbers [n], or a tensor [] or [n] on the host or on the device, which
            is copied. The host does not wait for the device.
        reduce: over the ranks. Values that a rank records under one name in one step are reduced in
            the same way: the sum, the maximum or the mean of all of them.

        Raises ValueError for the name of a field that metrics.jsonl has anyway, for an unknown
        `reduce`, and if the values recorded under one name differ in shape or `reduce`.
        """
        if name in STEP_FIELDS:
            raise ValueError(f"metric {name}: a field of every step, need another name")
        self.add(name, value, reduce)

    def add(self, name: str, value: MetricValue, reduce: Reduce) -> None:
        """`record` without the check of the name: for the step's own fields."""
        if reduce not in ("mean", "sum", "max"):
            raise ValueError(f"metric {name}: reduce {reduce!r}, need mean, sum or max")
        if isinstance(value, torch.Tensor):
            new = value.detach().to(torch.float64, copy=True)
        else:
            new = torch.tensor(value, dtype=torch.float64)
        if not new.is_cuda:
            new = to_device(new, self.device)
        old = self._entries.get(name)
        if old is None:
            self._entries[name] = _Entry(reduce, new)
            return
        if (old.reduce, old.value.shape) != (reduce, new.shape):
            raise ValueError(
                f"metric {name}: {reduce} of shape {list(new.shape)}, need {old.reduce} of shape "
                f"{list(old.value.shape)} as recorded before in this step"
            )
        old.value = torch.maximum(old.value, new) if reduce == "max" else old.value + new
        old.count += 1

    def reduce(self, world: World) -> dict[str, torch.Tensor]:
        """Reduce everything that was recorded since the last call over all ranks.

        Returns float64 tensors on the device with the shapes that were recorded, the same bits on
        every rank. All ranks call it. Raises UserError on all of them if ranks differ in what they
        have recorded in the first step.
        """
        if not self._is_checked:
            self._check_ranks(world)
        entries, self._entries = self._entries, {}
        ordered = sorted(entries.items())
        groups = [
            [item for item in ordered if (item[1].reduce == "max") == is_max]
            for is_max in (False, True)
        ]
        empty = torch.empty(0, dtype=torch.float64, device=self.device)
        reduced = world.sum_and_maximum(
            *(torch.cat([empty, *(e.value.reshape(-1) for _, e in group)]) for group in groups)
        )
        found: dict[str, torch.Tensor] = {}
        for flat, group in zip(reduced, groups, strict=True):
            sizes = [entry.value.numel() for _, entry in group]
            for (name, entry), values in zip(group, flat.split(sizes), strict=True):
                if entry.reduce == "mean":
                    values = values / (world.size * entry.count)
                found[name] = values.view(entry.value.shape)
        return found

    def _check_ranks(self, world: World) -> None:
        """Compare with rank 0 in the first step."""
        kinds = [(name, e.reduce, list(e.value.shape)) for name, e in self._entries.items()]
        mine = repr(sorted(kinds))
        first = world.broadcast_from_rank_0(lambda: mine)
        line = (
            f"metrics: ranks 0 and {world.rank} recorded different ones, need the same names, "
            "shapes and reductions on every rank"
        )
        world.raise_first(None if mine == first else UserError(line))
        self._is_checked = True
