"""Attention within documents equals attention with the dense mask, and needs none."""

import pytest
import torch
import torch.nn.functional as F

from megafrontier.config import AttentionConfig
from megafrontier.data.sampling.samples import document_starts
from megafrontier.model.attention import softmax
from megafrontier.model.attention.softmax import SoftmaxAttention
from megafrontier.model.kernels import blockwise, flash
from megafrontier.model.kernels.backends import (
    DOCUMENTS,
    MASKED,
    Computed,
    form_of,
    supports_gqa,
)
from megafrontier.model.kernels.flash import Blockwise, CPUFlash, GPUFlash, Scope, kernel_of
from megafrontier.model.kernels.varlen import document_attention
from megafrontier.model.positions import document_mask, document_positions
from tests.model.small_models import GEMMA

CPU = torch.device("cpu")
PLAIN, PACKED = (Computed(CPU, torch.float32, documents) for documents in (False, True))
BATCH, LENGTH = 3, 40
LENGTHS = [[40], [1, 38, 1], [7, 1, 1, 20, 11]]


def starts(lengths=LENGTHS):
    """The documents of rows with documents of these lengths."""
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return document_starts(torch.stack(numbers))


def heads(kv_heads, dtype=torch.float32):
    """Query, key and value [t, heads, 8], views of one tensor as the block's are."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(BATCH * LENGTH, 4 + 2 * kv_heads, 8, generator=generator).to(dtype)
    return [part.requires_grad_() for part in whole.split([4, kv_heads, kv_heads], 1)]


def by_mask(query, key, value, documents):
    def rows(tensor):
        return tensor.unflatten(0, (BATCH, LENGTH)).transpose(1, 2)

    mask = document_mask(documents, BATCH, LENGTH)
    mixed = F.scaled_dot_product_attention(
        rows(query), rows(key), rows(value), attn_mask=mask, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize(
    ("kv_heads", "dtype"), [(4, torch.float32), (2, torch.bfloat16), (1, torch.float32)]
)
def test_result_and_gradients_equal_those_with_the_dense_mask(kv_heads, dtype):
    inputs, documents = heads(kv_heads, dtype), starts()
    ours, theirs = (
        document_attention(*inputs, documents, LENGTH),
        by_mask(*(t.float() for t in inputs), documents).to(dtype),
    )
    grad_output = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (0.1, 0.05)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, grad_output),
        torch.autograd.grad(theirs, inputs, grad_output),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def test_the_operator_passes_torchs_opcheck():
    """`torch.compile` needs the schema, the registrations and the shapes of the fake operator."""
    operator = torch.ops.megafrontier.document_attention.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    found = torch.library.opcheck(operator, (*heads(2), starts(), LENGTH), test_utils=checks)
    assert found == dict.fromkeys(checks, "SUCCESS")


def test_cost_is_the_sum_of_the_squares_of_the_lengths(monkeypatch):
    """Each call of the kernel gets the tokens of one document."""
    seen = []
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def watch(query, *rest, **options):
        seen.append(query.shape[2])
        return kernel(query, *rest, **options)

    monkeypatch.setattr("megafrontier.model.kernels.flash._cpu_forward", watch)
    document_attention(*heads(4), starts(), LENGTH)
    assert seen == [length for row in LENGTHS for length in row]


def test_starts_and_positions_are_those_of_the_rows_documents():
    documents = starts()
    assert documents.dtype == torch.int32
    assert documents.tolist() == [0, 40, 41, 79, 80, 87, 88, 89, 109, 120]
    expected = [[place for length in row for place in range(length)] for row in LENGTHS]
    assert document_positions(documents, BATCH, LENGTH).tolist() == expected


def test_dropout_needs_the_dense_mask(make_config, make_model, tokens):
    config = make_config(dropout=0.1)
    assert form_of(config, PACKED, config.dropout) is MASKED
    assert form_of(config, PACKED, 0.0) is DOCUMENTS
    model = make_model(config)
    documents = torch.tensor([0, 5, 24, 48], dtype=torch.int32)
    without = model(tokens, tokens, documents)  # evaluation has no dropout
    losses = [model.train()(tokens, tokens, documents).item() for _ in range(2)]
    assert losses[0] != losses[1]
    hardly = make_model(make_config(dropout=1e-9)).train()(tokens, tokens, documents)
    torch.testing.assert_close(hardly, without)


def test_blocks_are_compiled_only_if_their_evaluation_can_be(make_config, monkeypatch):
    """Evaluation has no dropout, so it needs no dense mask even if training does."""
    monkeypatch.setattr(softmax, "returns_traced_shape", lambda *_: False)
    for dropout in (0.0, 0.1):
        config = make_config(dropout=dropout)
        assert "another shape" in SoftmaxAttention.uncompilable(config, PACKED)
        assert SoftmaxAttention.uncompilable(config, PLAIN) is None


def test_a_gpus_fused_kernels_support_grouped_heads_without_a_mask_in_16_bits():
    gpu = torch.device("cuda")
    assert supports_gqa(gpu, torch.bfloat16, False)
    assert not supports_gqa(gpu, torch.bfloat16, True)
    assert not supports_gqa(gpu, torch.float32, False)
    assert supports_gqa(CPU, torch.float32, False)


def test_the_kernel_of_training_is_named(make_config):
    def backend(documents=False, chunks=False, **model):
        computed = Computed(CPU, torch.float32, documents, chunks)
        return SoftmaxAttention.kernel(make_config(**model), computed)

    assert backend() == "flash"
    assert backend(kv_heads=2) == "flash"
    assert backend(dropout=0.1) == "math"
    assert backend(documents=True, kv_heads=2) == "varlen flash"
    assert backend(documents=True, dropout=0.1, kv_heads=2) == "dense mask, math"
    assert backend(documents=True, chunks=True, kv_heads=2) == "chunks, flash"
    assert backend(chunks=True, dropout=0.1) == "chunks, masked"
    assert backend(**GEMMA) == "varlen plain torch"
    some = AttentionConfig(window=4, global_every=2)
    assert backend(chunks=True, attention=some) == "chunks, flash and plain torch"


PAIR, WHOLE_ROWS = Scope(), Scope(torch.empty(0))


@pytest.mark.parametrize(
    ("device", "scope", "has_sinks", "lacks", "kernel"),
    [
        ("cuda", WHOLE_ROWS, True, [], GPUFlash),
        ("cuda", WHOLE_ROWS._replace(window=4), True, [], GPUFlash),
        ("cuda", WHOLE_ROWS._replace(softcap=2.0), False, [], Blockwise),
        ("cuda", WHOLE_ROWS, False, ["has_window_kernel", "returns_traced_shape"], GPUFlash),
        ("cuda", WHOLE_ROWS._replace(window=4), False, ["has_window_kernel"], Blockwise),
        ("cuda", WHOLE_ROWS, True, ["returns_traced_shape"], Blockwise),
        ("cuda", WHOLE_ROWS, False, ["has_document_kernel"], Blockwise),
        ("cuda", PAIR._replace(is_causal=False), False, [], GPUFlash),
        ("cuda", PAIR._replace(window=4), False, [], Blockwise),
        ("cuda", PAIR, False, ["has_document_kernel"], Blockwise),
        ("cpu", WHOLE_ROWS, True, [], CPUFlash),
        ("cpu", PAIR, False, [], CPUFlash),
        ("cpu", WHOLE_ROWS._replace(window=4), False, [], Blockwise),
        ("cpu", PAIR._replace(softcap=2.0), False, [], Blockwise),
        ("meta", WHOLE_ROWS._replace(window=4), True, [], GPUFlash),
        ("meta", PAIR, False, [], Blockwise),
    ],
)
def test_the_first_kernel_that_supports_the_attention_is_used(
    monkeypatch, device, scope, has_sinks, lacks, kernel
):
    for probe in ("has_document_kernel", "has_window_kernel", "returns_traced_shape"):
        monkeypatch.setattr(flash, probe, lambda *_, probe=probe: probe not in lacks)
    sizes = torch.device(device), torch.bfloat16, 4, 2, 64
    assert type(kernel_of(sizes, scope, has_sinks)) is kernel


def test_chunks_with_a_mask_are_not_compiled(make_config):
    masked, plain = make_config(dropout=0.1), make_config()
    assert "has a mask" in SoftmaxAttention.uncompilable(masked, PLAIN._replace(context=True))
    assert SoftmaxAttention.uncompilable(plain, PACKED._replace(context=True)) is None


def by_scores(query, key, value, sinks, documents, window, softcap):
    """Attention with the whole score matrix, by autograd."""
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    weights = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if softcap:
        weights = softcap * (weights / softcap).tanh()
    number = torch.searchsorted(documents, torch.arange(len(query)).int(), right=True)
    at = torch.arange(len(query))
    far = at[None] <= at[:, None] - (window or len(query))
    masked = far | (at[None] > at[:, None]) | (number[:, None] != number)
    weights = weights.masked_fill(masked, -torch.inf)
    sinks = sinks[:, None, None].expand(-1, len(query), 1)
    weights = torch.cat([weights, sinks], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 1.5), (9, 0.7)])
def test_windows_capped_scores_and_sinks_have_the_gradients_of_autograd(
    window, softcap, monkeypatch
):
    monkeypatch.setattr(blockwise, "QUERIES", 16)  # several blocks
    generator = torch.Generator().manual_seed(2)
    inputs = [*heads(2), torch.randn(4, generator=generator).requires_grad_()]
    query, key, value, sinks = inputs
    documents = starts()
    ours = document_attention(query, key, value, documents, LENGTH, sinks, window, softcap)
    theirs = by_scores(*inputs, documents, window, softcap)
    grad_output = torch.randn(ours.shape, generator=generator)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, grad_output),
        torch.autograd.grad(theirs, inputs, grad_output),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
