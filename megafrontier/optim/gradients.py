"""What happens to gradients before the update: global norm, clipping, dynamic loss scaling."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from megafrontier.common.async_copy import copy_async
from megafrontier.common.norms import ROW, Norms, row_norms
from megafrontier.optim.base import group_slices
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.parallel.world import World
from megafrontier.partition.unit import Unit

GROWTH_INTERVAL = 1000
MIN_SCALE = 2.0**-24
"""Far below 1, because gradients are sums over tokens."""


def square_sum(
    gradients: Sequence[torch.Tensor],
    counts: Sequence[bool],
    known: Sequence[Norms | None] | None = None,
) -> torch.Tensor:
    """Sum of squares, float64 [], of this rank's 1-D shards of gradients.

    counts: whether this rank counts each of them. For the sum over all ranks to count each
        element once, only the first of the ranks that hold the same shard may.
    known: the norms of each gradient's rows, if they have been computed.
    """
    triples = zip(gradients, counts, known or [None] * len(gradients), strict=True)
    counted = [norms or row_norms(gradient) for gradient, is_ours, norms in triples if is_ours]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    norms = torch.cat([norm for pair in counted for norm in pair])
    return norms.double().square().sum()


class SquareSums:
    """Sums of squares of this rank's shards of some units, by cell. Over all ranks each element
    counts once, as in `square_sum`."""

    def __init__(
        self, units: Sequence[Unit], cell_of: Callable[[ParamSpec], int], cells: int
    ) -> None:
        """`cell_of`: the cell of a parameter, below `cells`."""
        self._cells = cells
        self._slices: list[list[tuple[int, slice]]] = [[] for _ in units]

        def numbers(unit: Unit) -> list[int | None]:
            found = [cell_of(unit.specs[entry.name]) for entry in unit.layout.entries]
            return [*found, None]  # no padding

        for cell, slices in group_slices(units, numbers).items():
            for index, part in slices:
                if units[index].counts:
                    self._slices[index].append((cell, part))

    def of(self, indices: Sequence[int], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """float64 [cells], of 1-D shards of the units with these numbers, on their device."""
        total = torch.zeros(self._cells, dtype=torch.float64, device=shards[0].device)
        rows: list[torch.Tensor] = []
        cells: list[int] = []
        for index, shard in zip(indices, shards, strict=True):
            for cell, part in self._slices[index]:
                of_part = shard[part].split(ROW)
                rows += of_part
                cells += [cell] * len(of_part)
        if rows:
            norms = torch.stack(torch._foreach_norm(rows)).double()
            total.index_add_(0, copy_async(torch.tensor(cells), total.device), norms.square())
        return total


def global_norm(
    gradients: Sequence[torch.Tensor], counts: Sequence[bool], world: World
) -> torch.Tensor:
    """Euclidean norm, float64 [], of gradients of which each rank has 1-D shards, counted as in
    `square_sum`. The same bits on every rank."""
    square = square_sum(gradients, counts).to(world.device)
    return world.sum(square.view(1)).sqrt()[0]


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that clips gradients of global norm `norm` [] to `max_norm`; 1 if `max_norm` is 0
    (no clipping)."""
    return (max_norm / (norm + 1e-6)).clamp(max=1) if max_norm > 0 else torch.ones_like(norm)


def is_scale_overflow(loss_scale: float, loss: float | None) -> bool:
    """Whether a step with non-finite gradients needs no more than a lower loss scale.

    At the start of a run in fp16 that happens several times in a row. `loss_scale` is the next
    step's, 0 if there is no loss scaling; `loss` is None if it was not finite.
    """
    can_fall = MIN_SCALE < loss_scale < math.inf
    return can_fall and loss is not None and math.isfinite(loss)


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018): a factor on the loss that is halved
    at an overflow and doubled after `GROWTH_INTERVAL` good steps in a row.

    With other precisions it stays 1. It lives on the device, because the next step needs it before
    the host has read this one.
    """

    def __init__(self, precision: str, initial: float, device: torch.device) -> None:
        self.enabled = precision == "fp16"
        self.scale = torch.tensor(initial if self.enabled else 1.0, device=device)
        self._good_steps = torch.tensor(0.0, device=device)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward starts from."""
        return loss * self.scale if self.enabled else loss

    def update(self, is_bad: torch.Tensor) -> torch.Tensor:
        """Adapt the scale after a step; `is_bad` [] is 1 if its gradients were not finite, else 0.

        Returns the new scale as a multiple [] of the old one.
        """
        before = self.scale
        if self.enabled:
            good = self._good_steps + 1
            is_due = good == GROWTH_INTERVAL
            grown = torch.where(is_due, self.scale * 2, self.scale)
            halved = (self.scale / 2).clamp(min=MIN_SCALE)
            self.scale = torch.where(is_bad > 0, halved, grown)
            self._good_steps = torch.where((is_bad > 0) | is_due, 0.0, good)
        return self.scale / before

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: nothing if scaling is off."""
        if not self.enabled:
            return {}
        return {"scale": self.scale.item(), "good_steps": int(self._good_steps.item())}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Continue from a checkpoint's state; if that is of another precision, start anew."""
        if self.enabled and state_dict:
            self.scale.fill_(state_dict["scale"])
            self._good_steps.fill_(state_dict["good_steps"])
