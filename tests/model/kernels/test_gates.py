"""Gated activations give autograd's numbers to the bit. The compiler: `test_compile`."""

import pytest
import torch
import torch.nn.functional as F

from megafrontier.model.mlp import activate

PLAIN = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", PLAIN)
def test_results_and_gradients_are_those_of_plain_torch_to_the_bit(activation, dtype):
    raised = torch.randn(3, 5, 14).to(dtype).requires_grad_()
    gate, up = raised.chunk(2, -1)
    expected, found = PLAIN[activation](gate) * up, activate(raised, activation)
    assert torch.equal(found, expected)
    by_output = torch.randn_like(found)
    gradients = (torch.autograd.grad(out, raised, by_output)[0] for out in (found, expected))
    assert torch.equal(*gradients)
