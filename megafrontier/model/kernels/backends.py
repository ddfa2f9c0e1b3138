"""Which kernel attention runs on: chosen for documents here, asked of torch for the rest."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megafrontier.config import ModelConfig
from megafrontier.model.kernels.varlen import has_document_kernel, has_promised_shape

_NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}


def skips_mask(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, dropout: float
) -> bool:
    """Whether documents are told apart without a dense mask: not with dropout on the attention
    weights, which such kernels do not have, nor in a type that they do not know."""
    return dropout == 0 and has_document_kernel(device, dtype, *_head_sizes(config))


def takes_groups(device: torch.device, dtype: torch.dtype, is_masked: bool) -> bool:
    """Whether grouped heads are left to torch. Of a GPU's fused kernels only flash knows them, and
    it takes no mask and no fp32: without one of them the whole score matrix would be written."""
    return not is_masked and not (device.type == "cuda" and dtype == torch.float32)


def _head_sizes(config: ModelConfig) -> tuple[int, int, int]:
    return config.heads, config.num_kv_heads, config.head_dim


def uncompilable_attention(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, documents: bool
) -> str | None:
    """Why blocks with this attention cannot be compiled on the device; None where they can."""
    if not documents or not skips_mask(config, device, dtype, 0.0):  # as evaluations have it
        return None
    if has_promised_shape(device, dtype, *_head_sizes(config)):
        return None
    return "this GPU's attention within documents (data.document_mask) is of another shape"


def attention_backend(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, documents: bool
) -> str:
    """The kernel of attention in training: "flash", "memory-efficient", "cudnn" or "math"; with
    `documents` "varlen flash", or "dense mask, " and one of those."""
    if documents and skips_mask(config, device, dtype, config.dropout):
        return "varlen flash"
    repeated = not takes_groups(device, dtype, documents)
    heads = [config.heads] + 2 * [config.heads if repeated else config.num_kv_heads]
    length, width = config.sequence_length, config.head_dim
    query, key, value = (
        torch.empty(1, length, n, width, device=device, dtype=dtype).transpose(1, 2) for n in heads
    )
    query.requires_grad_()  # some kernels do forward alone
    mask: Tensor | None = None
    if documents:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
    chosen = torch._fused_sdp_choice(
        query,
        key,
        value,
        mask,
        config.dropout,
        is_causal=not documents,
        enable_gqa=heads[0] != heads[1],
    )
    name = _NAMES.get(SDPBackend(chosen), "another")
    return f"dense mask, {name}" if documents else name
