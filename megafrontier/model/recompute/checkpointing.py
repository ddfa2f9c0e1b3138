"""Activation checkpointing: what a block saves for its backward, and what it recomputes.

| mode | saved | recomputed |
|---|---|---|
| none | everything | nothing |
| selective | matrix products; attention without dropout | norms, activations, rotations, sums |
| block | the block's input | the block |
| offload | the block's input, in host memory (`offload.py`) | the block |
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megafrontier.config import CheckpointingMode
from megafrontier.model.kernels import chunks, varlen

Mode = CheckpointingMode
RECOMPUTES_BLOCK: tuple[Mode, ...] = ("block", "offload")

Modes = Mode | Sequence[Mode]
"""Of all blocks, or of each block in turn."""

_aten = torch.ops.aten
# No bmm: it belongs to attention without a fused kernel, whose scores are too large to save.
_PRODUCTS: list[Any] = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
    varlen.operator,
    chunks.operator,
]
_ATTENTION = [
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def modes_of(given: Modes, blocks: int) -> list[Mode]:
    """The mode of each of `blocks` blocks."""
    return [given] * blocks if isinstance(given, str) else [*given]


def _saving(saved: list[Any]) -> Callable[[], Any]:
    contexts = partial(create_selective_checkpoint_contexts, saved)
    # Without this, torch.compile would not cache what it compiles with it on disk.
    setattr(contexts, "cache_hash", " ".join(map(str, saved)))  # noqa: B010
    return contexts


_selective: dict[bool, Callable[[], Any]] = {}
"""By whether a block draws random numbers."""


def save_results_of(*operators: Any) -> None:
    """Let blocks with the mode `selective` save what these operators return, as they do with matrix
    products. Call it before the first forward."""
    _PRODUCTS.extend(operators)
    # Attention draws its dropout from the generator. If its result is saved, it does not draw again
    # in backward, and operations after it would get other random numbers than in forward.
    _selective[True] = _saving(list(_PRODUCTS))
    _selective[False] = _saving([*_PRODUCTS, *_ATTENTION])


save_results_of()


def run_checkpointed(
    mode: Mode, function: Callable[..., Tensor], *inputs: Any, draws_random_numbers: bool
) -> Tensor:
    """`function(*inputs)`, saving for backward what `mode` says."""
    # In this order, so that an evaluation is compiled once for all modes.
    if not torch.is_grad_enabled() or mode == "none":
        return function(*inputs)
    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts["context_fn"] = _selective[draws_random_numbers]
    # Saving the state of the generators costs a synchronization.
    result: Tensor = checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=draws_random_numbers,
        **contexts,
    )
    return result
