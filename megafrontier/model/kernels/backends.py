"""The forms of softmax attention, which say what they support, and which one is used.

| form | code | runs on |
|---|---|---|
| `WHOLE`, `MASKED` | torch's, without and with a dense mask | what torch chooses |
| `DOCUMENTS` | `varlen.py` | a kernel of `flash.py` |
| `PARTS` | `chunks.py` | the same |
| `MASKED_PARTS` | `chunks.py`, with masks of blocks | what torch chooses |
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megafrontier.config import ModelConfig
from megafrontier.model.kernels.flash import (
    Sizes,
    has_log_sums,
)

_NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}


class Computed(NamedTuple):
    """What attention is computed on, and of what."""

    device: torch.device
    dtype: torch.dtype
    documents: bool = False
    """Tokens attend within documents that are shorter than their rows."""
    context: bool = False
    """A process has some parts of each sequence."""


class Form(NamedTuple):
    """A form of attention in training."""

    supports: frozenset[str]
    """"documents", "context" (parts of sequences), "dropout", and "rule": windows, capped scores
    and sinks."""
    has_log_sums: bool = False
    """It needs a kernel of `flash.py`."""


WHOLE = Form(frozenset(("dropout",)))
DOCUMENTS = Form(frozenset(("documents", "rule")), has_log_sums=True)
MASKED = Form(frozenset(("documents", "dropout")))
PARTS = Form(frozenset(("context", "documents", "rule")), has_log_sums=True)
MASKED_PARTS = Form(frozenset(("context", "documents", "dropout")))
FORMS = WHOLE, DOCUMENTS, MASKED, PARTS, MASKED_PARTS
"""The first that supports what is asked for is used."""


def form_of(config: ModelConfig, computed: Computed, dropout: float) -> Form:
    """The form of a model's softmax attention."""
    has_rule = config.attention.has_rule
    asked = {"documents": computed.documents, "context": computed.context}
    # With a rule there is none (`config.model.blocks.check_attention`).
    asked |= {"dropout": dropout > 0 and not has_rule, "rule": has_rule}
    needed = {name for name, is_asked in asked.items() if is_asked}
    can_sum = has_log_sums(sizes_of(config, computed), has_rule, dropout)
    return next(f for f in FORMS if needed <= f.supports and (can_sum or not f.has_log_sums))


def supports_gqa(device: torch.device, dtype: torch.dtype, is_masked: bool) -> bool:
    """Whether torch can be given grouped heads. On a GPU only flash supports them, and it has no
    mask and no fp32; torch would fall back to a kernel that writes the whole score matrix."""
    return not is_masked and not (device.type == "cuda" and dtype == torch.float32)


def torch_backend(config: ModelConfig, computed: Computed) -> str:
    """The kernel that torch chooses in training: "flash", "memory-efficient", "cudnn" or "math"."""
    device, dtype, documents, _ = computed
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
    return _NAMES.get(SDPBackend(chosen), "another")


def sizes_of(config: ModelConfig, computed: Computed) -> Sizes:
    """Those of a model's heads."""
    return *computed[:2], config.heads, config.num_kv_heads, config.head_dim
