"""Counts that follow from a ModelConfig: parameters, their specs, and FLOPs a token."""

from math import prod

import torch

from megafrontier.config import ModelConfig
from megafrontier.model.attention.kinds import kind_of
from megafrontier.model.gpt import GPT
from megafrontier.parallel.param_spec import ParamSpec, spec_of

_specs: dict[str, dict[str, ParamSpec]] = {}


def parameter_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """The spec of every parameter by name, in the model's order. Allocates no weights."""
    # The metrics of each step need them, and building a deep model takes tens of milliseconds even
    # on the meta device. The key is a string because a config may hold lists.
    key = repr(config)
    if key not in _specs:
        with torch.device("meta"):
            model = GPT(config)
        _specs[key] = {name: spec_of(name, p) for name, p in model.named_parameters()}
    return dict(_specs[key])


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and global shape of every parameter, in the model's order."""
    return {name: spec.shape for name, spec in parameter_specs(config).items()}


def buffer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every buffer."""
    with torch.device("meta"):
        model = GPT(config)
    return {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, with a tied matrix counted once, and with padded rows."""
    return sum(prod(shape) for shape in parameter_shapes(config).values())


def flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations that training spends on one token of a full sequence.

    "Model FLOPs" as in Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B): 6 per parameter
    of a matrix product (2 forward, 4 backward), plus `Attention.flops`. There are two differences:
    softmax attention counts the tokens that a token attends to on average, half of the sequence or
    fewer with a window, and only the matrices
    of the blocks and of the head (without padded ids) count, because an embedding lookup multiplies
    nothing. Recomputation, norms and softmax are not counted. Of experts, those that process a
    token count.
    """
    specs = list(parameter_specs(config).values())
    products = float(sum(s.valid_numel for s in specs if s.kind in ("matrix", "router")))
    if config.moe is not None:
        experts = sum(spec.valid_numel for spec in specs if spec.kind == "expert")
        products += experts * config.moe.active / config.moe.experts
    if config.tie_embeddings:  # the head multiplies by the embedding
        products += config.vocab_size * config.hidden
    if config.prediction is not None:  # the head multiplies by its matrix twice
        products += config.vocab_size * config.hidden
    blocks = range(config.trained_layers)
    return 6 * products + sum(kind_of(config, i).flops(config, i) for i in blocks)
