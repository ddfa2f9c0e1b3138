"""This rank's parts of the parameters that modules have declared to be cut."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from megafrontier.common.errors import need
from megafrontier.parallel.param_spec import Cut, ParamSpec, set_spec, spec_of


def cut_parameters(model: nn.Module, cuts: Sequence[Cut], axis: str, index: int, size: int) -> None:
    """Replace each parameter whose spec has one of `cuts` by the `index`-th of `size` equal parts.

    One with `ParamSpec.parts` becomes a list, with a part of each. `axis`: of the mesh, over which
    the parts are not replicated. Raises UserError if `size` does not divide one.
    """
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            spec = spec_of(f"{prefix}.{name}".lstrip("."), parameter)
            if spec.cut not in cuts:
                continue
            spec = replace(spec, axes=tuple(other for other in spec.axes if other != axis))
            dim = int(spec.cut == "rows")
            lengths = spec.parts or (spec.shape[dim],)
            for length in lengths:
                fits = f"does not divide {spec.name} ({length} of {spec.shape}), need a divisor"
                need(length % size == 0, f"parallel.{axis}", size, fits)
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            parts = [
                _cut(parameter, spec, dim, start + index * (length // size), length // size)
                for start, length in zip(starts, lengths, strict=True)
            ]
            if spec.parts:
                delattr(module, name)
                module.add_module(name, nn.ParameterList(parts))
            else:
                module.register_parameter(name, parts[0])


def _cut(
    parameter: nn.Parameter, spec: ParamSpec, dim: int, start: int, length: int
) -> nn.Parameter:
    """The part [start, start + length) of dimension `dim`, with its spec."""
    part = nn.Parameter(parameter.detach().narrow(dim, start, length).clone())
    box = (*spec.box[:dim], (start, start + length), *spec.box[dim + 1 :])
    set_spec(part, replace(spec, box=box))
    return part
