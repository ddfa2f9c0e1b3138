"""Initial weights as a function of (seed, name, element), so that no rank needs a whole model.

Each parameter is divided into chunks with one generator each. A rank draws only the chunks that its
slice overlaps, and gets the same numbers however the parameter is sharded.
"""

import hashlib
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from megafrontier.config import ModelConfig

ParameterKind = Literal["norm", "bias", "embedding", "matrix"]

CHUNK = 2**18
"""Elements per generator. Never change it: a seed would mean other weights."""


def parameter_kind(name: str) -> ParameterKind:
    """The kind of a parameter of GPT, which decides weight decay and initial values.

    A norm's bias is `norm`, learned positions are `embedding`, and the head's matrix is `matrix`.
    """
    *modules, last = name.split(".")
    if modules and modules[-1].startswith("norm"):
        return "norm"
    if last == "bias":
        return "bias"
    return "embedding" if "embedding" in modules else "matrix"


def initial_slice(
    config: ModelConfig, seed: int, name: str, shape: tuple[int, ...], start: int, stop: int
) -> Tensor:
    """Elements [start, stop), row-major, of parameter `name`: fp32 [stop - start] on the CPU.

    Norm weights are 1, biases 0, rows of padded token ids 0, and all else normal as `config.init`
    says (gpt2: Radford et al. 2019, section 2.3; neox: Black et al. 2022, arXiv:2204.06745, section
    2.1.2, after Nguyen and Salazar 2019 and Wang and Komatsuzaki 2021).
    """
    kind = parameter_kind(name)
    if kind == "norm" or kind == "bias":
        return torch.full((stop - start,), float(name.endswith(".weight")))
    values = _normal(f"{seed}/{name}", prod(shape), start, stop) * _deviation(config, name)
    if name in ("embedding.tokens.weight", "head.output.weight"):
        values[max(0, config.vocab_size * shape[1] - start) :] = 0.0
    return values


def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill a whole GPT, on any device and of any type, with its initial values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            values = initial_slice(config, seed, name, shape, 0, parameter.numel())
            parameter.copy_(values.view(shape))


def _deviation(config: ModelConfig, name: str) -> float:
    """Standard deviation of a matrix, smaller if its output is added to the residual stream."""
    if name == "embedding.positions.weight":
        return config.init_std
    to_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
    if config.init == "neox":
        if to_residual:
            return 2 / (config.layers * sqrt(config.hidden))
        return sqrt(2 / (5 * config.hidden))
    return config.init_std / sqrt(2 * config.layers) if to_residual else config.init_std


def _normal(stream: str, numel: int, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of `numel` standard normal numbers."""
    values = torch.empty(stop - start)
    for chunk in range(start // CHUNK, -(-stop // CHUNK)):
        first, last = chunk * CHUNK, min((chunk + 1) * CHUNK, numel)
        # Always draw a whole chunk, because the numbers of randn depend on how many are drawn.
        drawn = torch.randn(last - first, generator=_generator(f"{stream}/{chunk}"))
        low, high = max(start, first), min(stop, last)
        values[low - start : high - start] = drawn[low - first : high - first]
    return values


def _generator(key: str) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
