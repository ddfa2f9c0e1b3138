"""The allocator keeps the memory that a step frees for the next step."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS_PER_ROUND = """
import ctypes
import resource
import torch
from megafrontier.launch.device import prepare_allocator

{call}

def work():
    parts = [torch.ones(5 << 20) for _ in range(6)]  # 20 MB each

for _ in range(5):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""
NAMES = ("MALLOC_", "GLIBC_TUNABLES")

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")


def printed(script: str, call: str, **settings: str) -> int:
    """Run `script` with `call` filled in, without other allocator settings; return its output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(NAMES)} | settings
    command = [sys.executable, "-c", script.format(call=call)]
    return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def faults(call: str, **settings: str) -> int:
    """Page faults in each round of allocating and freeing 120 MB."""
    return printed(FAULTS_PER_ROUND, call, **settings)


def test_freed_memory_is_kept_for_the_next_step_unless_the_environment_sets_the_allocator() -> None:
    # What glibc begins with depends on what was allocated before; from this on it trims each time.
    trimming = "ctypes.CDLL(None).mallopt(-1, 100_000)"
    prepared = "prepare_allocator(torch.device('cpu'))"
    assert faults(trimming) > 5_000
    assert faults(f"{trimming}; {prepared}") < 500
    assert faults(prepared, MALLOC_TRIM_THRESHOLD_="100000") > 5_000
    assert faults(prepared, GLIBC_TUNABLES="glibc.malloc.trim_threshold=100000") > 5_000
    # One that says nothing of it takes nothing away.
    assert faults(f"{trimming}; {prepared}", GLIBC_TUNABLES="glibc.malloc.tcache_count=0") < 500


RESIDENT = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
import torch
from megafrontier.launch.device import prepare_allocator

ctypes.CDLL(None).mallopt(-1, -1)
ctypes.CDLL(None).mallopt(-3, 32 << 20)
{call}

def work():
    parts = [torch.ones(1 << 20) for _ in range(12)]  # 4 MB each

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) >> 8  # pages of 4 KB, in MB

lanes = [ThreadPoolExecutor(1) for _ in range(4)]
before = resident()
for _ in range(3):
    for lane in lanes:
        lane.submit(work).result()
print(resident() - before)
"""


def test_threads_share_one_heap() -> None:
    alone = printed(RESIDENT, "")
    assert printed(RESIDENT, "prepare_allocator(torch.device('cpu'))") < alone / 2
