"""Counts that follow from a ModelConfig: parameters, their shapes, and FLOPs a token."""

from math import prod

import torch

from megafrontier.config import ModelConfig
from megafrontier.model.gpt import GPT
from megafrontier.model.init import parameter_kind

_shapes: dict[str, dict[str, tuple[int, ...]]] = {}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the model's order. Allocates no weights."""
    # The metrics of each step need them, and building a deep model takes tens of milliseconds even
    # on the meta device. The key is a string because a config may hold lists.
    key = repr(config)
    if key not in _shapes:
        with torch.device("meta"):
            model = GPT(config)
        _shapes[key] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return dict(_shapes[key])


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, with a tied matrix counted once, and with padded rows."""
    return sum(prod(shape) for shape in parameter_shapes(config).values())


def unit_parameters(config: ModelConfig) -> tuple[list[int], int]:
    """Parameters of each module of `GPT.units`, in order, and of the root."""
    counts: dict[str, int] = {}
    for name, shape in parameter_shapes(config).items():
        unit = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        counts[unit] = counts.get(unit, 0) + prod(shape)
    outside = ("embedding", "head") if config.tie_embeddings else ()
    root = sum(counts.pop(unit, 0) for unit in outside)
    return list(counts.values()), root


def flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations that training spends on one token of a full sequence.

    "Model FLOPs" as in Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B): 6 per parameter
    of a matrix product (2 forward, 4 backward), plus 12 · layers · heads · head_size ·
    sequence_length for attention. There are two differences: attention is halved, because a causal
    token attends to half of the sequence on average, and only the matrices of the blocks and of the
    head (without padded ids) count, because an embedding lookup multiplies nothing. Recomputation,
    norms and softmax are not counted.
    """
    in_blocks = sum(
        prod(shape)
        for name, shape in parameter_shapes(config).items()
        if name.startswith("blocks.") and parameter_kind(name) == "matrix"
    )
    in_head = config.vocab_size * config.hidden
    width = config.heads * config.head_dim
    attention = 6 * config.layers * width * config.sequence_length
    return float(6 * (in_blocks + in_head) + attention)
