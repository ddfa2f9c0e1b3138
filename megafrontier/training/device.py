"""What a run computes with: its attention kernel, compiled blocks, and the device's memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megafrontier.comm.wires.registry import DTYPES, missing_kernels
from megafrontier.common.errors import RunFailed
from megafrontier.config import Config
from megafrontier.model.attention.base import Computed
from megafrontier.model.attention.kinds import kinds_of
from megafrontier.model.gpt import GPT
from megafrontier.model.kernels.float8 import MULTIPLE, linear_layers, missing_float8
from megafrontier.model.moe.experts import expert_sizes
from megafrontier.model.moe.products import describe_product
from megafrontier.model.recompute.compile import missing_compiler
from megafrontier.parallel.world import World
from megafrontier.training.plan import RunPlan

# Errors without a type of their own: of the CPU allocator; of the driver, for page-locked memory
# and the buffers of NCCL or RCCL; of cuBLAS and similar libraries.
_OUT_OF_MEMORY_TEXTS = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED")


def reason_not_compiled(config: Config, world: World) -> str | None:
    """What the first rank that cannot compile the blocks lacks, the same on every rank; None if
    all ranks can, or train.compile is off."""
    if not config.train.compile:
        return None
    computed = _computed(config, world, config.parallel.context != 1)
    reasons = [missing_compiler(world.device)]
    reasons += [k.uncompilable(config.model, computed) for k in kinds_of(config.model).values()]
    return world.first_error(next(filter(None, reasons), None))


def _computed(config: Config, world: World, is_cut: bool) -> Computed:
    """`is_cut`: whether a rank has parts of sequences."""
    return Computed(world.device, DTYPES[config.train.precision], config.data.document_mask, is_cut)


def reason_not_float8(world: World) -> str | None:
    """What the first rank whose device cannot multiply in float8 lacks, the same on every rank;
    None if all can."""
    return world.first_error(missing_float8(world.device))


def describe_kernels(config: Config, world: World, plan: RunPlan, model: GPT) -> Iterator[str]:
    """One line about the kernels, after warnings if they are not the requested ones. `model`: this
    rank's part."""
    wires = (plan.wires, plan.experts.wires)
    codecs = {wire.codec for own in wires for wire in (*own.gather, *own.reduce)}
    missing = world.first_error(missing_kernels(world.device.type, codecs))
    if missing is not None:
        yield f"warning: partition.wires: {missing}; encoded by plain torch, which takes longer"
    reason = reason_not_compiled(config, world)
    if reason is not None:
        yield f"warning: train.compile: {reason}; the blocks run uncompiled"
    if config.train.cuda_graphs and world.device.type == "cpu":
        yield "warning: train.cuda_graphs: true, but a CPU has none; blocks run as before"
    dtype = DTYPES[config.train.precision]
    computed = _computed(config, world, plan.shape.splits.context > 1)
    kinds = kinds_of(config.model).values()
    attention = ", ".join(kind.kernel(config.model, computed) for kind in kinds)
    is_compiled = config.train.compile and reason is None
    yield f"attention: {attention}; blocks: {'compiled' if is_compiled else 'not compiled'}"
    if config.train.linear_precision is not None:
        yield _describe_float8(reason_not_float8(world), model)
    if config.model.moe is not None:
        sizes = expert_sizes(config.model, config.model.moe)
        yield f"experts: {describe_product(world.device, dtype, sizes)}"


def _describe_float8(reason: str | None, model: GPT) -> str:
    if reason is not None:
        return f"warning: train.linear_precision: fp8: {reason}; linear layers multiply in bf16"
    layers = linear_layers(model.trained_blocks())
    used = [layer for layer in layers if getattr(layer, "float8", None) is not None]
    others = len(layers) - len(used)
    rest = f" ({others} in bf16, with sizes that are no multiples of {MULTIPLE})" if others else ""
    return f"linear layers: {len(used)} in fp8{rest}; MFU is of the 16-bit peak"


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
