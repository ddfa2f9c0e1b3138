"""On a GPU, attention with windows, capped scores and sinks is that of a CPU."""

import pytest
import torch

from megafrontier.model.kernels.varlen import document_attention
from tests.model.kernels.test_varlen import LENGTH, heads, starts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (9, 0.0), (9, 0.7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_capped_scores_and_sinks_are_those_of_a_cpu(window, softcap, dtype):
    inputs = [*heads(2, dtype), torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype).requires_grad_()]

    def results(device, dtype):
        found = [t.detach().to(device, dtype).requires_grad_() for t in inputs]
        query, key, value, sinks = found
        rule = sinks, window, softcap
        out = document_attention(query, key, value, starts().to(device), LENGTH, *rule)
        return [t.float().cpu() for t in (out, *torch.autograd.grad(out.float().sum(), found))]

    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    for ours, theirs in zip(results("cuda", dtype), results("cpu", torch.float32), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
