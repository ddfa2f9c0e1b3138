"""Attention in chunks is attention of whole sequences, merged."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from megafrontier.model.kernels import chunks, flash
from megafrontier.model.kernels.chunks import chunk_attention
from megafrontier.model.kernels.exchanges import AttentionPart, register
from megafrontier.model.positions import document_mask

LENGTH, HEADS, KV_HEADS, WIDTH = 96, 4, 2, 8
ONE = torch.tensor([0, 96], dtype=torch.int32)
DOCUMENTS = torch.tensor([0, 1, 5, 30, 48, 60, 72, 96], dtype=torch.int32)


class LocalExchange:
    """The only process: it has all tokens, in parts of 12 or less."""

    def __init__(self, pieces=1):
        self.sent, self._pieces = 0, pieces
        self.number = register(self)

    def parts(self, documents):
        return [
            AttentionPart(slice(start, min(start + 12, end)), slice(begin, start))
            for begin, end in pairwise(documents.tolist())
            for start in range(begin, end, 12)
        ]

    def bounds(self, documents):
        stops = [part.tokens.stop for part in self.parts(documents)]
        return torch.tensor([0, *stops], dtype=torch.int32)

    def pieces(self, kv_heads):
        return self._pieces

    def begin_gather(self, heads, documents):
        self.sent += heads.numel()
        return heads.clone

    def begin_reduce(self, heads, documents, dtype):
        return heads.clone


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    heads = [HEADS, KV_HEADS, KV_HEADS, HEADS]
    return [
        torch.randn(1, LENGTH, n, WIDTH, generator=generator).to(dtype).requires_grad_()
        for n in heads
    ]


def whole(query, key, value, documents):
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (key, value))
    heads = (t.transpose(1, 2) for t in (query, key, value))
    mask = document_mask(documents, 1, LENGTH)
    return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)


def with_gradients(attend, dtype=torch.float32):
    *tensors, gradient = inputs(dtype)
    found = attend(*tensors)
    return [found, *torch.autograd.grad(found, tensors, gradient)]


@pytest.mark.parametrize("kernel", ["log-sums", "log-sums, keys kept", "a kernel a part", "mask"])
@pytest.mark.parametrize("documents", [ONE, DOCUMENTS], ids=["", "documents"])
def test_parts_give_the_attention_of_whole_documents(monkeypatch, kernel, documents):
    """With a kernel for each part where that for all has other log-sums, as on ROCm."""
    if kernel == "mask":
        monkeypatch.setattr(flash, "has_document_kernel", lambda *_: False)
        monkeypatch.setattr(chunks, "QUERIES", 5)
    if kernel == "a kernel a part":
        monkeypatch.setattr(chunks, "returns_traced_shape", lambda *_: False)
    exchange = LocalExchange(pieces=1 if kernel == "mask" else 2)
    keeps = {"exchange": exchange.number, "keeps_keys": kernel == "log-sums, keys kept"}
    found = with_gradients(lambda *heads: chunk_attention(*heads, documents, 0.0, **keeps))
    expected = with_gradients(lambda *heads: whole(*heads, documents))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gathers = 1 if keeps["keeps_keys"] else 2
    assert exchange.sent == gathers * LENGTH * 2 * KV_HEADS * WIDTH


def test_half_precision_is_as_exact_as_one_kernel():
    exchange = LocalExchange()
    attend = lambda *heads: chunk_attention(*heads, ONE, 0.0, exchange=exchange.number)  # noqa: E731
    exact = with_gradients(lambda *heads: whole(*heads, ONE))
    for found, once, right in zip(
        with_gradients(attend, torch.bfloat16),
        with_gradients(lambda *heads: whole(*heads, ONE), torch.bfloat16),
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
