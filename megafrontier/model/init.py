"""Initial weights as a function of (seed, spec, element), so that no rank needs a whole model.

Each parameter is divided into chunks with one generator each. A rank draws only the chunks that its
slice overlaps, and gets the same numbers however the parameter is sharded.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from math import prod, sqrt
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.scaling import base_size
from megafrontier.parallel.env import own_cores
from megafrontier.parallel.param_spec import (
    ParameterKind,
    ParamSpec,
    global_ranges,
    set_spec,
    spec_of,
)

CHUNK = 2**18
"""Elements per generator. Never change it: a seed would mean other weights."""
FEW = 16
"""Fewer elements than these torch draws in double precision, and would scale them in it."""

M = TypeVar("M", bound=nn.Module)


def with_specs(
    module: M,
    kind: ParameterKind,
    std: float = 0.0,
    valid_rows: int | None = None,
    mean: float | None = None,
) -> M:
    """Give an embedding or a norm the specs of its parameters, and return it. The rows of an
    embedding with `valid_rows` are those of the vocabulary.

    `mean`: of the weight's initial values; default 1 for norms, else 0. A norm's bias is of the
    kind `norm` too. Biases are initially 0.
    """
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, nn.Parameter)
    shape = tuple(weight.shape)
    spec = ParamSpec(
        "",
        shape,
        kind,
        init_mean=float(kind == "norm") if mean is None else mean,
        init_std=std,
        valid_rows=valid_rows,
        cut=None if valid_rows is None else "vocabulary",
    )
    set_spec(weight, spec)
    if bias is not None:
        set_spec(bias, ParamSpec("", tuple(bias.shape), "norm" if kind == "norm" else "bias"))
    return module


def matrix_std(config: ModelConfig, to_residual: bool = False) -> float:
    """Standard deviation of a matrix's initial values, as `config.init` says; smaller if its output
    is added to the residual stream. With `config.scaling`: that of the base model.

    gpt2: Radford et al. 2019, section 2.3; neox: Black et al. 2022, arXiv:2204.06745, section
    2.1.2, after Nguyen and Salazar 2019 and Wang and Komatsuzaki 2021.
    """
    hidden, layers = base_size(config)
    if config.init == "neox":
        return 2 / (layers * sqrt(hidden)) if to_residual else sqrt(2 / (5 * hidden))
    return config.init_std / sqrt(2 * layers) if to_residual else config.init_std


def initial_slice(seed: int, spec: ParamSpec, start: int, stop: int) -> Tensor:
    """Elements [start, stop), row-major, of the box of a parameter: fp32 [stop - start] on the CPU.

    They are normally distributed as the spec says, and 0 in padding.
    """
    if spec.init_std == 0:
        return torch.full((stop - start,), spec.init_mean)
    ranges = list(global_ranges(spec, start, stop))
    stream, numel = f"{seed}/{spec.name}", prod(spec.shape)
    values = _normal(stream, numel, ranges, stop - start, spec.init_std)
    if spec.init_mean:
        values += spec.init_mean
    limit = spec.valid_numel
    values[sum(max(0, min(last, limit) - first) for first, last in ranges) :] = 0.0
    return values


def initialise(model: nn.Module, seed: int) -> None:
    """Fill a whole GPT, on any device and of any type, with its initial values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = initial_slice(seed, spec_of(name, parameter), 0, parameter.numel())
            parameter.copy_(values.view(parameter.shape))


def _normal(
    stream: str, numel: int, ranges: Sequence[tuple[int, int]], count: int, std: float
) -> Tensor:
    """The `count` elements in ascending ranges of `numel` normal numbers."""
    values = torch.empty(count)
    parts = list(_chunk_parts(ranges))

    def draw(number: int, out: Tensor) -> None:
        # Nothing here may be parallel by itself: each thread would start threads of its own.
        generator = _generator(f"{stream}/{number}")
        if out.numel() < FEW:
            out.normal_(generator=generator).mul_(std)
        else:
            out.normal_(std=std, generator=generator)

    def fill(part: tuple[int, list[tuple[int, int, int]]]) -> None:
        number, pieces = part
        # Always a whole chunk, because the numbers depend on how many are drawn.
        length = min(CHUNK, numel - number * CHUNK)
        if pieces[0][:2] == (0, length):
            draw(number, values[pieces[0][2] :][:length])
            return
        drawn = torch.empty(length)
        draw(number, drawn)
        for first, last, at in pieces:
            values.numpy()[at : at + last - first] = drawn.numpy()[first:last]

    threads = min(own_cores(os.environ), len(parts))
    if threads < 2:
        for part in parts:
            fill(part)
    else:  # torch draws without Python's lock
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, parts))
    return values


def _chunk_parts(
    ranges: Sequence[tuple[int, int]],
) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """For each chunk that ascending ranges overlap, its number, and its pieces: [first, last) in
    the chunk, and their place among all elements of the ranges."""
    pieces: list[tuple[int, int, int, int]] = []
    at = 0
    for start, stop in ranges:
        while start < stop:
            number = start // CHUNK
            last = min(stop, (number + 1) * CHUNK)
            pieces.append((number, start - number * CHUNK, last - number * CHUNK, at))
            at, start = at + last - start, last
    for number, group in groupby(pieces, key=itemgetter(0)):
        yield number, [piece[1:] for piece in group]


def _generator(key: str) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
