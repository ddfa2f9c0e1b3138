"""Gated activations give autograd's numbers to the bit. The compiler: `test_compile`."""

import pytest
import torch
import torch.nn.functional as F

from megafrontier.config import ModelConfig
from megafrontier.model.kernels.gates import clipped
from megafrontier.model.mlp import activate, up_rows

PLAIN = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def test_the_clipped_gate_has_autograds_gradients_on_both_sides_of_its_limits():
    raised = (6 * torch.randn(3, 50, 14, dtype=torch.float64)).requires_grad_()
    gate, up = raised.chunk(2, -1)
    assert (gate > 7).any()
    assert (up.abs() > 7).any()
    low = gate.clamp(max=7)
    expected, found = low / (1 + (-1.702 * low).exp()) * (up.clamp(-7, 7) + 1), clipped(raised)
    by_output = torch.randn_like(found)
    gradients = (torch.autograd.grad(out, raised, by_output)[0] for out in (found, expected))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*gradients)


def test_relu2_is_the_square_of_the_positive_part_and_has_no_gate():
    raised = torch.randn(3, 14, dtype=torch.float64, requires_grad=True)
    found = activate(raised, "relu2")
    positive = raised.detach() * (raised > 0)
    torch.testing.assert_close(found, positive * positive)
    (gradient,) = torch.autograd.grad(found.sum(), raised)
    torch.testing.assert_close(gradient, 2 * positive)
    assert up_rows(ModelConfig(activation="relu2"), 14) == 14


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
