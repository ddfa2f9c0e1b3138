"""Rotary positions turn pairs of dimensions by the angles of their tables, and backward turns
gradients back."""

import pytest
import torch

from megafrontier.model.positions import rotary_tables, rotate


@pytest.mark.parametrize("rest", [0, 3])
def test_heads_are_turned_as_complex_numbers_and_gradients_back(rest):
    heads = torch.randn(2, 5, 3, 8 + rest, dtype=torch.float64, requires_grad=True)
    rotary = rotary_tables(torch.arange(5)[None], 8, 100.0)
    cosines, sines, _ = rotary
    turns = torch.complex(cosines.double(), sines[:, :, 1].double())[:, :, None]

    def turned(values, turns):
        pairs = torch.complex(values[..., :4], values[..., 4:8]) * turns
        return torch.cat([pairs.real, pairs.imag, values[..., 8:]], -1)

    found = rotate(heads, rotary)
    torch.testing.assert_close(found, turned(heads, turns))
    by_output = torch.randn_like(found)
    (by_heads,) = torch.autograd.grad(found, heads, by_output)
    torch.testing.assert_close(by_heads, turned(by_output, turns.conj()))
