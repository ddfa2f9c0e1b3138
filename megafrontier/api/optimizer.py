"""Optimizers of sharded models."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megafrontier.api.model import ShardedModel, sharded
from megafrontier.common.errors import UserError
from megafrontier.optim.base import ShardedOptimizer, group_slices, scalar_states
from megafrontier.partition import Engine

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class Optimizer(torch.optim.Optimizer):
    """An elementwise torch optimizer on the fp32 masters of a sharded model.

    `param_groups`, learning rate schedulers and hooks are torch's. The parameters of the groups are
    this rank's slices of the masters, and `state_dict` has this rank's states; use
    `megafrontier.save` for another number of ranks. A model has one optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        params: Parameters | None = None,
        **options: Any,
    ) -> None:
        """optimizer_class: of torch, or one like it; `options` are its arguments.
        params: parameters of the model, or param groups of them. Default: all that are not frozen.

        Raises UserError if the optimizer's update of an element depends on other elements, and for
        a parameter that is not in the model or is given twice.
        """
        found = sharded(model)
        build, name = partial(optimizer_class, **options), optimizer_class.__name__
        masters = [unit.master for unit in found.engine.trained_units]
        device = masters[0].device if masters else found.engine.hierarchy.device
        scalars = scalar_states(name, build, device)
        inner = ShardedOptimizer(masters, slice_groups(found.engine, model, params), build)
        self._attach(found, inner, scalars)

    def _attach(
        self, found: ShardedModel, inner: ShardedOptimizer, scalar_states: Sequence[str]
    ) -> None:
        """Make this the optimizer of a model. `scalar_states`: those that are one number."""
        self._sharded, self.inner, self.scalar_states = found, inner, scalar_states
        super().__init__(inner.torch.param_groups, inner.torch.defaults)
        self._share_state()
        found.optimizer = self

    def _share_state(self) -> None:
        self.param_groups, self.state = self.inner.torch.param_groups, self.inner.torch.state

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update the masters with the gradients of this step and publish the new weights. All ranks
        call it. The gradients are clear afterwards."""
        if closure is not None:
            raise UserError("closure: not supported, need loss.backward() before step()")
        if self._sharded.optimizer is not self:
            raise UserError("optimizer: not the model's newest one, need one with several groups")
        self.inner.update(self._sharded.finish_gradients())
        self._sharded.end_step(skipped=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: needed only to drop some without a step."""
        self._sharded.drop_gradients()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of the same rank of as many ranks."""
        self.inner.load_state_dict(state_dict)
        self._share_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the optimizer was made, because the masters have been sliced."""
        if self.state is self.inner.torch.state:
            raise UserError("add_param_group: not supported, need all groups when it is made")
        super().add_param_group(param_group)


class AdamW(Optimizer):
    """torch's AdamW on the masters of a sharded model. See `Optimizer`."""

    def __init__(self, model: nn.Module, params: Parameters | None = None, **options: Any) -> None:
        """`options`: lr, betas, eps, weight_decay and the others of `torch.optim.AdamW`."""
        super().__init__(model, torch.optim.AdamW, params, **options)


def as_groups(params: Parameters) -> list[dict[str, Any]]:
    """Param groups, if `params` are none yet."""
    given: list[Any] = list(params)
    return given if given and isinstance(given[0], dict) else [{"params": given}]


def group_members(group: Mapping[str, Any]) -> Iterator[nn.Parameter]:
    """The parameters of a group, which may be a single one or those of `named_parameters`."""
    given = group["params"]
    found: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    for member in found:
        yield member[1] if isinstance(member, tuple) else member


def slice_groups(
    engine: Engine, model: nn.Module, params: Parameters | None
) -> list[dict[str, Any]]:
    """torch's param groups, with slices of this rank's masters as their parameters."""
    trained = [parameter for unit in engine.trained_units for parameter in unit.parameters]
    given = as_groups(trained if params is None else params)
    group_of = _group_of(model, {id(parameter) for parameter in trained}, given)
    found = group_slices(
        engine.trained_units, lambda unit: [*(group_of.get(id(p)) for p in unit.parameters), None]
    )
    return [{**group, "params": found.get(number, [])} for number, group in enumerate(given)]


def _group_of(
    model: nn.Module, trained: set[int], groups: Sequence[Mapping[str, Any]]
) -> dict[int, int]:
    """The group of each parameter, by its id. Raises UserError."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group_members(group):
            name = names.get(id(parameter))
            if name is None:
                raise UserError(
                    f"params: group {number} has a parameter that is not in the model, need those "
                    "of model.parameters() after `shard`"
                )
            if id(parameter) in found:
                raise UserError(f"params: {name} is in two groups or twice, need it once")
            if id(parameter) in trained:  # not frozen
                found[id(parameter)] = number
    return found
