"""On GPUs, with NCCL or RCCL, the engine gives the results of CPUs with every overlap policy.

Ranks share GPUs if there are fewer GPUs than ranks.
"""

import pytest
import torch

from tests.comm.test_overlap import CASES, POLICIES, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("unused_gpus")


@pytest.mark.parametrize(("strategy", "name", "error_feedback", "precision", "accumulation"), CASES)
def test_all_policies_give_the_same_bits_and_about_the_losses_of_cpus(
    strategy, name, error_feedback, precision, accumulation
):
    chosen = strategy, name, error_feedback

    def body(hierarchy):
        found = []
        for overlap, prefetch in POLICIES if hierarchy.device.type == "cuda" else POLICIES[:1]:
            losses, masters = train(hierarchy, *chosen, overlap, prefetch, precision, accumulation)
            found.append((losses, [master.cpu() for master in masters]))
        return found

    on_gpu = run_ranks((2, 2, 2), body, on_gpu=True)
    for found, on_cpu in zip(on_gpu, run_ranks((2, 2, 2), body), strict=True):
        (losses, masters), *others = found
        for other_losses, other_masters in others:
            assert losses == other_losses
            assert all(torch.equal(a, b) for a, b in zip(masters, other_masters, strict=True))
        # Sums are in another order, and quantization amplifies their rounding.
        assert losses == pytest.approx(on_cpu[0][0], rel=2e-2 if precision == "bf16" else 1e-3)
