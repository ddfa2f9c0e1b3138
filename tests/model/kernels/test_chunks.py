"""Attention in chunks is attention of whole sequences, merged."""

import pytest
import torch
import torch.nn.functional as F

from megafrontier.model.kernels import chunks
from megafrontier.model.kernels.chunks import chunk_attention, register
from megafrontier.model.positions import document_mask

BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 48, 4, 2, 8
DOCUMENTS = torch.tensor([0, 1, 5, 30, 48, 60, 72, 96], dtype=torch.int32)


class LocalExchange:
    """The only process: it has all chunks."""

    size = 1

    def __init__(self, count=4):
        self.count, self.sent = count, 0
        self.number = register(self)

    def starts(self, length):
        return range(0, length, length // self.count)

    def begin_gather(self, heads):
        self.sent += heads.numel()
        return heads.clone

    def reduce(self, heads):
        return heads


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    heads = [HEADS, KV_HEADS, KV_HEADS, HEADS]
    return [
        torch.randn(BATCH, LENGTH, n, WIDTH, generator=generator).to(dtype).requires_grad_()
        for n in heads
    ]


def whole(query, key, value, documents):
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (key, value))
    heads = (t.transpose(1, 2) for t in (query, key, value))
    mask = None if documents is None else document_mask(documents, BATCH, LENGTH)
    return F.scaled_dot_product_attention(
        *heads, attn_mask=mask, is_causal=documents is None
    ).transpose(1, 2)


def with_gradients(attend, dtype=torch.float32):
    *tensors, gradient = inputs(dtype)
    found = attend(*tensors)
    return [found, *torch.autograd.grad(found, tensors, gradient)]


@pytest.mark.parametrize("kernel", ["log-sums", "log-sums, keys kept", "mask"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
def test_chunks_give_the_attention_of_whole_sequences(monkeypatch, kernel, documents):
    if kernel == "mask":
        monkeypatch.setattr(chunks, "has_document_kernel", lambda *_: False)
        monkeypatch.setattr(chunks, "QUERIES", 5)
    exchange = LocalExchange()
    keeps = {"exchange": exchange.number, "keeps_keys": kernel == "log-sums, keys kept"}
    found = with_gradients(lambda *heads: chunk_attention(*heads, documents, 0.0, **keeps))
    expected = with_gradients(lambda *heads: whole(*heads, documents))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gathers = 1 if keeps["keeps_keys"] else 2
    assert exchange.sent == gathers * BATCH * LENGTH * 2 * KV_HEADS * WIDTH


def test_half_precision_is_as_exact_as_one_kernel():
    exchange = LocalExchange()
    attend = lambda *heads: chunk_attention(*heads, None, 0.0, exchange=exchange.number)  # noqa: E731
    exact = with_gradients(lambda *heads: whole(*heads, None))
    for found, once, right in zip(
        with_gradients(attend, torch.bfloat16),
        with_gradients(lambda *heads: whole(*heads, None), torch.bfloat16),
        exact,
        strict=True,
    ):
        assert (found - right).abs().mean() < 1.5 * (once - right).abs().mean()


def test_dropout_draws_the_same_in_backward_and_for_a_seed():
    """The gradient of the values alone shows what was dropped: the output is linear in them."""
    exchange = LocalExchange()
    query, key, value, gradient = inputs()

    def attend(value):
        torch.manual_seed(3)
        return chunk_attention(query, key, value, DOCUMENTS, 0.5, exchange=exchange.number)

    found = attend(value)
    assert torch.equal(found, attend(value))
    (by_value,) = torch.autograd.grad(found, value, gradient)
    torch.testing.assert_close((by_value * value).sum(), (found * gradient).sum())
    assert not torch.allclose(found, whole(query, key, value, DOCUMENTS))


def test_no_mask_is_as_large_as_a_sequence_squared(monkeypatch):
    """Nor are all masks and scores together kept for backward."""
    monkeypatch.setattr(chunks, "QUERIES", 4)
    exchange, saved = LocalExchange(), []
    query, key, value, _ = inputs()

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk_attention(query, key, value, DOCUMENTS, 0.5, exchange=exchange.number)
    assert sum(saved) <= query.numel() + key.numel() + value.numel() + len(DOCUMENTS)
