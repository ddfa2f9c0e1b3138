"""Linear layers in float8, beside values that are rounded by the definition of the formats."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megafrontier.model.gpt import GPT
from megafrontier.model.kernels import float8
from megafrontier.model.kernels.float8 import FORMATS
from megafrontier.model.linear import Linear, linear_layers, use_float8
from megafrontier.model.recompute.checkpointing import run_checkpointed
from megafrontier.model.recompute.deferred import OtherGradients
from megafrontier.pipeline.split_backward import SplitBackward
from tests.model.moe.shapes import SHARED
from tests.model.recompute.test_checkpointing import Counting
from tests.model.small_models import SHAPES, small_config

LLAMA = SHAPES["llama"] | {"ffn_hidden": 48}
LAYOUTS = {
    torch.float8_e4m3fn: (3, 7, 448.0),
    torch.float8_e5m2: (2, 15, 57344.0),
    torch.float8_e4m3fnuz: (3, 8, 240.0),
    torch.float8_e5m2fnuz: (2, 16, 57344.0),
}
"""Bits of the mantissa, bias of the exponent, and the largest value."""


def rounded(matrix, dtype):
    """The nearest values, those with an even mantissa of two, of the matrix in the format's
    scale."""
    bits, bias, largest = LAYOUTS[dtype]
    codes = torch.arange(2**7)
    exponents, mantissas = codes >> bits, (codes & (2**bits - 1)).double() / 2**bits
    values = torch.where(
        exponents == 0,
        mantissas * 2.0 ** (1 - bias),
        (1 + mantissas) * 2.0 ** (exponents - bias).double(),
    )
    values = values[values <= largest]
    scale = matrix.double().abs().max() / largest
    found = (matrix.double().abs() / scale)[..., None]
    distances = (found - values).abs()
    nearest = distances.argmin(-1)
    after = (nearest + 1).clamp(max=len(values) - 1)
    is_tie = distances.gather(-1, after[..., None]) == distances.gather(-1, nearest[..., None])
    nearest = torch.where(is_tie[..., 0] & (nearest % 2 == 1), after, nearest)
    return values[nearest] * matrix.sign() * scale


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_values_are_rounded_to_the_nearest_of_the_format_and_none_is_clipped(dtype):
    matrix = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)) * 1e-3
    found = float8.quantized(matrix, dtype)
    values = found.values.double() * found.scale
    # A value between two others, to fp32 rounding, may go to either.
    near = torch.isclose(values, rounded(matrix, dtype), rtol=1e-6, atol=0)
    assert near.double().mean() > 0.999
    assert values.abs().max() == pytest.approx(matrix.abs().max().item(), rel=1e-6)


def test_results_and_gradients_are_the_products_of_rounded_matrices():
    torch.manual_seed(2)
    layer = Linear(32, 48, 0.0, bias=True)
    inputs = torch.randn(2, 16, 32, requires_grad=True)
    gradient = torch.randn(2, 16, 48)
    use_float8([layer], 0)
    made = layer(inputs)
    made.backward(gradient)
    values, gradients = FORMATS[0]
    weight, rows = rounded(layer.weight.detach(), values), rounded(inputs.detach(), values)
    grown = rounded(gradient, gradients)
    expected = {
        "result": (made, rows @ weight.t() + layer.bias),
        "inputs": (inputs.grad, grown @ weight),
        "weight": (layer.weight.grad, grown.flatten(0, 1).t() @ rows.flatten(0, 1)),
        "bias": (layer.bias.grad, gradient.double().sum((0, 1))),
    }
    for found, right in expected.values():
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-5, atol=1e-5)
    exact = nn.functional.linear(inputs, layer.weight, layer.bias)
    assert 0.01 < (made - exact).norm() / exact.norm() < 0.05
    torch.testing.assert_close(layer.eval()(inputs), exact, rtol=0, atol=0)


def test_values_that_are_not_finite_reach_the_result_and_zeros_stay():
    layer = Linear(16, 16, 0.0)
    use_float8([layer], 0)
    for bad in (torch.inf, torch.nan):
        inputs = torch.ones(16, 16)
        inputs[3, 4] = bad
        assert layer(inputs).isnan().any()
    assert (layer(torch.zeros(16, 16)) == 0).all()


def model_with(**options):
    torch.manual_seed(3)
    model = GPT(small_config(**LLAMA), **options).to(torch.bfloat16)
    use_float8(model.trained_blocks(), 0)
    return model


def gradients(model, tokens):
    model(tokens, tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_recomputed_compiled_and_late_gradients_are_the_same_to_the_bit(compiler, tokens):
    expected = gradients(model_with(), tokens)
    for mode in ("block", "selective"):
        assert same(gradients(model_with(checkpointing=mode), tokens), expected)
    assert same(
        gradients(model_with(checkpointing="selective", compile_blocks=True), tokens), expected
    )
    assert compiler.frame_count == 2  # the blocks, and the losses
    for compiles in (False, True):
        model = model_with(compile_blocks=compiles)
        split, others = SplitBackward(model, model.blocks, copies=compiles), OtherGradients()
        _, late = split.inputs(model(tokens, tokens), None, None, model.parameters(), others)
        assert model.blocks[0].mlp.up.weight.grad is None
        split.weights(late)
        assert same({name: p.grad for name, p in model.named_parameters()}, expected)


def test_selective_checkpointing_keeps_the_products():
    layer = Linear(32, 32, 0.0, bias=True)
    use_float8([layer], 0)
    inputs = torch.randn(16, 32, requires_grad=True)
    with Counting() as counting:
        run_checkpointed("selective", layer, inputs, draws_random_numbers=False).sum().backward()
    assert counting.calls["_scaled_mm"] == 3


def test_layers_whose_sizes_do_not_fit_and_all_but_linear_layers_of_blocks_stay_as_they_are():
    model = GPT(small_config(**SHARED, ffn_hidden=40))
    use_float8(model.trained_blocks(), 0)
    layers = {n: module for n, module in model.named_modules() if isinstance(module, Linear)}
    changed = {name for name, layer in layers.items() if layer.float8 is not None}
    assert changed
    assert changed < layers.keys()
    for name in changed:
        sizes = model.get_submodule(name).weight.shape
        assert name.startswith("blocks.")
        assert all(size % 16 == 0 for size in sizes)
    assert not any("router" in name or "experts" in name for name in changed)
    assert {id(layer) for layer in linear_layers(model.trained_blocks())} >= {
        id(model.get_submodule(name)) for name in changed
    }


@pytest.mark.parametrize(
    ("hip", "properties", "reason"),
    [
        (None, {"name": "NVIDIA A100", "major": 8, "minor": 0}, "NVIDIA A100 has no float8 matrix"),
        ("7.0", {"name": "MI250X", "gcnArchName": "gfx90a:sramecc+", "major": 9, "minor": 0},
         "gfx90a has no float8 matrix units"),
    ],
)  # fmt: skip
def test_devices_without_float8_are_named(hip, properties, reason, monkeypatch):
    found = SimpleNamespace(**properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert float8.missing_float8(torch.device("cuda")).startswith(reason)
    assert float8.missing_float8(torch.device("cpu")) is None


def test_an_mi300_multiplies_in_its_own_formats(monkeypatch):
    for arch, number in (("gfx942:sramecc+", 1), ("gfx950", 0)):
        found = SimpleNamespace(gcnArchName=arch)
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, f=found: f)
        assert float8.float8_of(torch.device("cuda")) == number
