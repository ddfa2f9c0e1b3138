"""Block inputs are offloaded once each, and fetched one ahead in reverse order.

The copies need a GPU. Here they are clones, and the calls are recorded.
"""

from weakref import ref

import pytest
import torch

from megafrontier.common.buffers import BufferPool
from megafrontier.model.recompute import compile, offload


class Clones:
    """Replaces `offload.Copies`. `calls` has (operation, number of the tensor)."""

    calls: list[tuple[str, int]] = []
    released: list[int] = []

    def __init__(self, device):
        self.calls.clear()
        self.released.clear()
        self.numbers = {}
        self.buffer_pool = BufferPool(device)

    def note(self, what, tensor):
        number = self.numbers.setdefault(tensor.sum().item(), len(self.numbers))
        self.calls.append((what, number))

    def to_host(self, tensor):
        self.note("out", tensor)
        return (
            self.buffer_pool.acquire(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)
        )

    def to_device(self, host):
        self.note("back", host)
        return host.clone()

    def finish(self, tensor):
        self.note("use", tensor)

    def release(self, host):
        self.released.append(host.data_ptr())
        self.buffer_pool.release(host.view(-1))


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def is_compiled(request, monkeypatch):
    monkeypatch.setattr(offload, "Copies", Clones)
    monkeypatch.setattr(offload, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    return request.param


def test_inputs_are_fetched_one_ahead_in_reverse_and_give_the_same_gradients(
    is_compiled, make_config, make_model, tokens
):
    config = make_config(layers=3, position="rotary")
    plain = make_model(config)
    plain(tokens, tokens).backward()
    offloading = make_model(config, checkpointing="offload", compile_blocks=is_compiled)
    for _ in range(2):  # the second micro-batch fetches nothing of the first
        offloading.zero_grad()
        Clones.calls.clear()
        offloading(tokens, tokens).backward()
        assert Clones.calls == [
            ("out", 0), ("out", 1), ("out", 2),
            ("back", 2), ("use", 2), ("back", 1),
            ("use", 1), ("back", 0),
            ("use", 0),
        ]  # fmt: skip
    for ours, theirs in zip(offloading.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


def test_without_a_backward_nothing_is_offloaded(is_compiled, make_config, make_model, tokens):
    model = make_model(make_config(), checkpointing="offload", compile_blocks=is_compiled)
    Clones.calls.clear()
    with torch.no_grad():
        model(tokens, tokens)
    assert Clones.calls == []


def test_each_micro_batch_reuses_the_host_memory_of_the_one_before(
    is_compiled, make_config, make_model, tokens
):
    """Otherwise a host that runs micro-batches ahead would run out of memory."""
    model = make_model(make_config(layers=3), checkpointing="offload", compile_blocks=is_compiled)
    for _ in range(3):
        model(tokens, tokens).backward()
    assert len(Clones.released) == 9
    assert len(set(Clones.released)) == 3


def test_a_copy_in_flight_is_waited_for_even_if_its_graph_is_dropped():
    """Otherwise its memory could be reused while it is written."""
    copies = Clones(torch.device("cpu"))
    first = offload.Offloaded(copies.to_host(torch.full((2,), 1.0)), copies, None)
    second = offload.Offloaded(copies.to_host(torch.full((2,), 2.0)), copies, ref(first))
    second.fetch()
    assert Clones.calls[-1] == ("back", 0)
    del first
    assert Clones.calls[-1] == ("use", 0)
