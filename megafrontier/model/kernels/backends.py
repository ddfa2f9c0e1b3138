"""Which kernel attention runs on: chosen here with documents, and by torch otherwise."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megafrontier.config import ModelConfig
from megafrontier.model.kernels.varlen import (
    has_document_kernel,
    has_window_kernel,
    returns_traced_shape,
)

_NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}


def supports_varlen(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, dropout: float
) -> bool:
    """Whether attention within documents needs no dense mask. The kernels for that have no dropout
    and do not support every type and head size. `blockwise` supports all that have a rule."""
    if config.attention.has_rule:
        return True
    return dropout == 0 and has_document_kernel(device, dtype, *_head_sizes(config))


def supports_gqa(device: torch.device, dtype: torch.dtype, is_masked: bool) -> bool:
    """Whether torch can be given grouped heads. On a GPU only flash supports them, and it has no
    mask and no fp32; torch would fall back to a kernel that writes the whole score matrix."""
    return not is_masked and not (device.type == "cuda" and dtype == torch.float32)


def uncompilable_attention(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    documents: bool,
    chunks: bool = False,
) -> str | None:
    """Why blocks with this attention cannot be compiled on the device, or None if they can. With
    `chunks`, a process has some chunks of each sequence."""
    if chunks:
        if supports_varlen(config, device, dtype, config.dropout):
            return None
        return "attention over parts of sequences (parallel.context) has a mask here"
    # Dropout is 0 because evaluations have none.
    documents = documents or config.attention.has_rule
    if not documents or not supports_varlen(config, device, dtype, 0.0):
        return None
    if returns_traced_shape(device, dtype, *_head_sizes(config)):
        return None
    return "this GPU's attention within documents (data.document_mask) is of another shape"


def attention_backend(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    documents: bool,
    chunks: bool = False,
) -> str:
    """The attention kernel in training: "flash", "memory-efficient", "cudnn" or "math"; with
    `documents` "varlen flash", or "dense mask, " and one of those; with `chunks`, if a process has
    some chunks of each sequence, "chunks, flash" or "chunks, masked". With a rule that no kernel
    has, some blocks have "plain torch"."""
    if config.attention.has_rule:
        return _ruled_backend(config, device, dtype, chunks)
    if chunks:
        has_kernel = supports_varlen(config, device, dtype, config.dropout)
        return "chunks, flash" if has_kernel else "chunks, masked"
    if documents and supports_varlen(config, device, dtype, config.dropout):
        return "varlen flash"
    repeated = not supports_gqa(device, dtype, documents)
    heads = [config.heads] + 2 * [config.heads if repeated else config.num_kv_heads]
    length, width = config.sequence_length, config.head_dim
    query, key, value = (
        torch.empty(1, length, n, width, device=device, dtype=dtype).transpose(1, 2) for n in heads
    )
    query.requires_grad_()  # some kernels have no backward
    mask: Tensor | None = None
    if documents:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
    is_grouped = heads[0] != heads[1]
    chosen = torch._fused_sdp_choice(
        query, key, value, mask, config.dropout, is_causal=not documents, enable_gqa=is_grouped
    )
    name = _NAMES.get(SDPBackend(chosen), "another")
    return f"dense mask, {name}" if documents else name


def _ruled_backend(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, chunks: bool
) -> str:
    has_kernel = has_document_kernel(device, dtype, *_head_sizes(config))
    has_window = config.attention.window is not None
    # Flash for GPUs may have windows, but not those that begin before a chunk.
    is_plain = has_window and (chunks or not has_window_kernel(device, dtype, *_head_sizes(config)))
    if (
        config.attention.softcap
        or not has_kernel
        or (is_plain and not config.attention.global_every)
    ):
        name = "plain torch"
    else:
        name = "flash and plain torch" if is_plain else "flash"
    return f"{'chunks,' if chunks else 'varlen'} {name}"


def _head_sizes(config: ModelConfig) -> tuple[int, int, int]:
    return config.heads, config.num_kv_heads, config.head_dim
