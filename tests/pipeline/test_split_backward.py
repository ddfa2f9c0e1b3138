"""The two parts of a split backward give the gradients of one backward."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from megafrontier.model.linear import Linear
from megafrontier.model.moe import experts
from megafrontier.model.moe.products import grouped_product, loop_product, padded_product
from megafrontier.model.recompute.deferred import OtherGradients
from megafrontier.pipeline.split_backward import SplitBackward
from tests.model.moe.shapes import SHARED, mixture
from tests.model.small_models import SHAPES, small_config


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def run(model, tokens, split):
    """Two micro-batches in flight: both backwards of inputs, then both of weights."""
    late, others = [], OtherGradients()
    for rows in (tokens[:1], tokens[1:]):
        loss = model(rows, rows)
        _, left = split.inputs(loss, None, None, model.parameters(), others)
        assert all(p.grad is None for p in model.parameters())
        late.append(left)
    for left in late:
        split.weights(left)
    return gradients(model)


@pytest.mark.parametrize(
    ("shape", "mode", "compiles"),
    [
        ("gpt2", "none", False),
        ("gpt2", "selective", False),
        ("mixture", "selective", False),
        ("llama grouped, tied, longer texts", "block", False),
        ("gpt2", "selective", True),
        ("llama grouped, tied, longer texts", "none", True),
    ],
)
def test_both_parts_give_the_gradients_of_one_backward(
    shape, mode, compiles, make_model, tokens, compiler
):
    config = small_config(**{**(SHAPES | {"mixture": SHARED})[shape], "layers": 3})
    whole = make_model(config)
    whole(tokens, tokens).backward()
    expected = gradients(whole)
    model = make_model(config, checkpointing=mode, compile_blocks=compiles)
    found = run(model, tokens, SplitBackward(model, model.blocks, copies=compiles))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)
    if compiles:
        assert compiler.frame_count == 2  # the blocks, and the losses
        assert not counters["graph_break"]


@pytest.mark.parametrize("counts", [[5] * 8, [0, 7, 0, 9, 4, 6, 8, 6]])
@pytest.mark.parametrize("product", [loop_product, padded_product, grouped_product])
def test_both_parts_give_the_gradients_of_experts(product, counts, monkeypatch):
    monkeypatch.setattr(experts, "choose_product", lambda *_: product)
    config = small_config(**mixture())
    layer = experts.Experts(config, config.moe)
    for matrices in layer.parameters():
        nn.init.normal_(matrices, generator=torch.Generator().manual_seed(0))
    tokens = torch.randn(sum(counts), config.hidden, requires_grad=True)
    layer(tokens, torch.tensor(counts)).square().sum().backward()
    expected = gradients(layer)
    split = SplitBackward(layer, [layer], copies=False)
    loss = layer(tokens, torch.tensor(counts)).square().sum()
    by_tokens, late = split.inputs(loss, None, tokens, layer.parameters(), OtherGradients())
    assert all(matrices.grad is None for matrices in layer.parameters())
    split.weights(late)
    torch.testing.assert_close(by_tokens, tokens.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients(layer), expected, rtol=1e-4, atol=1e-4)


def flops(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_the_first_part_leaves_the_products_for_weights_to_the_second(make_model, tokens):
    config = small_config(**SHAPES["gpt2"])
    model = make_model(config)
    loss = model(tokens, tokens)
    backward = flops(loss.backward)
    split = SplitBackward(model, model.blocks, copies=False)
    loss, late = model(tokens, tokens), []
    given = loss, None, None, model.parameters(), OtherGradients()
    first = flops(lambda: late.append(split.inputs(*given)[1]))
    blocks = sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, Linear))
    second = 2 * tokens.numel() * blocks
    assert first + second == backward
    assert flops(lambda: split.weights(late[0])) == second
