"""A split cuts what modules declare, of modules that it does not know."""

import pytest
import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.model.linear import Linear
from megafrontier.model.recompute.deferred import OtherGradients
from megafrontier.parallel.param_spec import ParamSpec, set_spec, spec_of
from megafrontier.pipeline.split_backward import SplitBackward
from megafrontier.splits.cut import cut_parameters


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.arange(8.0))
        set_spec(self.gate, ParamSpec("", (8,), "bias", cut="heads"))
        self.up = Linear(4, [8, 6], 0.1, bias=True, cut="columns")
        self.down = Linear(8, 4, 0.1, bias=True, cut="rows")
        self.rest = Linear(4, 4, 0.1, bias=True)


def test_parameters_become_the_parts_that_their_specs_declare_in_the_order_that_they_had():
    model, whole = Unknown(), dict(Unknown().named_parameters())
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    cut_parameters(model, ("columns", "rows", "heads"), "tensor", 1, 2)
    boxes = {
        "gate": [("gate", ((4, 8),))],
        "up.weight": [("up.weight", ((4, 8), (0, 4))), ("up.weight", ((11, 14), (0, 4)))],
        "up.bias": [("up.bias", ((4, 8),)), ("up.bias", ((11, 14),))],
        "down.weight": [("down.weight", ((0, 4), (4, 8)))],
        "down.bias": [("down.bias", ((0, 4),))],
        "rest.weight": [("rest.weight", ((0, 4), (0, 4)))],
        "rest.bias": [("rest.bias", ((0, 4),))],
    }
    expected = [part for parts in boxes.values() for part in parts]
    specs = [(spec_of(name, p), p) for name, p in model.named_parameters()]
    assert [(spec.name, spec.box) for spec, _ in specs] == expected
    for spec, parameter in specs:
        box = tuple(slice(*bounds) for bounds in spec.box)
        assert torch.equal(parameter, whole[spec.name][box])
        is_cut = spec.name.startswith(("gate", "up", "down.weight"))
        assert ("tensor" in spec.axes) != is_cut
    before = [spec.name for spec, _ in specs]
    cut_parameters(model, ("expert",), "expert", 0, 2)
    assert [spec_of(name, p).name for name, p in model.named_parameters()] == before


def test_a_split_that_does_not_divide_what_a_module_declares_is_refused_before_anything_is_cut():
    model = nn.Sequential(Linear(4, [9, 6], 0.1, cut="columns"))
    with pytest.raises(UserError) as caught:
        cut_parameters(model, ("columns",), "tensor", 0, 2)
    assert str(caught.value) == (
        "parallel.tensor: 2, does not divide 0.weight (9 of (15, 4)), need a divisor"
    )


def test_any_product_may_defer_the_gradients_of_its_matrices_but_not_of_its_bias():
    layer, inputs = Linear(4, [8, 6], 0.1, bias=True), torch.randn(3, 4, requires_grad=True)
    layer(inputs).square().sum().backward()
    expected = inputs.grad, layer.weight.grad, layer.bias.grad
    layer.weight.grad = layer.bias.grad = None
    split = SplitBackward(layer, [layer], copies=False)
    result, others = layer(inputs).square().sum(), OtherGradients()
    by_inputs, deferred = split.inputs(result, None, inputs, layer.parameters(), others)
    ((number, kept),) = deferred.products
    assert (number, [tuple(tensor.shape) for tensor in kept]) == (0, [(3, 4), (3, 14)])
    assert layer.weight.grad is None
    split.weights(deferred)
    torch.testing.assert_close((by_inputs, layer.weight.grad, layer.bias.grad), expected)
