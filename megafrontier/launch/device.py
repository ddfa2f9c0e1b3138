"""Choose a rank's device, and set up the allocator of its memory."""

import ctypes
import os
import platform

import torch

from megafrontier.common.errors import UserError
from megafrontier.parallel.env import Identity

_HEAP = {-1: -1, -3: 32 << 20, -8: 1}
"""Settings of glibc by mallopt(3)'s number. M_TRIM_THRESHOLD: never give memory back to the system.
M_MMAP_THRESHOLD: take blocks of up to 32 MB (the largest value it accepts) from the heap.
M_ARENA_MAX: have one heap."""


def uses_accelerator(name: str) -> bool:
    """Whether to compute on a GPU: if there is one, unless `machine.device.name` is `cpu`."""
    return name != "cpu" and torch.cuda.is_available()


def choose_device(identity: Identity, name: str) -> torch.device:
    """This rank's GPU, or the CPU if there is none or `name` (`machine.device.name`) is `cpu`.

    A launcher that binds one GPU to each rank shows it as number 0. Local ranks on the CPU share
    its cores, unless OMP_NUM_THREADS is set. Raises UserError for more local ranks than GPUs.
    """
    if identity.source == "local" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // identity.world_size))
    if uses_accelerator(name):
        count = torch.cuda.device_count()
        if identity.source == "local" and identity.world_size > count:
            raise UserError(
                f"--nproc: {identity.world_size}, need at most {count}, one a device, or "
                "machine.device.name=cpu"
            )
        return torch.device("cuda", identity.local_rank % count)
    return torch.device("cpu")


def prepare_allocator(device: torch.device) -> None:
    """Let the tensors of a step reuse the memory of the step before. Settings of the allocator in
    the environment are kept."""
    if device.type == "cuda":
        _use_expandable_segments()
    elif platform.libc_ver()[0] == "glibc":
        _keep_heap()


def _use_expandable_segments() -> None:
    """Use segments that can grow, because buffers that come and go with the units leave holes in
    fixed ones. Not on ROCm: older releases lack them, and in newer ones they may hang."""
    is_set = any(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF") for kind in ("", "CUDA_"))
    if torch.version.hip is None and not is_set:
        # torch has no public name for it, and from 2.13 on warns of the one it had.
        new = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (new or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def _keep_heap() -> None:
    """Keep freed memory in the heap, and use one heap for all threads.

    By default glibc returns large blocks to the system when they are freed, which then clears every
    page for the next step: about 4 % of a step's CPU time. Blocks of more than 32 MB still go.
    (torch's huge pages, THP_MEM_ALLOC_ENABLE, save as much but cost more: tensors that all begin at
    multiples of 2 MB share the same sets of the cache.) With a heap for each thread, the threads of
    the streams would keep a hundred megabytes.

    If the environment has settings of glibc's allocator, they are kept as they are.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    for number, value in _HEAP.items():
        libc.mallopt(number, value)
