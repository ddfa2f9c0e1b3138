"""What an optimizer says about itself, and torch optimizers on slices of flat fp32 shards.

An optimizer is a subclass of `UnitOptimizer` in a file of its own, listed in `groups.OPTIMIZERS`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.common.errors import UserError
from megafrontier.config import OptimizerConfig
from megafrontier.parallel.param_spec import ParamSpec, SizeRatio
from megafrontier.partition.unit import Unit

Build = Callable[[Any], torch.optim.Optimizer]
"""From parameters or param groups to a torch optimizer."""
MasterSlice = tuple[int, slice]
"""The index of a shard, and the part of it."""
FlatShards = Sequence[torch.Tensor]
"""For each unit, a 1-D fp32 shard of this rank."""
ParamGroups = Sequence[Mapping[str, Any]]
"""torch's param groups, in which `params` are `MasterSlice`s of shards."""


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with the same optimizer and the same values of it."""

    optimizer: str
    lr_scale: float
    """The learning rate as a multiple of the schedule's."""
    betas: tuple[float, float]
    eps: float
    momentum: float
    weight_decay: float
    split_heads: bool


class Groups(Protocol):
    """The optimizer groups, and by a parameter's global name the number of its group. An odd number
    is that of the parameters without weight decay, next to the one with it."""

    config: OptimizerConfig
    groups: list[OptimizerGroup]
    numbers: dict[str, int]

    def of_name(self, name: str) -> OptimizerGroup:
        """The group of a parameter."""


class SizeFactors(NamedTuple):
    """Multiples of a base model's values in a model of another size."""

    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0


class UnitOptimizer:
    """Updates the masters of some units. Its class says what the rest of the library needs to know
    about it.

    states: by torch's names, one 1-D fp32 shard for each unit.
    """

    name: ClassVar[str]
    """`optimizer.name` in the config."""
    options: ClassVar[tuple[str, ...]] = ()
    """The fields of `OptimizerGroup` that it reads, besides `lr_scale` and `weight_decay`."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """Its states with one fp32 element for each element of a parameter, by torch's names."""
    may_update_late: ClassVar[bool] = True
    """Whether units may be updated one by one under the next forward, with
    `partition.overlap_update` and `partition.offload`. Otherwise they are updated at once."""
    may_be_on_host: ClassVar[bool] = True
    """Whether masters and states may be in host memory (`partition.offload`). Otherwise they stay
    on the device."""
    needs_whole_matrices: ClassVar[bool] = False
    """Whether the ranks bring the parts of a matrix together for an update. `plan` then runs its
    messages and products; of other optimizers it counts passes over memory."""
    states: dict[str, list[torch.Tensor]]
    decay_factor: float = 1.0
    """What the next updates multiply each group's weight decay by."""

    @classmethod
    def make(cls, units: Sequence[Unit], groups: Groups, tensor: LevelCollectives | None) -> Self:
        """The optimizer of these units. `tensor`: collectives over the ranks of a tensor split."""
        raise NotImplementedError

    @classmethod
    def check_run(cls, key: str, ranks: int) -> None:
        """Raises UserError, with the `key` of its name, for a run that it cannot be a part of."""

    @classmethod
    def check(cls, key: str, group: OptimizerGroup, spec: ParamSpec) -> None:
        """Raises UserError, with the `key` of its name, for a parameter that it cannot update."""

    @classmethod
    def size_factors(cls, ratio: SizeRatio) -> SizeFactors | None:
        """The factors of a parameter with `model.scaling`; None if there is no rule for it."""
        return None

    @classmethod
    def element_bytes(cls) -> int:
        """Bytes for each element that a rank updates: the fp32 master and the states."""
        return 4 + 4 * len(cls.state_names)

    @classmethod
    def host_bytes(cls, numel: int, config: OptimizerConfig) -> int:
        """Bytes in host memory for `numel` elements, besides offloaded masters and states."""
        return 0

    @classmethod
    def buffer_bytes(cls, matrices: Iterable[tuple[ParamSpec, int]]) -> int:
        """Bytes of its buffers during an update, if it needs whole matrices. `matrices`: its
        parameters (those of experts: of this rank's experts), and how many ranks shard each."""
        return 0

    def step(
        self, gradients: FlatShards, lr: float, divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """Update the masters in place, or change nothing if `skip` [] is 1. The `gradients`, one
        1-D fp32 shard for each unit, are divided by `divisor` [] and overwritten."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Number of updates made, if it counts them. Waits for the device."""
        return 0

    def restore(self, steps: int) -> None:
        """Continue after `steps` updates. `states` and `buffers` have been filled in place."""

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """States of other shapes than the parameters', by name."""
        return {}


def check_matrix(key: str, name: str, spec: ParamSpec, dimensions: int = 2) -> None:
    """Raises UserError if the parameter of optimizer `name` does not have so many dimensions."""
    shape = "x".join(map(str, spec.shape))
    if len(spec.shape) != dimensions:
        fits = "need a matrix, or adamw or sgd for it"
        raise UserError(f"{key}: {name}, but {spec.name} has shape {shape}, {fits}")


class ShardedOptimizer:
    """Updates this rank's shards of the masters with an elementwise torch optimizer.

    The parameters of its groups are slices of the shards. Their states are slices of flat tensors,
    one for each shard, once `flatten` has made these.

    torch: the optimizer. `lr` and the like are read from its `param_groups` in every step.
    """

    def __init__(self, masters: FlatShards, groups: ParamGroups, build: Build) -> None:
        self._masters = masters
        self._parts: list[tuple[torch.Tensor, int, slice]] = [
            (masters[index][where], index, where)
            for group in groups
            for index, where in group["params"]
        ]
        parts = iter(self._parts)
        self.torch = build(
            [{**group, "params": [next(parts)[0] for _ in group["params"]]} for group in groups]
        )
        self._decays = [group.get("weight_decay", 0.0) for group in self.torch.param_groups]
        self.states: dict[str, list[torch.Tensor]] = {}
        """The states that `flatten` has made flat, by torch's names: one 1-D shard per master."""

    def flatten(self, *names: str) -> None:
        """Put the states `names`, zero where there are none yet, into flat tensors."""
        for name in names:
            self.states[name] = [torch.zeros_like(master) for master in self._masters]
            for part, index, where in self._parts:
                state, flat = self.torch.state[part], self.states[name][index][where]
                if name in state:
                    flat.copy_(state[name])
                state[name] = flat

    def flat_states(self) -> dict[str, list[torch.Tensor]]:
        """`states`, after `flatten` of all that have one element per element of a parameter."""
        found = {
            name
            for part, _, _ in self._parts
            for name, value in self.torch.state[part].items()
            if isinstance(value, torch.Tensor) and value.shape == part.shape
        }
        self.flatten(*sorted(found - self.states.keys()))
        return self.states

    def compact(self) -> None:
        """Called after a checkpoint was saved or loaded: `states` may be dropped if the optimizer
        needs less memory without them. Here they stay."""

    def update(self, gradients: FlatShards) -> None:
        """Update the masters in place. `gradients`: one shard for each master."""
        for _, part, gradient in self.slices(gradients):
            part.grad = gradient
        self.torch.step()
        for part, _, _ in self._parts:
            part.grad = None

    def set_rates(self, lr: float, decay_factor: float) -> None:
        """Set each param group's learning rate to its `lr_scale` times `lr`, and its weight decay
        to `decay_factor` times the first one."""
        for group, decay in zip(self.torch.param_groups, self._decays, strict=True):
            group["lr"] = lr * group["lr_scale"]
            group["weight_decay"] = decay_factor * decay

    def slices(
        self, shards: FlatShards
    ) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """(param group, slice of a master, the same slice of `shards`) of all slices."""
        groups = (group for group in self.torch.param_groups for _ in group["params"])
        for group, (part, index, where) in zip(groups, self._parts, strict=True):
            yield group, part, shards[index][where]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's state dict of this rank's slices."""
        self.torch.load_state_dict(state_dict)
        self.states.clear()


class ElementwiseOptimizer(ShardedOptimizer, UnitOptimizer):
    """Updates each element by itself with a torch optimizer: a subclass names it in `build`."""

    def __init__(
        self, masters: FlatShards, groups: ParamGroups, implementation: str = "torch"
    ) -> None:
        """`groups`: with `lr_scale` and the arguments of the torch optimizer. `implementation`: a
        value of `optimizer.fused`."""
        super().__init__(masters, groups, partial(self.build, implementation=implementation))
        self.implementation = implementation
        self.flatten(*self.state_names)
        self.restore(0)

    @classmethod
    def make(cls, units: Sequence[Unit], groups: Groups, tensor: LevelCollectives | None) -> Self:
        """As `UnitOptimizer.make`."""
        params = param_groups(group_slices(units, partial(_numbers, groups)), groups, cls.options)
        return cls([unit.master for unit in units], params, groups.config.fused)

    @staticmethod
    def build(groups: list[dict[str, Any]], implementation: str) -> torch.optim.Optimizer:
        """The torch optimizer. With `fused` among its `defaults`, it reads `grad_scale` and
        `found_inf`."""
        raise NotImplementedError

    def step(
        self, gradients: FlatShards, lr: float, divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """As `UnitOptimizer.step`. torch's fused kernels read `divisor` and `skip` on the device.
        With others the host waits for it."""
        optimizer: Any = self.torch
        if optimizer.defaults.get("fused"):
            optimizer.grad_scale, optimizer.found_inf = divisor.float(), skip.float()
        elif skip.item():
            return
        else:
            torch._foreach_div_(list(gradients), divisor.item())
        self.set_rates(lr, self.decay_factor)
        self.update(gradients)


def param_groups(
    found: Mapping[int, list[MasterSlice]], groups: Groups, options: Sequence[str]
) -> list[dict[str, Any]]:
    """torch's param groups with slices of masters as parameters, by the number of their group."""
    keys = ("lr_scale", "weight_decay", *options)
    return [
        {"params": slices, **{key: getattr(groups.groups[number], key) for key in keys}}
        for number, slices in sorted(found.items())
    ]


def _numbers(groups: Groups, unit: Unit) -> list[int | None]:
    found = [groups.numbers[unit.specs[entry.name].name] for entry in unit.layout.entries]
    return [*found, found[-1] | 1]  # padding has no weight decay


def group_slices(
    units: Sequence[Unit], numbers: Callable[[Unit], Sequence[int | None]]
) -> dict[int, list[MasterSlice]]:
    """The slices of this rank's masters in each group.

    numbers: the group of each parameter of a unit, and last that of its padding; None: no group.
    """
    found: dict[int, list[MasterSlice]] = {}
    for index, unit in enumerate(units):
        *_, last = entries = unit.layout.entries
        bounds = [*(e.offset for e in entries), last.offset + last.numel, unit.layout.numel]
        spans = [
            (first, stop, number)
            for (first, stop), number in zip(pairwise(bounds), numbers(unit), strict=True)
            if number is not None
        ]
        for number, slices in merge_slices(spans, *unit.range).items():
            found.setdefault(number, []).extend((index, where) for where in slices)
    return found


def merge_slices(
    groups: Sequence[tuple[int, int, int]], start: int, stop: int
) -> dict[int, list[slice]]:
    """The slices of each group in [start, stop) of a flat buffer, relative to `start`.

    groups: (first, last, group) of each parameter, in order. Neighbours of one group share a slice.
    """
    found: dict[int, list[slice]] = {}
    for first, last, group in groups:
        first, last = max(first, start) - start, min(last, stop) - start
        if first >= last:
            continue
        slices = found.setdefault(group, [])
        if slices and slices[-1].stop == first:
            first = slices.pop().start
        slices.append(slice(first, last))
    return found


def scalar_states(name: str, build: Build, device: torch.device) -> list[str]:
    """The names of an optimizer's states that are one number for all elements, such as `step`.

    Raises UserError, with the optimizer's `name`, unless it updates each element by itself.
    """
    generator = torch.Generator().manual_seed(0)
    first, *gradients = (torch.randn(8, generator=generator).to(device) for _ in range(4))

    def train(*cuts: int) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        cut = [slice(a, b) for a, b in pairwise(cuts)]
        parts = [first[where].clone() for where in cut]
        optimizer = build(parts)
        for gradient in gradients:
            for part, where in zip(parts, cut, strict=True):
                part.grad = gradient[where].clone()
            optimizer.step()
        return torch.cat(parts), optimizer

    why = "each rank holds flat slices of parameters, need an optimizer of single elements (AdamW)"
    try:
        (whole, optimizer), (cut, _) = train(0, 8), train(0, 3, 8)
    except Exception as error:
        raise UserError(f"optimizer: {name}: {error} ({why})") from error
    if not torch.allclose(whole, cut, rtol=1e-4, atol=1e-6):
        raise UserError(f"optimizer: {name}: an element's update depends on others, but {why}")
    (state,) = optimizer.state.values() or ({},)
    return sorted(n for n, value in state.items() if getattr(value, "shape", ()) == ())
