"""Names an error of the device's memory, which torch raises with many texts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megafrontier.common.errors import RunFailed

# Errors without a type of their own: of the CPU allocator; of the driver, for page-locked memory
# and the buffers of NCCL or RCCL; of cuBLAS and similar libraries.
_OUT_OF_MEMORY_TEXTS = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED")


class OutOfMemory(RunFailed):
    """A rank's device has no memory left. Another start would fail in the same way."""

    is_rank_local = True


@contextmanager
def explain_out_of_memory(where: str, need: str) -> Iterator[None]:
    """Replace torch's error by OutOfMemory, whose line says where it happened and what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        lines = str(error).splitlines() or ["out of memory"]
        found = [
            line for line in lines if is_memory or any(t in line for t in _OUT_OF_MEMORY_TEXTS)
        ]
        if not found:
            raise
        raise OutOfMemory(f"{where}: {found[0].rstrip('.')}. Need {need}") from error
