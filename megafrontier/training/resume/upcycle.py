"""Upcycling: the checkpoint of a dense model as that of a mixture of experts.

Each expert begins as a copy of the MLP, and routers have initial values. With `normalise`, the
mixture computes what the dense model computed (Komatsuzaki et al. 2023, arXiv:2212.05055).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from megafrontier.checkpoint.boxes import BoxEntry
from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import Checkpoint
from megafrontier.checkpoint.requests import Request
from megafrontier.common.errors import UserError, need
from megafrontier.config import Config
from megafrontier.model.flops import parameter_specs
from megafrontier.model.init import initial_slice
from megafrontier.parallel.param_spec import ParamSpec

_EXPERTS = re.compile(r"(.*\.mlp)\.experts\.(up|down)")


def upcycled(config: Config, checkpoint: Checkpoint, weights_only: bool) -> Checkpoint:
    """The checkpoint itself, or if it is a dense model's and the configured model is a mixture, its
    view as one of that. Raises UserError if it cannot be upcycled."""
    is_dense = not any(".mlp.experts." in name for name in checkpoint.shapes)
    moe = config.model.moe
    if moe is None or not is_dense:
        return checkpoint
    what = f"{checkpoint.path} is of a dense model"
    fits = f"need true, because {what}, whose optimizer has no state for the experts"
    need(weights_only, "checkpoint.weights_only", False, fits)
    fits = f"need 0, because {what}, which has none"
    need(moe.shared_experts == 0, "model.moe.shared_experts", moe.shared_experts, fits)
    fits = f"need false, because {what}, which has none"
    for key in ("bias", "router_bias"):
        need(not getattr(moe, key), f"model.moe.{key}", True, fits)
    return Upcycled(checkpoint.path, checkpoint.manifest, parameter_specs(config.model), config)


class Upcycled(Checkpoint):
    """A dense model's checkpoint, with the parameters of a mixture of experts."""

    def __init__(
        self, path: Path, manifest: Manifest, specs: Mapping[str, ParamSpec], config: Config
    ) -> None:
        super().__init__(path, manifest)
        self._specs, self._seed = specs, config.run.seed

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        dense, found = super().shapes, {}
        for name, spec in self._specs.items():
            source = _source(name)
            if source in dense and source != name:
                found[name] = (spec.shape[0], *dense.pop(source))
            elif spec.kind == "router":
                found[name] = spec.shape
        for source in [name for name in dense if name.endswith((".mlp.up.bias", ".mlp.down.bias"))]:
            block = source.rpartition(".mlp.")[0]
            if f"{block}.mlp.experts.up" in found:
                raise UserError(f"{self.path}: {source}: experts have no biases, need none")
        return dense | found

    def read(self, requests: Sequence[Request]) -> None:
        found: list[Request] = []
        for request in requests:
            spec = self._specs.get(request.entry.name)
            if spec is None or spec.kind not in ("expert", "router"):
                found.append(request)
            elif spec.kind == "expert":
                found += _copies(request)
            else:
                here = replace(spec, box=request.entry.box)
                stop = request.start + request.out.numel()
                request.out.copy_(initial_slice(self._seed, here, request.start, stop))
        super().read(found)


def _source(name: str) -> str:
    """The dense model's parameter that an expert's is a copy of, or the name itself."""
    return _EXPERTS.sub(r"\1.\2.weight", name)


def _copies(request: Request) -> Iterator[Request]:
    """The request for experts [e, rows, columns] as requests for the dense matrix [rows, columns],
    one for each expert."""
    entry, stop = request.entry, request.start + request.out.numel()
    size = prod(entry.shape[1:])
    dense = BoxEntry(_source(entry.name), entry.shape[1:], 0, entry.global_shape[1:], entry.box[1:])
    for expert in range(request.start // size, -(-stop // size)):
        first, last = max(request.start, expert * size), min(stop, (expert + 1) * size)
        out = request.out[first - request.start : last - request.start]
        yield Request(request.state, dense, first - expert * size, out)
