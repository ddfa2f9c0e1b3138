"""What is kept of a block, and what is computed again."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.model.recompute.checkpointing import run_checkpointed


class Counting(TorchDispatchMode):
    """How often each operator is computed."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("draws", [True, False])
def test_attention_is_kept_unless_it_may_draw_random_numbers(draws):
    """On a GPU it draws its dropout itself. Were it taken from memory in backward, what draws after
    it would get other numbers than in forward."""

    def block(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True) @ weight

    weight = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    with Counting() as counting:
        run_checkpointed("selective", block, x, draws_random_numbers=draws).sum().backward()
    forwards = counting.calls["_scaled_dot_product_flash_attention_for_cpu"]
    assert forwards == (2 if draws else 1)
    assert counting.calls["_scaled_dot_product_flash_attention_for_cpu_backward"] == 1
