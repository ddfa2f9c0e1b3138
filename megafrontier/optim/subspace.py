"""AdamW in learned sparse subspaces of matrices, on the host: LSP-Offload (Chen et al. 2024,
arXiv:2406.10181).

The gradient G [m, n] of a matrix crosses to the host as P^T G Q [p, q], AdamW runs there on p · q
elements, and its change D crosses back and is applied as P D Q^T. P [m, p] and Q [n, q] have a few
nonzeros a row. Their values are fitted to gradients, so that P P^T G Q Q^T is close to G.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Self

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.common.async_copy import DeviceTimer
from megafrontier.common.buffers import empty
from megafrontier.common.errors import need
from megafrontier.config import OptimizerConfig, SubspaceConfig
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.base import FlatShards, Groups, OptimizerGroup, UnitOptimizer, check_matrix
from megafrontier.optim.matrices import find_matrices
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.partition.unit import Unit

FIT_ITERATIONS, FIT_LR = 60, 0.02
CPU = torch.device("cpu")


def _share(config: SubspaceConfig) -> float:
    """Elements of a subspace as a share of a matrix's. Gradient and change cross in fp32, 8 bytes
    an element. Without a subspace these are 4 and 2."""
    return 6 / 8 / config.compression


class Projector:
    """A sparse matrix [rows, columns] with as many nonzeros in each row.

    values: fp32 [rows, nonzeros].
    """

    def __init__(
        self, rows: int, columns: int, nonzeros: int, device: torch.device, seed: int
    ) -> None:
        """Random places, and values of random sign, by the seed."""
        generator = torch.Generator().manual_seed(seed)
        keys = torch.rand(rows, columns, generator=generator)
        places = keys.topk(min(nonzeros, columns), dim=1).indices
        signs = torch.randint(2, places.shape, generator=generator) * 2 - 1
        self._places, self._shape = places.to(device), (rows, columns)
        self.values = (signs / sqrt(places.shape[1])).to(device)

    def dense(self, values: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [rows, columns], with other values if given."""
        values = self.values if values is None else values
        return values.new_zeros(self._shape).scatter(1, self._places, values)


class Subspace:
    """The subspace of one matrix, and AdamW's state in it.

    change: fp32 [p · q] on the host; what AdamW has added to it since it was zero.
    """

    def __init__(
        self,
        shape: Sequence[int],
        config: SubspaceConfig,
        group: OptimizerGroup,
        device: torch.device,
        seed: int,
    ) -> None:
        rows, columns = shape
        share = sqrt(_share(config))
        self._sizes = max(1, int(rows * share)), max(1, int(columns * share))
        self._left = Projector(rows, self._sizes[0], config.nonzeros, device, seed)
        self._right = Projector(columns, self._sizes[1], config.nonzeros, device, seed + 1)
        self._bias, self.group = config.bias, group
        numel, pinned = self._sizes[0] * self._sizes[1], device.type == "cuda"
        self.change, self.gradient = (empty(numel, torch.float32, CPU, pinned) for _ in range(2))
        where = {"params": [(0, slice(numel))], "lr_scale": group.lr_scale, "weight_decay": 0.0}
        values = {"betas": group.betas, "eps": group.eps}
        self.adamw = ShardedAdamW([self.change], [where | values], "torch")

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, by name."""
        moments = {name: shards[0] for name, shards in self.adamw.states.items()}
        return {"left": self._left.values, "right": self._right.values, **moments}

    def send(self, gradient: torch.Tensor) -> None:
        """Begin to bring a gradient [m, n] to the host."""
        left, right = self._left.dense(), self._right.dense()
        projected = (left.T @ gradient @ right).view(-1)
        self.gradient.copy_(projected, non_blocking=True)

    def receive(self) -> torch.Tensor:
        """The change [m, n] of the matrix, on the device."""
        change = self.change.to(self._left.values.device, non_blocking=True).view(self._sizes)
        return self._left.dense() @ change @ self._right.dense().T

    def refit(self, gradient: torch.Tensor) -> None:
        """Fit the projectors to a gradient, unless its relative error is within the bound. The
        moments move to the new subspace, as in section 4 of the paper."""
        old = self._left.dense(), self._right.dense()
        if not self._fit(gradient / gradient.norm().clamp(min=1e-30)):
            return
        into = self._left.dense().T @ old[0], old[1].T @ self._right.dense()
        for name, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            (moment,) = self.adamw.states[name]
            first, last = (matrix**power for matrix in into)
            moved = first @ moment.view(self._sizes).to(first.device) @ last
            moment.copy_(moved.view(-1))

    def _fit(self, target: torch.Tensor) -> bool:
        """Lower the error of `target` [m, n], of norm 1. Returns whether values have changed."""
        sides = (self._left, self._right)
        values = [side.values.clone().requires_grad_() for side in sides]
        optimizer = torch.optim.Adam(values, lr=FIT_LR)
        has_changed = False
        for _ in range(FIT_ITERATIONS):
            with torch.enable_grad():
                left, right = (s.dense(v) for s, v in zip(sides, values, strict=True))
                error = (left @ (left.T @ target @ right) @ right.T - target).norm()
            if error.item() <= self._bias:
                break
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            has_changed = True
        for side, value in zip(sides, values, strict=True):
            side.values.copy_(value.detach())
        return has_changed


class ShardedSubspace(UnitOptimizer):
    """Updates the masters of units whose parameters are all matrices, on one rank. It has no
    `states`, because moments have another shape than parameters: `buffers` has them."""

    name = "lsp"
    options = ("betas", "eps")
    may_update_late = False
    may_be_on_host = False

    def __init__(self, units: Sequence[Unit], groups: Groups) -> None:
        self.states, self._steps, self._config = {}, 0, groups.config.subspace
        self._matrices = find_matrices(units, lambda spec: spec.shape[0])
        device = units[0].master.device
        self._subspaces = [
            Subspace(spec.shape, self._config, groups.of_name(spec.name), device, 2 * number)
            for number, spec in enumerate(matrix.spec for matrix in self._matrices)
        ]

    @classmethod
    def make(cls, units: Sequence[Unit], groups: Groups, tensor: LevelCollectives | None) -> Self:
        """As `UnitOptimizer.make`."""
        return cls(units, groups)

    @classmethod
    def check_run(cls, key: str, ranks: int) -> None:
        """As `UnitOptimizer.check_run`."""
        need(ranks == 1, key, cls.name, f"need 1 rank, not {ranks}, or another optimizer")

    @classmethod
    def check(cls, key: str, group: OptimizerGroup, spec: ParamSpec) -> None:
        """As `UnitOptimizer.check`."""
        check_matrix(key, cls.name, spec)

    @classmethod
    def host_bytes(cls, numel: int, config: OptimizerConfig) -> int:
        """The subspaces' two moments, gradient and change, in fp32."""
        return int(16 * numel * _share(config.subspace))

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """As `UnitOptimizer.buffers`."""
        return {
            f"optimizer.{matrix.spec.name}.{what}": value
            for matrix, subspace in zip(self._matrices, self._subspaces, strict=True)
            for what, value in subspace.state().items()
        }

    @property
    def steps(self) -> int:
        """Number of updates made."""
        return self._steps

    def restore(self, steps: int) -> None:
        """As `UnitOptimizer.restore`."""
        self._steps = steps
        for subspace in self._subspaces:
            subspace.adamw.restore(steps)

    def step(
        self, gradients: FlatShards, lr: float, divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """As `UnitOptimizer.step`. The host waits for the device, and updates one matrix while the
        gradients of later ones cross."""
        if skip.item():
            return
        one, no = torch.ones(()), torch.zeros(())
        arrived = []
        for matrix, subspace in zip(self._matrices, self._subspaces, strict=True):
            ((index, where),) = matrix.slices()
            gradient = gradients[index][where].view(matrix.spec.shape).div_(divisor.float())
            if self._steps % self._config.refit_every == 0:
                subspace.refit(gradient)
            subspace.send(gradient)
            arrived.append((DeviceTimer(gradient.device), subspace, matrix.unit.master[where]))
        for timer, subspace, master in arrived:
            timer.wait()
            subspace.change.zero_()
            subspace.adamw.step([subspace.gradient], lr, one, no)
            change, group = subspace.receive(), subspace.group
            decay = self.decay_factor * group.weight_decay
            master.mul_(1 - lr * group.lr_scale * decay).add_(change.view(-1))
        self._steps += 1
