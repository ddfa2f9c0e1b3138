"""Muon for any sharded module, with AdamW for the parameters that are no matrices."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megafrontier.api.model import ShardedModel, sharded
from megafrontier.api.optimizer import Optimizer, Parameters, as_groups, group_members, slice_groups
from megafrontier.common.errors import UserError, need
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.base import FlatShards, ParamGroups
from megafrontier.optim.matrices import Matrix, find_matrices
from megafrontier.optim.muon import ShardedMuon, matrix_slices
from megafrontier.partition import Engine

ParamGroup = dict[str, Any]


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
        muon = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        groups = [
            {"optimizer": ShardedMuon.name}
            | (muon if _is_muon(group) else dict(adamw or {}))
            | group
            for group in _given_groups(model, found, params)
        ]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        numbers = _matrix_groups(found.engine, groups, names)
        units = found.engine.trained_units
        matrices = find_matrices(units, lambda spec: spec.shape[0] if spec.name in numbers else 0)
        sliced = slice_groups(found.engine, model, groups)
        for number, slices in matrix_slices(matrices, numbers).items():
            sliced[number]["params"] = slices
        masters = [unit.master for unit in units]
        self._attach(found, _MuonAndAdamW(masters, sliced, matrices), ["step"])


class _MuonAndAdamW(ShardedMuon):
    """Muon on the slices of matrices, and AdamW on the other slices of the masters."""

    def __init__(
        self, masters: FlatShards, groups: ParamGroups, matrices: Sequence[Matrix]
    ) -> None:
        super().__init__(masters, groups, matrices)
        self.flat_states()
        self.compact()

    def update(self, gradients: FlatShards, keep: torch.Tensor | float = 1.0) -> None:
        """As `ShardedMuon.update`, and AdamW's update of the other slices."""
        for _, part, gradient in self.slices(gradients):
            part.grad = None if part in self._scales else gradient
        self.torch.step()
        for part, _, _ in self._parts:
            part.grad = None
        super().update(gradients, keep)

    def flat_states(self) -> dict[str, list[torch.Tensor]]:
        """As in `ShardedOptimizer`. A rank may have no slice of one of the two optimizers."""
        self.flatten(*ShardedMuon.state_names, *ShardedAdamW.state_names)
        return self.states

    def compact(self) -> None:
        """Keep no states of one optimizer for parameters of the other."""
        for part, _, _ in self._parts:
            state, is_muon = self.torch.state[part], part in self._scales
            kept = {} if is_muon else {"step": state.get("step", torch.tensor(0.0))}
            names = (ShardedMuon if is_muon else ShardedAdamW).state_names
            self.torch.state[part] = kept | {name: state[name].clone() for name in names}
        self.states.clear()


def _is_muon(group: Mapping[str, Any]) -> bool:
    kind, names = group.get("optimizer", ShardedMuon.name), (ShardedMuon.name, ShardedAdamW.name)
    need(kind in names, "params: optimizer", kind, f"need {' or '.join(names)}")
    return bool(kind == ShardedMuon.name)


def _given_groups(
    model: nn.Module, found: ShardedModel, params: Parameters | None
) -> list[ParamGroup]:
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
    groups: list[ParamGroup] = [
        {"params": of_blocks},
        {"params": others, "optimizer": ShardedAdamW.name},
    ]
    return [group for group in groups if group["params"]]


def _matrix_groups(
    engine: Engine, groups: Sequence[ParamGroup], names: Mapping[int, str]
) -> dict[str, int]:
    """The groups of Muon's parameters, by their global names. Raises UserError for a parameter that
    is no matrix."""
    numbers: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group_members(group) if _is_muon(group) else ():
            if parameter.dim() != 2:
                raise UserError(
                    f"params: {names.get(id(parameter), 'a parameter')} has shape "
                    f"{tuple(parameter.shape)}, need a matrix, or optimizer: adamw in its group"
                )
            numbers[id(parameter)] = number
    return {
        unit.specs[entry.name].name: numbers[id(parameter)]
        for unit in engine.trained_units
        for entry, parameter in zip(unit.layout.entries, unit.parameters, strict=True)
        if id(parameter) in numbers
    }
