"""Muon on slices of flat shards: momentum of slices, Newton–Schulz iterations of whole matrices,
each on the rank that owns it (Note [Owners of matrices])."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod, sqrt
from typing import Self

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.common.errors import need
from megafrontier.optim.base import (
    FlatShards,
    Groups,
    MasterSlice,
    OptimizerGroup,
    ParamGroups,
    ShardedOptimizer,
    SizeFactors,
    UnitOptimizer,
    check_matrix,
    param_groups,
)
from megafrontier.optim.matrices import Matrix, MatrixOwners, find_matrices
from megafrontier.parallel.param_spec import ParamSpec, SizeRatio
from megafrontier.partition.unit import Unit

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7


class MuonWithAdamW(torch.optim.AdamW):
    """Param groups and states of Muon, and of AdamW in `megafrontier.Muon`. Its step is AdamW's, of
    the parameters that have a gradient."""


class ShardedMuon(ShardedOptimizer, UnitOptimizer):
    """torch's Muon (Jordan et al. 2024) with its defaults on the matrices of some units. A
    parameter of experts is as many matrices as there are experts."""

    name = "muon"
    options = ("momentum", "split_heads")
    state_names = ("momentum_buffer",)
    may_update_late = False
    needs_whole_matrices = True

    def __init__(
        self,
        masters: FlatShards,
        groups: ParamGroups,
        matrices: Sequence[Matrix],
        tensor: LevelCollectives | None = None,
    ) -> None:
        """`groups`: those of matrices have the slices of `matrices`, and a `momentum`. `tensor`:
        collectives over the ranks of a tensor split, if it cuts a matrix."""
        super().__init__(masters, groups, MuonWithAdamW)
        self._owners = MatrixOwners(matrices, tensor)
        found = {(i, where.start): matrix for matrix in matrices for i, where in matrix.slices()}
        self._scales = {
            part: sqrt(max(1, matrix.rows / matrix.spec.shape[-1]))
            for part, index, where in self._parts
            if (matrix := found.get((index, where.start))) is not None
        }
        """By slice of a matrix: its update's multiple of the direction."""

    @classmethod
    def make(cls, units: Sequence[Unit], groups: Groups, tensor: LevelCollectives | None) -> Self:
        """As `UnitOptimizer.make`."""

        def rows(spec: ParamSpec) -> int:
            return (groups.of_name(spec.name).split_heads and spec.head_rows) or spec.shape[-2]

        matrices = find_matrices(units, rows)
        params = param_groups(matrix_slices(matrices, groups.numbers), groups, cls.options)
        muon = cls([unit.master for unit in units], params, matrices, tensor)
        muon.flatten(*cls.state_names)
        return muon

    @classmethod
    def check(cls, key: str, group: OptimizerGroup, spec: ParamSpec) -> None:
        """As `UnitOptimizer.check`."""
        check_matrix(key, cls.name, spec, 3 if spec.kind == "expert" else 2)
        widens = spec.ratio is None or not (group.split_heads and spec.head_rows)
        fits = f"but heads need not widen, need false for {spec.name} with model.scaling"
        need(widens, key, "split_heads", fits)

    @classmethod
    def size_factors(cls, ratio: SizeRatio) -> SizeFactors | None:
        """None are needed, because the update of a hidden matrix has the same spectral norm in
        every width, which is what features need to change as much (Yang et al. 2023,
        arXiv:2310.17813)."""
        return SizeFactors() if ratio.role == "hidden" else None

    @classmethod
    def buffer_bytes(cls, matrices: Iterable[tuple[ParamSpec, int]]) -> int:
        """The matrix at hand, the next one, and what the iterations need: two matrices, and two
        products of rows that are at most as large. Experts of a rank are computed in runs."""
        numels = []
        for spec, owners in matrices:
            count = spec.shape[0] if spec.kind == "expert" else 1
            numels.append(prod(spec.shape) // count * ceil(count / min(count, owners)))
        return 6 * max(numels) * torch.bfloat16.itemsize

    def step(
        self, gradients: FlatShards, lr: float, divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """As `UnitOptimizer.step`. All ranks call it. The host does not wait for the device."""
        for gradient in gradients:
            gradient.div_(divisor.float()).masked_fill_(skip > 0, 0.0)
        self.set_rates(lr, self.decay_factor)
        self.update(gradients, (1 - skip).float())

    def update(self, gradients: FlatShards, keep: torch.Tensor | float = 1.0) -> None:
        """Update the masters in place, or change nothing if `keep` [] is 0. `gradients` are
        overwritten. All ranks call it."""
        slices = [found for found in self.slices(gradients) if found[1] in self._scales]
        for group, part, gradient in slices:  # Nesterov's momentum
            buffer = self.torch.state[part]["momentum_buffer"]
            buffer.lerp_(gradient, (1 - group["momentum"]) * keep)
            gradient.lerp_(buffer, group["momentum"])
        self._owners.apply(gradients, self._direction)
        for group, part, direction in slices:
            rate = keep * group["lr"]
            part.mul_(1 - rate * group["weight_decay"])
            part.sub_(direction * (rate * self._scales[part]))

    @staticmethod
    def _direction(matrix: Matrix, update: torch.Tensor) -> torch.Tensor:
        shape = -1, matrix.rows, matrix.spec.shape[-1]
        return orthogonalize(update.view(shape)).view_as(update)


def matrix_slices(
    matrices: Iterable[Matrix], numbers: Mapping[str, int]
) -> dict[int, list[MasterSlice]]:
    """The slices of this rank's masters in matrices, by the group of their names' `numbers`."""
    found: dict[int, list[MasterSlice]] = {}
    for matrix in matrices:
        found.setdefault(numbers[matrix.spec.name], []).extend(matrix.slices())
    return found


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
