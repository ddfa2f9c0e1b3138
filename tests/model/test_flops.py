"""Counts that MFU rests on, checked by hand and against the model itself."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megafrontier.config import ModelConfig
from megafrontier.model.flops import flops_per_token, parameter_count


def test_parameters_are_those_of_the_model(shape, make_model):
    assert parameter_count(shape) == sum(p.numel() for p in make_model(shape).parameters())


def test_gpt2_small_by_hand():
    config = ModelConfig(vocab_size=50257, vocab_multiple=1, tie_embeddings=True)
    assert parameter_count(config) == 124_439_808
    blocks, head = 12 * 12 * 768**2, 50257 * 768
    assert flops_per_token(config) == 6 * (blocks + head) + 6 * 12 * 768 * 1024


def test_flops_are_those_torch_counts(shape, make_model, tokens):
    """torch counts attention whole, not its causal half, and 2.5 backward passes for it: it
    computes the scores again. So attention is counted apart: 2 products forward, 5 backward."""
    shape.vocab_multiple = 1
    model = make_model(shape).train()
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for operation, n in counted.items() if "attention" not in str(operation))
    width = shape.heads * (shape.head_size or shape.hidden // shape.heads)
    attention = 6 * shape.layers * width * shape.sequence_length
    assert products / tokens.numel() == pytest.approx(flops_per_token(shape) - attention)
