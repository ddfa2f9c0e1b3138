"""What a block keeps of its forward for its backward, and what is computed again.

| mode | kept | computed again |
|---|---|---|
| none | everything | nothing |
| selective | matrix products; attention without dropout | norms, activations, rotations, sums |
| block | the block's input | the block |
| offload | the block's input, in host memory (`offload.py`) | the block |
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megafrontier.model.kernels import varlen

Mode = Literal["none", "block", "selective", "offload"]

_aten = torch.ops.aten
# No bmm: those are attention without a fused kernel, whose scores are too many to keep.
_PRODUCTS = [_aten.mm.default, _aten.addmm.default, varlen.operator]
_ATTENTION = [
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def _keeping(kept: list[Any]) -> Callable[[], Any]:
    contexts = partial(create_selective_checkpoint_contexts, kept)
    # Without a name of its own, what is compiled with it would not be kept on disk.
    setattr(contexts, "cache_hash", " ".join(map(str, kept)))  # noqa: B010
    return contexts


_keep_most = _keeping([*_PRODUCTS, *_ATTENTION])
# Attention draws its dropout from the generator, too: taken from memory it would not, and what
# draws after it would get other numbers than in forward.
_keep_products = _keeping(_PRODUCTS)


def run_checkpointed(
    mode: Mode, function: Callable[..., Tensor], *inputs: Any, draws_random_numbers: bool
) -> Tensor:
    """`function(*inputs)`, keeping of it what `mode` says where a backward may come."""
    if mode == "none" or not torch.is_grad_enabled():
        return function(*inputs)
    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts["context_fn"] = _keep_products if draws_random_numbers else _keep_most
    # Saving the state of the generators costs a synchronisation, so only where one is used.
    result: Tensor = checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=draws_random_numbers,
        **contexts,
    )
    return result
