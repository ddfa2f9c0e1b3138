"""The chunked loss equals cross-entropy, in less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.model.loss import ZLoss, _add_product_, linear_cross_entropy

VOCAB, ROWS, HIDDEN = 37, 48, 16


def inputs(n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (n,), generator=generator)
    targets[::5] = -100
    return hidden, weight, targets


def plain(hidden, weight, targets, softcap=0.0):
    logits = (hidden.float() @ weight.float().t())[:, :VOCAB]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def chunked(hidden, weight, targets, softcap=0.0, chunk_tokens=8):
    return linear_cross_entropy(
        hidden, weight, targets, vocab_size=VOCAB, chunk_tokens=chunk_tokens, softcap=softcap
    )


def gradients(loss, *tensors):
    return torch.autograd.grad(loss * 0.25, tensors)


@pytest.mark.parametrize(("n", "softcap"), [(1, 0.0), (8, 0.0), (9, 0.0), (61, 0.0), (61, 2.0)])
def test_equals_cross_entropy_at_any_length(n, softcap):
    hidden, weight, targets = inputs(n)
    ours = chunked(hidden, weight, targets, softcap)
    theirs = plain(hidden, weight, targets, softcap)
    with torch.no_grad():
        assert chunked(hidden, weight, targets, softcap).item() == ours.item()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for a, b in zip(
        gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_z_loss_is_palms_in_the_gradient_and_not_in_the_reported_loss():
    hidden, weight, targets = inputs(61)
    z_loss = ZLoss(0.01)
    ours = linear_cross_entropy(
        hidden, weight, targets, vocab_size=VOCAB, chunk_tokens=8, z_loss=z_loss
    )
    cross_entropy = plain(hidden, weight, targets)
    log_z = torch.logsumexp((hidden @ weight.t())[targets >= 0, :VOCAB], dim=1)
    expected = 0.01 * log_z.square().sum()
    torch.testing.assert_close(ours, cross_entropy)
    torch.testing.assert_close(z_loss.take(hidden.device).float(), expected)
    assert z_loss.take(hidden.device) == 0
    for a, b in zip(
        gradients(ours, hidden, weight),
        gradients(cross_entropy + expected, hidden, weight),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_close_as_its_rounding(dtype):
    hidden, weight, targets = inputs(61, dtype)
    ours, theirs = chunked(hidden, weight, targets), plain(hidden, weight, targets)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=0)
    for a, b in zip(
        gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True
    ):
        assert a.dtype == dtype
        assert (a - b).float().norm() < 2e-2 * b.float().norm()


def test_fp16_keeps_gradients_of_unlikely_tokens():
    """Their probability is below fp16's smallest number, so without scaling their gradient is 0."""
    hidden = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[0.0], [-17.0]], dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(
        hidden, weight, torch.zeros(1, dtype=torch.int64), vocab_size=2, chunk_tokens=8
    )
    (gradient,) = torch.autograd.grad(loss * 1000, weight)
    expected = 1000 * torch.exp(torch.tensor(-17.0))
    torch.testing.assert_close(gradient[1, 0].float(), expected, rtol=2e-2, atol=0)


def test_fp16_does_not_overflow_for_a_frequent_id():
    """200 tokens in a chunk, of spaces for example, exceed fp16's range in the scaled sum."""
    hidden = torch.ones(1024, 2, dtype=torch.float16)
    weight = torch.zeros(50, 2, dtype=torch.float16, requires_grad=True)
    targets = torch.arange(1024) % 40
    targets[:200] = 7
    linear_cross_entropy(hidden, weight, targets, vocab_size=50, chunk_tokens=1024).backward()
    counts = torch.bincount(targets, minlength=50)[:, None].expand(50, 2)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), 1024 / 50 - counts, rtol=1e-3, atol=1e-2)


def test_weight_gradient_is_summed_in_fp32():
    """600 chunks with a gradient of 0.5 each: a bf16 sum would stop at 128."""
    hidden = torch.ones(600, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(600, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, targets, vocab_size=2, chunk_tokens=1)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient[1, 0].item() == 300.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_adds_products_to_the_weight_gradient_without_rounding_them(dtype):
    total = torch.randn(64, 32, device="cuda")
    left, right = torch.randn(64, 256, device="cuda"), torch.randn(256, 32, device="cuda")
    left, right = left.to(dtype), right.to(dtype)
    expected = total.double() + left.double() @ right.double()
    _add_product_(total, left, right)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


def test_without_targets_there_is_no_loss_and_no_gradient():
    hidden, weight, targets = inputs(20)
    loss = chunked(hidden, weight, torch.full_like(targets, -100))
    assert loss.item() == 0
    assert all(not g.any() for g in gradients(loss, hidden, weight))


def test_padded_ids_get_neither_probability_nor_gradient():
    hidden, weight, targets = inputs(20)
    with torch.no_grad():
        weight[VOCAB:] = 1000.0
    loss = chunked(hidden, weight, targets)
    torch.testing.assert_close(loss, plain(hidden, weight, targets))
    assert not gradients(loss, weight)[0][VOCAB:].any()


class LargestResult(TorchDispatchMode):
    """Records the largest number of elements that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_no_tensor_is_larger_than_one_chunk_of_logits():
    hidden, weight, targets = inputs(2000)
    with LargestResult() as whole:
        plain(hidden, weight, targets).backward()
    with LargestResult() as largest:
        chunked(hidden, weight, targets, chunk_tokens=16).backward()
    assert whole.numel >= 2000 * VOCAB
    assert largest.numel == hidden.numel(), "the gradient of hidden, not the logits"
