"""Block inputs wait on the host: only they, each once, the next on its way while one is used.

The copies themselves need a GPU; here they are clones, and what is asked of them is written down.
"""

from weakref import ref

import pytest
import torch

from megafrontier.common.buffers import BufferPool
from megafrontier.model.recompute import compile, offload


class Clones:
    """Stands in for `offload.Copies`; `asked` has (what, its number) in order."""

    asked: list[tuple[str, int]] = []
    given: list[int] = []

    def __init__(self, device):
        self.asked.clear()
        self.given.clear()
        self.numbers = {}
        self.buffer_pool = BufferPool(device)

    def note(self, what, tensor):
        number = self.numbers.setdefault(tensor.sum().item(), len(self.numbers))
        self.asked.append((what, number))

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
        self.given.append(host.data_ptr())
        self.buffer_pool.release(host.view(-1))


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def is_compiled(request, monkeypatch):
    monkeypatch.setattr(offload, "Copies", Clones)
    monkeypatch.setattr(offload, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    return request.param


def test_inputs_come_back_one_ahead_in_reverse_and_give_the_same_gradients(
    is_compiled, make_config, make_model, tokens
):
    config = make_config(layers=3, position="rotary")
    plain = make_model(config)
    plain(tokens, tokens).backward()
    parking = make_model(config, checkpointing="offload", compile_blocks=is_compiled)
    for _ in range(2):  # the second micro-batch fetches nothing of the first
        parking.zero_grad()
        Clones.asked.clear()
        parking(tokens, tokens).backward()
        assert Clones.asked == [
            ("out", 0), ("out", 1), ("out", 2),
            ("back", 2), ("use", 2), ("back", 1),
            ("use", 1), ("back", 0),
            ("use", 0),
        ]  # fmt: skip
    for ours, theirs in zip(parking.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


def test_without_a_backward_nothing_is_parked(is_compiled, make_config, make_model, tokens):
    model = make_model(make_config(), checkpointing="offload", compile_blocks=is_compiled)
    Clones.asked.clear()
    with torch.no_grad():
        model(tokens, tokens)
    assert Clones.asked == []


def test_each_micro_batch_takes_the_host_memory_of_the_one_before(
    is_compiled, make_config, make_model, tokens
):
    """A host that is micro-batches ahead would fill it."""
    model = make_model(make_config(layers=3), checkpointing="offload", compile_blocks=is_compiled)
    for _ in range(3):
        model(tokens, tokens).backward()
    assert len(Clones.given) == 9
    assert len(set(Clones.given)) == 3


def test_a_copy_on_its_way_is_waited_for_where_nobody_wants_it_any_more():
    """Its memory would be another's while it is written."""
    copies = Clones(torch.device("cpu"))
    first = offload.Offloaded(copies.to_host(torch.full((2,), 1.0)), copies, None)
    second = offload.Offloaded(copies.to_host(torch.full((2,), 2.0)), copies, ref(first))
    second.fetch()
    assert Clones.asked[-1] == ("back", 0)
    del first
    assert Clones.asked[-1] == ("use", 0)
