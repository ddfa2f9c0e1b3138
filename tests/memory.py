"""Bytes of the tensors that are alive."""

import gc

import torch


def tensor_bytes() -> int:
    """Bytes of the distinct storages of all tensors alive in this process: those in cycles too,
    unless `gc.collect` was called before."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
