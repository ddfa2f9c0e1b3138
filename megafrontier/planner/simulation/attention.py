"""Attention as fused kernels compute it: without its matrix, which torch would make on meta."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@contextmanager
def attention_kernel() -> Iterator[None]:
    """In the body, attention of meta tensors runs as the fused kernel for GPUs."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        # A mask costs as much as causal attention does here.
        is_half = is_causal or attn_mask is not None
        found: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_half
        )[0]
        return found

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def attention_flops(func: Any, args: Any) -> float | None:
    """Operations of a kernel of attention; None for other operations.

    Forward has two matrix products, and backward five, because it computes the matrix again (Dao et
    al. 2022, arXiv:2205.14135). Causal attention needs half of them.
    """
    products = _PRODUCTS.get(func.overloadpacket)
    if products is None:
        return None
    query, key = args[:2] if products == 2 else args[1:3]
    is_causal = args[4] if products == 2 else args[11]
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * products * pairs * query.shape[-1] * (0.5 if is_causal else 1.0)


_PRODUCTS = {
    aten._scaled_dot_product_flash_attention: 2,
    aten._scaled_dot_product_flash_attention_backward: 5,
}
