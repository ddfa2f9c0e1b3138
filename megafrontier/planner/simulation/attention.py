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


def attention_flops(func: Any, args: Any, kwargs: Any) -> float | None:
    """Operations of a kernel of attention; None for other operations.

    Forward has two matrix products, and backward five, because it computes the matrix again (Dao et
    al. 2022, arXiv:2205.14135). Causal attention needs half of them.
    """
    products = PRODUCTS.get(func.overloadpacket)
    if products is None:
        return None
    is_forward, within = products == 2, func.overloadpacket in _WITHIN_DOCUMENTS
    query, key = args[:2] if is_forward else args[1:3]
    if within:  # of causal documents, each as long as the longest
        longest = args[6 if is_forward else 9]
        window = min((kwargs.get("window_size_left") or longest - 1) + 1, longest)
        attended = window - window * window / (2 * longest)
        return 2 * products * query.numel() * attended
    is_causal = args[4] if is_forward else args[11]
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * products * pairs * query.shape[-1] * (0.5 if is_causal else 1.0)


_WITHIN_DOCUMENTS = {aten._flash_attention_forward, aten._flash_attention_backward}
PRODUCTS = {
    aten._scaled_dot_product_flash_attention: 2,
    aten._scaled_dot_product_flash_attention_backward: 5,
    aten._flash_attention_forward: 2,
    aten._flash_attention_backward: 5,
}
