"""A torch optimizer on slices of flat fp32 shards."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from megafrontier.common.errors import UserError

Build = Callable[[Any], torch.optim.Optimizer]
"""From parameters or param groups to a torch optimizer."""
MasterSlice = tuple[int, slice]
"""The index of a shard, and the part of it."""


class ShardedOptimizer:
    """Updates this rank's shards of the masters with an elementwise torch optimizer.

    The parameters of its groups are slices of the shards. Their states are slices of flat tensors,
    one for each shard, once `flatten` has made these.

    torch: the optimizer. `lr` and the like are read from its `param_groups` in every step.
    """

    def __init__(
        self,
        masters: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        build: Build,
    ) -> None:
        """`groups`: torch's param groups, in which `params` are `MasterSlice`s of `masters`."""
        self._masters = masters
        self._parts: list[tuple[torch.Tensor, int, slice]] = []
        for group in groups:
            self._parts += [
                (masters[index][where], index, where) for index, where in group["params"]
            ]
        parts = iter(self._parts)
        self.torch = build(
            [{**group, "params": [next(parts)[0] for _ in group["params"]]} for group in groups]
        )
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

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Update the masters in place. `gradients`: one 1-D fp32 shard for each master."""
        for part, index, where in self._parts:
            part.grad = gradients[index][where]
        self.torch.step()
        for part, _, _ in self._parts:
            part.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's state dict of this rank's slices."""
        self.torch.load_state_dict(state_dict)
        self.states.clear()


class ScaledOptimizer(ShardedOptimizer):
    """Updates with divided gradients, and at a multiple of a learning rate: `lr_scale` of each
    param group."""

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Update the masters in place, or change nothing if `skip` [] is 1.

        gradients: one 1-D fp32 shard for each master. They are overwritten.
        divisor: [], what the gradients are divided by.

        torch's fused kernels read both on the device. With others the host waits for it.
        """
        optimizer: Any = self.torch
        if optimizer.defaults.get("fused"):
            optimizer.grad_scale, optimizer.found_inf = divisor.float(), skip.float()
        elif skip.item():
            return
        else:
            torch._foreach_div_(list(gradients), divisor.item())
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.update(gradients)


def merge_slices(
    groups: Sequence[tuple[int, int, int]], start: int, stop: int
) -> dict[int, list[slice]]:
    """The slices of each group in [start, stop) of a flat buffer, relative to `start`.

    groups: (first, last, group) of each parameter, in order. Neighbours of one group share a slice.
    """
    merged: list[list[int]] = []
    for first, last, group in groups:
        first, last = max(first, start), min(last, stop)
        if first >= last:
            continue
        if merged and merged[-1][1:] == [first, group]:
            merged[-1][1] = last
        else:
            merged.append([first, last, group])
    found: dict[int, list[slice]] = {}
    for first, last, group in merged:
        found.setdefault(group, []).append(slice(first - start, last - start))
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
