"""Muon on the shards of units: momentum of shards, Newton–Schulz iterations of whole matrices.

Note [Whole matrices]
A unit's flat buffer is cut into equal shards, across matrices. The momentum is updated shard by
shard. The update before the iterations is then gathered over the levels that shard the optimizer
state, and each rank computes the iterations of those matrices that its shard has a part of. So the
state is sharded as AdamW's, whatever the number of matrices and ranks, and nothing has to be sent
back. The price is one more gather of each unit in a step (`placement.gather_bytes`), and that ranks
that share a matrix compute the same.
"""

from collections.abc import Mapping, Sequence
from math import sqrt

import torch

from megafrontier.optim.groups import STATES, OptimizerGroup
from megafrontier.partition.comm.streams import AsyncChain
from megafrontier.partition.unit import Unit

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7


class ShardedMuon:
    """torch's Muon (Jordan et al. 2024) with its defaults over the masters of units whose
    parameters are all matrices.

    states: `momentum_buffer`, one 1-D fp32 shard for each unit.
    """

    def __init__(self, units: Sequence[Unit], groups: Mapping[str, OptimizerGroup]) -> None:
        """`groups`: the group of each parameter, by its name."""
        self._units, self._groups = units, groups
        (name,) = STATES["muon"]
        self.states = {name: [torch.zeros_like(unit.master) for unit in units]}

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """As `UnitOptimizer.step`. All ranks call it. The host does not wait for the device."""
        keep = (1 - skip).float()
        # Gather the next unit while this one is computed.
        previous: tuple[Unit, AsyncChain] | None = None
        (buffers,) = self.states.values()
        for unit, gradient, buffer in zip(self._units, gradients, buffers, strict=True):
            gradient.div_(divisor.float()).masked_fill_(skip > 0, 0.0)
            self._update_momentum(unit, gradient, buffer, keep)
            update = gradient.to(compute_dtype(unit))
            started = unit, unit.gather_shards(update, "update", "gradients")
            if previous is not None:
                self._update_masters(*previous, lr, keep)
            previous = started
        if previous is not None:
            self._update_masters(*previous, lr, keep)

    def _update_momentum(
        self, unit: Unit, gradient: torch.Tensor, buffer: torch.Tensor, keep: torch.Tensor
    ) -> None:
        """Make `gradient` the update before the iterations: Nesterov's."""
        for entry, first, last, at in unit.layout.within(*unit.range):
            own, momentum = slice(at, at + last - first), self._groups[entry.name].momentum
            buffer[own].lerp_(gradient[own], (1 - momentum) * keep)
            gradient[own].lerp_(buffer[own], momentum)

    def _update_masters(
        self, unit: Unit, gathering: AsyncChain, lr: float, keep: torch.Tensor
    ) -> None:
        updates = gathering.wait()
        for entry, first, last, at in unit.layout.within(*unit.range):
            group = self._groups[entry.name]
            rate = keep * (lr * group.lr_scale)
            update = updates[entry.offset : entry.offset + entry.numel].view(entry.shape)
            rows, columns = entry.shape
            direction = orthogonalize(update).reshape(-1)[first:last].float()
            master = unit.master[at : at + last - first]
            master.mul_(1 - rate * group.weight_decay)
            master.sub_(direction * (rate * sqrt(max(1, rows / columns))))


def compute_dtype(unit: Unit) -> torch.dtype:
    """The type of gathered updates and of Newton–Schulz iterations."""
    return torch.float32 if unit.master.device.type == "cpu" else torch.bfloat16


def orthogonalize(update: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of a matrix [rows, columns] near 1, by Newton–Schulz iterations of
    the fifth degree. Returns a matrix of the same shape and type."""
    a, b, c = COEFFICIENTS
    is_tall = update.shape[0] > update.shape[1]
    x = update.T if is_tall else update
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
