"""AdamW in learned sparse subspaces of matrices, on the host: LSP-Offload (Chen et al. 2024,
arXiv:2406.10181).

The gradient G [m, n] of a matrix crosses to the host as P^T G Q [p, q], AdamW runs there on p · q
elements, and its change D crosses back and is applied as P D Q^T. P [m, p] and Q [n, q] have a few
nonzeros a row. Their values are fitted to gradients, so that P P^T G Q Q^T is close to G.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt

import torch

from megafrontier.common.async_copy import DeviceTimer
from megafrontier.common.buffers import empty
from megafrontier.config import SubspaceConfig
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.groups import OptimizerGroup
from megafrontier.partition.unit import Unit

FIT_ITERATIONS, FIT_LR = 60, 0.02
CPU = torch.device("cpu")


def _share(config: SubspaceConfig) -> float:
    """Elements of a subspace as a share of a matrix's. Gradient and change cross in fp32, 8 bytes
    an element. Without a subspace these are 4 and 2."""
    return 6 / 8 / config.compression


def subspace_bytes(numel: int, config: SubspaceConfig) -> int:
    """Bytes on the host of the subspaces of matrices with `numel` elements in all: two moments,
    gradient and change, in fp32."""
    return int(16 * numel * _share(config))


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
        self._bias = config.bias
        numel, pinned = self._sizes[0] * self._sizes[1], device.type == "cuda"
        self.change, self.gradient = (empty(numel, torch.float32, CPU, pinned) for _ in range(2))
        where = {"params": [(0, slice(numel))], "lr_scale": group.lr_scale, "weight_decay": 0.0}
        values = {"betas": group.betas, "eps": group.eps}
        self.adamw = ShardedAdamW([self.change], [where | values], "torch")

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross between device and host in a step."""
        return self.gradient.nbytes + self.change.nbytes

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


class ShardedSubspace:
    """Updates the masters of units whose parameters are all matrices, on one rank.

    states: none, because moments have another shape than parameters. `buffers` has them.
    """

    def __init__(
        self, units: Sequence[Unit], groups: Mapping[str, OptimizerGroup], config: SubspaceConfig
    ) -> None:
        """`groups`: the group of each parameter, by its global name."""
        self.states: dict[str, list[torch.Tensor]] = {}
        self._units, self._groups, self._config = units, groups, config
        self._subspaces = {
            name: Subspace(shape, config, groups[name], units[0].master.device, 2 * number)
            for number, (name, shape, _, _) in enumerate(self._matrices())
        }
        self._steps = 0

    def _matrices(self) -> Iterator[tuple[str, tuple[int, ...], int, slice]]:
        """(global name, shape, number of the unit, place in its master) of each matrix."""
        for number, unit in enumerate(self._units):
            for entry in unit.layout.entries:
                where = slice(entry.offset, entry.offset + entry.numel)
                yield unit.specs[entry.name].name, entry.shape, number, where

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, by name."""
        return {
            f"optimizer.{name}.{what}": value
            for name, subspace in self._subspaces.items()
            for what, value in subspace.state().items()
        }

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross between device and host in a step."""
        return sum(subspace.crossing_bytes for subspace in self._subspaces.values())

    @property
    def steps(self) -> int:
        """Number of updates made."""
        return self._steps

    def restore(self, steps: int) -> None:
        """Continue after `steps` updates. The `buffers` have been filled in place."""
        self._steps = steps
        for subspace in self._subspaces.values():
            subspace.adamw.restore(steps)

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """As `UnitOptimizer.step`. The host waits for the device, and updates one matrix while the
        gradients of later ones cross."""
        if skip.item():
            return
        one, no = torch.ones(()), torch.zeros(())
        arrived = []
        for name, shape, number, where in self._matrices():
            gradient = gradients[number][where].view(shape).div_(divisor.float())
            if self._steps % self._config.refit_every == 0:
                self._subspaces[name].refit(gradient)
            self._subspaces[name].send(gradient)
            arrived.append(DeviceTimer(gradient.device))
        for timer, (name, shape, number, where) in zip(arrived, self._matrices(), strict=True):
            subspace, group = self._subspaces[name], self._groups[name]
            timer.wait()
            subspace.change.zero_()
            subspace.adamw.step([subspace.gradient], lr, one, no)
            master = self._units[number].master[where].view(shape)
            master.mul_(1 - lr * group.lr_scale * group.weight_decay).add_(subspace.receive())
        self._steps += 1
