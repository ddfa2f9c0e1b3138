"""How the memory of tensors is taken from the system."""

import ctypes
import os
import platform

import torch

_HEAP = {"TRIM_THRESHOLD": (-1, -1), "MMAP_THRESHOLD": (-3, 32 << 20), "ARENA_MAX": (-8, 1)}
"""By glibc's name, the number that mallopt(3) has for a setting, and its value here: never give
memory back; take blocks of up to so many bytes (the most it accepts) from the heap; have one."""


def prepare_allocator(device: torch.device) -> None:
    """Let tensors of a step find the memory of the step before. What the environment says of the
    allocator stays as it is."""
    if device.type == "cuda":
        _let_segments_grow()
    elif platform.libc_ver()[0] == "glibc":
        _keep_heap()


def _let_segments_grow() -> None:
    """Buffers that come and go with the units leave holes in fixed segments. On ROCm they stay
    fixed: older releases have no others, and in newer ones those that grow may hang. Whoever set
    the allocator up in the environment knows better."""
    is_set = any(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF") for kind in ("", "CUDA_"))
    if torch.version.hip is None and not is_set:
        # torch has no public name for it, and from 2.13 on warns of the one it had.
        new = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (new or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def _keep_heap() -> None:
    """glibc gives large blocks back to the system when they are freed, and the next step would
    have the system clear every page anew: some 4 % of its CPU time. Those beyond 32 MB it still
    does. (torch's own huge pages, THP_MEM_ALLOC_ENABLE, spare as much and cost more: tensors that
    all begin at multiples of 2 MB share the same sets of the cache.)

    And it gives each thread a heap of its own, of which the lanes would keep a hundred megabytes:
    they take turns in one instead.

    Whoever has set one of these wants another heap, and none of them is touched: one alone means
    little (blocks in the heap are not trimmed while something lies above them)."""
    if any(map(_is_told, _HEAP)):
        return
    libc = ctypes.CDLL(None)
    for number, value in _HEAP.values():
        libc.mallopt(number, value)


def _is_told(name: str) -> bool:
    """Whether the environment has a value for one of glibc's settings already."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return f"glibc.malloc.{name.lower()}=" in tunables or bool(
        {f"MALLOC_{name}", f"MALLOC_{name}_"} & os.environ.keys()
    )
