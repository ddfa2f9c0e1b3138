"""What a run computes with: its attention kernel, and whether its blocks are compiled."""

import os
from collections.abc import Iterator

from megafrontier.common.errors import as_fatal_error
from megafrontier.common.files import try_room
from megafrontier.config import Config
from megafrontier.model.kernels.backends import attention_backend, uncompilable_attention
from megafrontier.model.recompute.compile import missing_compiler
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition.wires.block import BlockCodec, missing_kernels
from megafrontier.partition.wires.wire import DTYPES, Wires

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_TRIAL_BYTES = 2**20


def check_caches(config: Config) -> None:
    """Raises UserError, or StorageFailed, where compilers cannot write into the folders that their
    variables name, as a job's do: another user's, say. They would find out in the first step."""
    named = {name: os.environ.get(name) for name in _CACHES} if config.train.compile else {}
    for name, folder in named.items():
        if not folder:
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            try_room(folder, _TRIAL_BYTES)
        except OSError as error:
            need = "need a folder to write, or train.compile=false"
            raise as_fatal_error(error, f"{name}: {folder}: {error.strerror}, {need}") from error


def uncompiled_because(config: Config, hierarchy: Hierarchy) -> str | None:
    """What some rank lacks to compile the blocks as asked, the same on every rank; else None."""
    if not config.train.compile:
        return None
    device, dtype = hierarchy.device, DTYPES[config.train.precision]
    gap = missing_compiler(device) or uncompilable_attention(
        config.model, device, dtype, config.data.document_mask
    )
    return hierarchy.first_error(gap)


def describe_kernels(config: Config, hierarchy: Hierarchy, wires: Wires) -> Iterator[str]:
    """One line about the kernels, after warnings where there are others than asked for."""
    codecs = {w.codec for w in (*wires.gather, *wires.reduce) if isinstance(w.codec, BlockCodec)}
    plain = missing_kernels(hierarchy.device.type, codecs)
    if (plain := hierarchy.first_error(plain)) is not None:
        yield f"warning: partition.wires: {plain}; encoded by plain torch, which takes longer"
    gap = uncompiled_because(config, hierarchy)
    if gap is not None:
        yield f"warning: train.compile: {gap}; the blocks run uncompiled"
    dtype = DTYPES[config.train.precision]
    documents = config.data.document_mask
    attention = attention_backend(config.model, hierarchy.device, dtype, documents)
    is_compiled = config.train.compile and gap is None
    yield f"attention: {attention}; blocks: {'compiled' if is_compiled else 'not compiled'}"
