"""torch's Muon as a reference."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def iterations_in_fp32() -> Iterator[None]:
    """Newton–Schulz iterations in fp32, as on our CPU ranks. torch's are in bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bfloat16", torch.float32)
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # up to torch 2.14
        yield
