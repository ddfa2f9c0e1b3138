"""What a block saves for backward, and what it recomputes."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.model.recompute.checkpointing import run_checkpointed


class Counting(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("draws", [True, False])
def test_attention_is_saved_unless_it_may_draw_random_numbers(draws):
    """On a GPU, attention draws its dropout itself. If its result were saved, operations after it
    would get other random numbers in backward than in forward."""

    def block(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True) @ weight

    weight = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    with Counting() as counting:
        run_checkpointed("selective", block, x, draws_random_numbers=draws).sum().backward()
    forwards = counting.calls["_scaled_dot_product_flash_attention_for_cpu"]
    assert forwards == (2 if draws else 1)
    assert counting.calls["_scaled_dot_product_flash_attention_for_cpu_backward"] == 1
