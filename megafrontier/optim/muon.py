"""Muon on the shards of units: momentum of shards, Newton–Schulz iterations of whole matrices, each
on the rank that owns it (Note [Owners of matrices])."""

from collections.abc import Mapping, Sequence
from math import sqrt

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.optim.groups import STATES, OptimizerGroup
from megafrontier.optim.matrices import Matrix, MatrixOwners, find_matrices
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.partition.unit import Unit

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7


class ShardedMuon:
    """torch's Muon (Jordan et al. 2024) with its defaults over the masters of units whose
    parameters are all matrices. That of experts is as many matrices as there are experts.

    states: `momentum_buffer`, one 1-D fp32 shard for each unit.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Mapping[str, OptimizerGroup],
        tensor: LevelCollectives | None = None,
    ) -> None:
        """`groups`: the group of each parameter, by its global name. `tensor`: collectives over the
        ranks of a tensor split, if it cuts a matrix."""
        self._units, self._groups = units, groups
        (name,) = STATES["muon"]
        self.states = {name: [torch.zeros_like(unit.master) for unit in units]}
        matrices = find_matrices(units, lambda spec: True)
        self._owners = MatrixOwners(matrices, tensor, compute_dtype(units[0].master.device))

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """As `UnitOptimizer.step`. All ranks call it. The host does not wait for the device."""
        keep = (1 - skip).float()
        (buffers,) = self.states.values()
        for unit, gradient, buffer in zip(self._units, gradients, buffers, strict=True):
            gradient.div_(divisor.float()).masked_fill_(skip > 0, 0.0)
            self._update_momentum(unit, gradient, buffer, keep)
        self._owners.apply(gradients, self._direction)
        for unit, gradient in zip(self._units, gradients, strict=True):
            self._update_master(unit, gradient, lr, keep)

    def _update_momentum(
        self, unit: Unit, gradient: torch.Tensor, buffer: torch.Tensor, keep: torch.Tensor
    ) -> None:
        """Make `gradient` the update before the iterations: Nesterov's."""
        for entry, first, last, at in unit.layout.within(*unit.range):
            group = self._groups[unit.specs[entry.name].name]
            own = slice(at, at + last - first)
            buffer[own].lerp_(gradient[own], (1 - group.momentum) * keep)
            gradient[own].lerp_(buffer[own], group.momentum)

    def _direction(self, matrix: Matrix, update: torch.Tensor) -> torch.Tensor:
        rows, columns = self._part_rows(matrix.spec), matrix.spec.shape[-1]
        return orthogonalize(update.view(-1, rows, columns)).view_as(update)

    def _part_rows(self, spec: ParamSpec) -> int:
        """Rows of the matrices that are updated as one each."""
        split = self._groups[spec.name].split_heads
        return spec.head_rows if split and spec.head_rows else spec.shape[-2]

    def _update_master(
        self, unit: Unit, direction: torch.Tensor, lr: float, keep: torch.Tensor
    ) -> None:
        for entry, first, last, at in unit.layout.within(*unit.range):
            spec, own = unit.specs[entry.name], slice(at, at + last - first)
            group = self._groups[spec.name]
            rate = keep * (lr * group.lr_scale)
            unit.master[own].mul_(1 - rate * group.weight_decay)
            factor = sqrt(max(1, self._part_rows(spec) / spec.shape[-1]))
            unit.master[own].sub_(direction[own] * (rate * factor))


def compute_dtype(device: torch.device) -> torch.dtype:
    """The type of Newton–Schulz iterations, and of what owners of matrices are sent."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalize(update: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of matrices [..., rows, columns] near 1, by Newton–Schulz
    iterations of the fifth degree. Returns a contiguous tensor of the same shape and type."""
    a, b, c = COEFFICIENTS
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.reshape(-1, *update.shape[-2:])
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(update.shape).contiguous()
