"""The allocator keeps the memory that a step frees for the next step."""

import ctypes
import os
import platform
import resource

import pytest
import torch

from megafrontier.launch.device import prepare_allocator
from tests.processes import in_child

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")


def faults() -> int:
    """Page faults in each round of allocating and freeing 120 MB."""

    def work() -> None:
        parts = [torch.ones(5 << 20) for _ in range(6)]  # 20 MB each
        del parts

    for _ in range(5):
        work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10


@pytest.mark.parametrize("settings", [{}, {"MALLOC_TRIM_THRESHOLD_": "100000"}])
def test_freed_memory_is_kept_unless_the_environment_sets_the_allocator(settings) -> None:
    def body() -> bool:
        os.environ.update(settings)
        # What glibc begins with depends on what was allocated before; now it gives back each block.
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
        before = faults()
        prepare_allocator(torch.device("cpu"))
        return before > 5_000 and (faults() < 500) == (not settings)

    assert in_child(body) == 0
