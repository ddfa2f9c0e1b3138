"""A tensor on its way has what it borrows for itself until its end, and gives it back once."""

import torch

from megafrontier.common.buffers import BufferPool
from megafrontier.partition.comm.streams import AsyncChain


def test_what_was_borrowed_goes_back_once_however_often_its_end_is_waited_for():
    """Given back twice, one buffer would be lent to two at a time."""
    buffer_pool = BufferPool(torch.device("cpu"))
    slot = AsyncChain(torch.zeros(3), "publish blocks.0")
    lent = slot.acquire(buffer_pool, 8, torch.float32)
    for _ in range(3):
        slot.wait()
    first, second = (slot.acquire(buffer_pool, 8, torch.float32) for _ in range(2))
    assert first is lent
    assert first.data_ptr() != second.data_ptr()
    assert buffer_pool.held_bytes == 2 * 8 * 4


def test_what_is_borrowed_is_nobody_elses_before_the_end():
    buffer_pool = BufferPool(torch.device("cpu"))
    slots = [
        AsyncChain(torch.zeros(3), label) for label in ("publish blocks.0", "publish blocks.1")
    ]
    buffers = [slot.acquire(buffer_pool, 8, torch.float32) for slot in slots]
    assert buffers[0].data_ptr() != buffers[1].data_ptr()
    slots[0].wait()
    assert slots[1].acquire(buffer_pool, 8, torch.float32) is buffers[0]
