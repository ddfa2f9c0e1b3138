"""torch.compile for blocks: one compilation that all of them share.

What is compiled is a function of the block and its inputs, below `forward`: the hooks of the
partition engine, which hang on the module, run outside it. Weights are inputs of the graph, so
that one graph serves every block and takes them wherever the engine has gathered them. The
embedding is a lookup and gains nothing. Of the head the losses of a chunk are compiled, a second
graph: written out they pass over the logits some six times.
"""

import logging
import os
import shutil
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

BACKEND = "inductor"
T = TypeVar("T")


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """The function as one graph for the shapes it is first called with, and one for each other."""
    # Says at length, on every rank, that checkpointed code may not work in place; ours does not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    return torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False)


def let_length_vary(tensor: Tensor) -> None:
    """Compile once for every length of this tensor: the number of documents is never the same."""
    torch._dynamo.mark_dynamic(tensor, 0)


def start_workers(device: torch.device) -> None:
    """Start the processes that compile for a GPU, which the first compilation would do else. Who
    calls it decides which signals they are not to notice."""
    if device.type == "cuda":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks on this host for code on `device`; None when all is there."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "no Triton for this GPU"
        named = os.environ.get("CC")
        if not any(shutil.which(name) for name in (named, "gcc", "clang") if name):
            return "no C compiler (CC, gcc or clang)"
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # it has a type of its own for each way to have none
        return "no working C++ compiler (CXX or g++)"
    return None
