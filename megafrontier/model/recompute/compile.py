"""torch.compile for blocks: one compilation that all of them share.

The compiled function is called inside `forward`, so that the engine's hooks on the module run
outside it. Weights are inputs of the graph: one graph serves every block, wherever the engine has
gathered its weights. In the head, the loss of a chunk is compiled, because it passes over the
logits about six times. The embedding is a lookup and gains nothing.
"""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch import config as functorch

BACKEND = "inductor"
RECOMPILE_LIMIT = 64
T = TypeVar("T")


def compiled(function: Callable[..., T], graphs: bool = False) -> Callable[..., T]:
    """The function, compiled as one graph per set of input shapes.

    graphs: on a GPU, record its kernels as a CUDA or HIP graph for each address of its weights, and
        launch them with one call. The engine gathers a unit into the same buffer every time.
    """
    _prepare()
    # It warns on every rank that checkpointed code must not work in place. Ours does not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # Kinds of blocks times modes of activation checkpointing may be more graphs than its 8.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    options: dict[str, Any] | None = {"triton.cudagraphs": True} if graphs else None
    return torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False, options=options)


@cache
def _prepare() -> None:
    """Let the compiler's cache keep gated activations, and let `join_halves` write in place.

    On a GPU, torch would lower a concatenation to a kernel that computes each half by itself.
    """
    # Internals of torch: in a release without them both are slower, and as right.
    with suppress(ImportError, AttributeError):
        functorch.autograd_cache_allow_custom_autograd_functions = True
        from torch._inductor import ir, lowering

        operator = torch.ops.megafrontier.join_halves.default

        @lowering.register_lowering(operator, type_promotion_kind=None)
        def join(*halves: Any) -> Any:
            return ir.TensorBox(ir.ConcatKernel.create(halves, len(halves[0].get_size()) - 1))


def compiled_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of the last dimension of a tensor, compiled as one graph for any number of
    rows."""
    run = compiled(function)

    def call(values: Tensor, *options: Any) -> Tensor:
        rows = values.flatten(0, -2)
        if len(rows) < 2:  # the compiler makes graphs of their own for 0 and 1
            return function(values, *options)
        let_length_vary(rows)
        return run(rows, *options).unflatten(0, values.shape[:-1])

    return call


def let_length_vary(tensor: Tensor) -> None:
    """Compile once for all lengths of this tensor, because the number of documents varies."""
    torch._dynamo.mark_dynamic(tensor, 0)


def start_workers(device: torch.device) -> None:
    """Start the processes that compile for a GPU now, and not at the first compilation, so that the
    caller decides which signals they ignore."""
    if device.type == "cuda":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks on this host for code on `device`, or None."""
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
    except Exception:  # one type per reason
        return "no working C++ compiler (CXX or g++)"
    return None
