"""Parts of a block and of the head beside the plain form that they replace. `parts` runs them:

* gate: SwiGLU, whose backward writes the gradients of gate and up into one tensor;
* rotary: queries and keys turned, and their gradients joined with that of values;
* product: the gradient of the head's matrix, added to the sum over chunks as it is computed.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megafrontier.model.loss import _add_product_, _adds_products
from megafrontier.model.mlp import activate
from megafrontier.model.positions import Rotary, rotary_tables, rotate
from megafrontier.model.recompute.compile import compiled
from scripts.benchmarks.shared.child import Unable, device, repeat
from scripts.benchmarks.shared.rounds import Task

MODULE = "scripts.benchmarks.one_device.pointwise"
ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
COUNTS = (5, 30) if ON_GPU else (2, 20)
"""Warm-up and steps."""


def random(*shape: int) -> Tensor:
    """Values of the type and device that are measured, with a gradient."""
    return torch.randn(shape, device=device(), dtype=DTYPE, requires_grad=True)


def gate(form: str, is_compiled: bool, tokens: int, width: int) -> dict[str, float]:
    """SwiGLU of [tokens, 2 · width], and back."""
    raised = random(tokens, 2 * width)
    by_output = torch.randn(tokens, width, device=device(), dtype=DTYPE)
    function = {"ours": lambda x: activate(x, "swiglu"), "plain": _plain_gate}[form]
    return _forward_and_back(function, is_compiled, raised, by_output)


def _plain_gate(raised: Tensor) -> Tensor:
    first, second = raised.chunk(2, -1)
    return F.silu(first) * second


def rotary(
    form: str, is_compiled: bool, batch: int, length: int, heads: int, size: int
) -> dict[str, float]:
    """Queries, keys and values [batch, length, 3 · heads · size] as attention gets them, and
    back."""
    projected = random(batch, length, 3 * heads * size)
    tables = rotary_tables(torch.arange(length, device=device())[None], size, 10000.0)
    shape = 3, batch, length, heads, size
    by_output = torch.randn(shape, device=device(), dtype=DTYPE)
    turn = {"ours": rotate, "plain": _rotate_slices}[form]

    def function(projected: Tensor) -> tuple[Tensor, ...]:
        query, key, value = (p.unflatten(-1, (heads, size)) for p in projected.chunk(3, -1))
        return turn(query, tables), turn(key, tables), value

    return _forward_and_back(function, is_compiled, projected, by_output.unbind())


def _rotate_slices(heads: Tensor, tables: Rotary) -> Tensor:
    cos, sin = (table[:, :, None] for table in tables)
    first, second = heads.chunk(2, -1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([part.to(heads.dtype) for part in turned], -1)


def _forward_and_back(
    function: Callable[[Tensor], Tensor | tuple[Tensor, ...]],
    is_compiled: bool,
    given: Tensor,
    by_output: Tensor | tuple[Tensor, ...],
) -> dict[str, float]:
    run = compiled(function) if is_compiled else function
    return repeat(lambda: torch.autograd.grad(run(given), given, by_output), *COUNTS)


def product(form: str, tokens: int, rows: int, hidden: int) -> dict[str, float]:
    """The gradient of [rows, hidden] of a chunk of tokens, added to a sum in fp32."""
    total = torch.zeros(rows, hidden, device=device())
    error, states = random(tokens, rows).detach(), random(tokens, hidden).detach()
    if form == "ours":
        if not _adds_products(error.device, DTYPE) and DTYPE is not torch.float32:
            raise Unable("products of this device cannot be added to an fp32 matrix")
        return repeat(lambda: _add_product_(total, error.t(), states), *COUNTS)
    return repeat(lambda: total.add_(error.t() @ states), *COUNTS)


def tasks() -> list[Task]:
    """At the sizes of 1.3B on a GPU, of 10M on a CPU."""
    gates = {"tokens": 16384, "width": 5504} if ON_GPU else {"tokens": 1024, "width": 896}
    turns = dict(zip(("batch", "length"), (8, 2048) if ON_GPU else (4, 256), strict=True))
    turns |= {"heads": 16, "size": 128} if ON_GPU else {"heads": 5, "size": 64}
    products = {"tokens": 1024, "rows": 32000, "hidden": 2048}
    if not ON_GPU:
        products |= {"rows": 4096, "hidden": 320}
    found = [
        Task(
            f"{name}: {' × '.join(map(str, sizes.values()))}",
            form + ", compiled" * is_compiled,
            f"{MODULE}:{name}",
            {"form": form, "is_compiled": is_compiled, **sizes},
        )
        for name, sizes in (("gate", gates), ("rotary", turns))
        for is_compiled in (False, True)
        for form in ("plain", "ours")
    ]
    group = f"product: {products['tokens']} tokens, {products['rows']} × {products['hidden']}"
    return found + [
        Task(group, form, f"{MODULE}:product", {"form": form, **products})
        for form in ("plain", "ours")
    ]
