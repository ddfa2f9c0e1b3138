"""Muon for any sharded module, with AdamW for the parameters that are no matrices."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import nn

from megafrontier.api.model import ShardedModel, sharded
from megafrontier.api.optimizer import Optimizer, Parameters, as_groups, group_members, slice_groups
from megafrontier.common.errors import UserError, need
from megafrontier.optim.groups import STATES
from megafrontier.optim.matrices import Matrix, MatrixOwners, find_matrices
from megafrontier.optim.muon import compute_dtype, orthogonalize
from megafrontier.optim.sharded import ShardedOptimizer
from megafrontier.partition import Engine

Group = dict[str, Any]


class Muon(Optimizer):
    """Muon on the matrices of a sharded model, and AdamW on its other parameters, with the formulas
    and defaults of `torch.optim.Muon` and `torch.optim.AdamW`.

    A matrix goes to one rank, which computes its update. See `Optimizer` for what is the same.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Parameters | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        """params: param groups, with `"optimizer": "adamw"` in those that Muon does not update.
            Default: Muon for the parameters of blocks that have two dimensions, AdamW for the rest.
        lr, weight_decay, momentum: of Muon's groups.
        adamw: options of AdamW's groups, such as `{"lr": 3e-4, "betas": (0.9, 0.95)}`.

        Raises UserError for a parameter in Muon's groups that is no matrix, and as `Optimizer`.
        """
        found = sharded(model)
        need(not found.is_offloaded, "offload", True, "need False with Muon")
        muon = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        groups = [
            {"optimizer": "muon"} | (muon if _is_muon(group) else dict(adamw or {})) | group
            for group in _given_groups(model, found, params)
        ]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        matrices = _matrices(found.engine, groups, names)
        masters = [unit.master for unit in found.engine.trained_units]
        slices = slice_groups(found.engine, model, groups)
        self._attach(found, _MuonShards(masters, slices, matrices), ["step"])


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW that holds the param groups and states of both. It updates the parameters that have a
    gradient when it is called: those of its own groups."""


class _MuonShards(ShardedOptimizer):
    """Muon and AdamW on slices of the masters."""

    def __init__(
        self,
        masters: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        matrices: Sequence[Matrix],
    ) -> None:
        super().__init__(masters, groups, MuonWithAdamW)
        self._owners = MatrixOwners(matrices, None, compute_dtype(masters[0].device))
        for group, part, _ in self._members({}):
            for name in _state_names(group):
                self.torch.state[part][name] = torch.zeros_like(part)
            if not _is_muon(group):
                self.torch.state[part]["step"] = torch.tensor(0.0)

    def _members(
        self, gradients: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[Group, torch.Tensor, torch.Tensor | None]]:
        """(group, slice of a master, its gradient) of all slices. `gradients`: by master."""
        located = iter(self._parts)
        for group in self.torch.param_groups:
            for part in group["params"]:
                _, index, where = next(located)
                yield group, part, gradients[index][where] if gradients else None

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Update the masters in place. `gradients`, one 1-D fp32 shard for each master, are
        overwritten. All ranks call it."""
        members = list(self._members(dict(enumerate(gradients))))
        for group, part, gradient in members:
            assert gradient is not None
            if _is_muon(group):  # Nesterov's momentum
                buffer = self.torch.state[part]["momentum_buffer"]
                buffer.lerp_(gradient, 1 - group["momentum"])
                gradient.lerp_(buffer, group["momentum"])
            else:
                part.grad = gradient
        self.torch.step()
        self._owners.apply(gradients, _direction)
        for group, part, gradient in members:
            part.grad = None
            if _is_muon(group):
                assert gradient is not None
                part.mul_(1 - group["lr"] * group["weight_decay"])
                part.add_(gradient, alpha=-group["lr"])

    def flat_states(self) -> dict[str, list[torch.Tensor]]:
        """As in `ShardedOptimizer`. A rank may have no slice of one of the two optimizers."""
        self.flatten(*STATES["muon"], *STATES["adamw"])
        return self.states

    def compact(self) -> None:
        """Keep no states of one optimizer for parameters of the other."""
        for group, part, _ in self._members({}):
            state = self.torch.state[part]
            kept = {name: state[name].clone() for name in _state_names(group)}
            if "step" in state:
                kept["step"] = state["step"]
            self.torch.state[part] = kept
        self.states.clear()


def _is_muon(group: Mapping[str, Any]) -> bool:
    kind = group.get("optimizer", "muon")
    need(kind in ("muon", "adamw"), "params: optimizer", kind, "need muon or adamw")
    return bool(kind == "muon")


def _state_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    return STATES[group["optimizer"]]


def _direction(matrix: Matrix, update: torch.Tensor) -> torch.Tensor:
    rows, columns = matrix.spec.shape
    return orthogonalize(update) * sqrt(max(1, rows / columns))


def _given_groups(model: nn.Module, found: ShardedModel, params: Parameters | None) -> list[Group]:
    if params is not None:
        return as_groups(params)
    of_blocks: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # Of a compiled model the names begin with `_orig_mod`.
        own = name.removeprefix("_orig_mod.")
        in_block = any(own.startswith(f"{block}.") for block in found.blocks)
        (of_blocks if in_block and parameter.dim() == 2 else others).append(parameter)
    need(bool(of_blocks), "params", "none", "need blocks with matrices, or param groups")
    groups: list[Group] = [{"params": of_blocks}, {"params": others, "optimizer": "adamw"}]
    return [group for group in groups if group["params"]]


def _matrices(engine: Engine, groups: Iterable[Group], names: Mapping[int, str]) -> list[Matrix]:
    """The matrices of Muon's groups. Raises UserError for a parameter that is none."""
    chosen: set[int] = set()
    for group in filter(_is_muon, groups):
        for parameter in group_members(group):
            if parameter.dim() != 2:
                raise UserError(
                    f"params: {names.get(id(parameter), 'a parameter')} has shape "
                    f"{tuple(parameter.shape)}, need a matrix, or optimizer: adamw in its group"
                )
            chosen.add(id(parameter))
    units = engine.trained_units
    meant = {
        entry.name
        for unit in units
        for entry, parameter in zip(unit.layout.entries, unit.parameters, strict=True)
        if id(parameter) in chosen
    }
    return find_matrices(units, lambda spec: spec.name in meant)
