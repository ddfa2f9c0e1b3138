"""State dicts of a sharded model: full tensors, through the hooks that nn.Module has for them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megafrontier.partition.layout import Entry
from megafrontier.partition.unit import Unit


class FullStateDict:
    """Hooks with which `model.state_dict()` and `model.load_state_dict()` handle full tensors.

    Every rank calls both. A state dict has every parameter in its own shape, as the fp32 master, on
    the CPU; units are gathered one at a time. Loading reads this rank's elements of full tensors of
    any type and publishes the new weights.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        finish_publishing: Callable[[], None],
        restore: Callable[[], None],
    ) -> None:
        """Register the hooks. `restore` is called after the masters have been written."""
        self._units = units
        self._places = {
            id(parameter): (unit, entry)
            for unit in units
            for entry, parameter in zip(unit.layout.entries, unit.parameters, strict=True)
        }
        self._finish_publishing, self._restore = finish_publishing, restore
        self._is_entered = False
        self._loaded: set[str] = set()
        for module in model.modules():
            if module is not model:
                module.register_state_dict_pre_hook(self._refuse_part)
                module.register_load_state_dict_pre_hook(self._refuse_part)
        model.register_state_dict_pre_hook(self._enter)
        model.register_state_dict_post_hook(partial(self._fill))  # torch sets an attribute
        model.register_load_state_dict_pre_hook(self._load)
        model.register_load_state_dict_post_hook(self._finish_load)

    def _enter(self, *_: Any) -> None:
        self._is_entered = True

    def _refuse_part(self, module: nn.Module, *_: Any) -> None:
        if not self._is_entered:
            raise RuntimeError(
                f"state dict of a {type(module).__name__} in a sharded model; need the state dict "
                "of the model that was given to `shard`, and keys of it"
            )

    def _fill(self, model: nn.Module, found: dict[str, Any], prefix: str, _metadata: Any) -> None:
        self._is_entered = False
        names = self._names(model, prefix)
        for unit in self._units:
            full = _gather_master(unit)
            for entry, value in zip(unit.layout.entries, unit.layout.views(full), strict=True):
                # Each with memory of its own, because safetensors refuses views of a buffer.
                value = value.to("cpu", copy=True)
                found.update(dict.fromkeys(names.get(entry.name, ()), value))

    def _load(self, model: nn.Module, given: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._enter()
        self._finish_publishing()  # it reads the masters
        errors: list[str] = rest[-1]
        names = self._names(model, prefix)
        for unit in self._units:
            for entry in unit.layout.entries:
                # Without these keys, nn.Module does not write into the parameters itself.
                values = {
                    name: given.pop(name) for name in names.get(entry.name, ()) if name in given
                }
                self._loaded.update(values)
                for name, value in values.items():
                    _copy_full(unit, entry, name, value, errors)

    def _finish_load(self, _model: nn.Module, incompatible: Any) -> None:
        missing = incompatible.missing_keys
        missing[:] = [name for name in missing if name not in self._loaded]
        self._is_entered = False
        self._loaded.clear()
        self._restore()

    def _names(self, model: nn.Module, prefix: str) -> Mapping[str, list[str]]:
        """The keys of each parameter, by its name in the layout. A tied one has several."""
        names: dict[str, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in self._places:
                _, entry = self._places[id(parameter)]
                names.setdefault(entry.name, []).append(prefix + name)
        return names


def _copy_full(unit: Unit, entry: Entry, name: str, value: torch.Tensor, errors: list[str]) -> None:
    """Copy this rank's elements of a parameter's full `value` into its master."""
    if tuple(value.shape) != entry.shape:
        errors.append(f"{name}: shape {list(value.shape)}, need {list(entry.shape)}")
        return
    for part, first, last, at in unit.layout.within(*unit.range):
        if part is entry:
            unit.master[at : at + last - first] = value.reshape(-1)[first:last]


def _gather_master(unit: Unit) -> torch.Tensor:
    """The unsharded masters, fp32 [numel], in new memory. All ranks call it."""
    unit.updating.wait()
    depth, over = unit.placement.optimizer, unit.collectives
    full = torch.empty(unit.layout.numel, device=unit.buffer.device)
    over.local_slice(full, 0, depth).copy_(unit.master)
    return over.gather_exact(full, depth, 0, f"masters {unit.name}").wait()
