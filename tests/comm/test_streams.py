"""Comm streams run tasks in order, engines take turns, and buffers are kept until a chain's end."""

import gc
import threading
import weakref

import pytest
import torch

from megafrontier.comm import streams as streams_module
from megafrontier.comm.streams import DONE, AsyncChain, CommStreams, DeviceStream
from megafrontier.common.buffers import BufferPool
from megafrontier.parallel.hierarchy import CommArbiter
from tests.partition.tiny import backward, batch, place
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_a_stream_runs_tasks_in_order_and_after_the_tasks_they_wait_for():
    streams = CommStreams("full", 2, CPU, CommArbiter())
    gate, seen = threading.Event(), []
    first = streams.run(0, lambda: (gate.wait(), seen.append("gate")), DONE)
    second = streams.run(1, lambda: seen.append("after the gate"), first)
    third = streams.run(0, lambda: seen.append("same stream"), DONE)
    last = streams.run(1, lambda: seen.append("last"), DONE)
    assert seen == []
    gate.set()
    for work in (second, last, third):
        work.wait()
    assert seen[0] == "gate"
    assert seen.index("after the gate") < seen.index("last")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("policy", ["safe", "full"])
def test_a_device_task_runs_after_earlier_and_before_later_computation(policy):
    device = torch.device("cuda", 0)
    streams = CommStreams(policy, 2, device, CommArbiter())
    slow, x, y = (torch.zeros(4096, 4096, device=device) for _ in range(3))
    for value in (1.0, 2.0):
        for _ in range(20):
            torch.mm(slow, slow, out=y)
        x.fill_(value)
        first = streams.run(streams.index(0), lambda: y.copy_(x), DONE)
        second = streams.run(streams.index(1), lambda: y.add_(x), first)
        second.wait()
        x.zero_()
        assert y.sum().item() == 2 * value * y.numel()


@pytest.mark.parametrize(("policy", "threads"), [("none", 0), ("safe", 1), ("full", 3)])
def test_safe_has_one_stream_and_full_one_per_level(policy, threads):
    streams = CommStreams(policy, 3, CPU, CommArbiter())
    seen = set()
    for level in range(3):
        streams.run(streams.index(level), lambda: seen.add(threading.get_ident()), DONE)
    streams.drain()
    assert len(seen - {threading.get_ident()}) == threads


@pytest.mark.parametrize("policy", ["none", "safe", "full"])
def test_engines_that_share_process_groups_do_not_mix_their_collectives(policy):
    """Such as a teacher and a student."""
    arbiter = CommArbiter()
    one, other = CommStreams("full", 2, CPU, arbiter), CommStreams(policy, 2, CPU, arbiter)
    gate, seen = threading.Event(), []
    for index in (0, 1):
        one.run(index, lambda: (gate.wait(10), seen.append("one")), DONE)
    threading.Timer(0.05, gate.set).start()
    other.run(0, lambda: seen.append("other"), DONE)
    other.drain()
    assert seen == ["one", "one", "other"]


def test_a_stream_runs_nothing_after_an_error():
    streams = CommStreams("safe", 1, CPU, CommArbiter())
    seen = []
    broken = streams.run(0, lambda: 1 / 0, DONE)
    later = streams.run(0, lambda: seen.append("run"), DONE)
    for work in (broken, later):
        with pytest.raises(ZeroDivisionError):
            work.wait()
    assert seen == []


def test_an_engine_is_freed_with_its_model_and_its_threads_end():
    """A notebook or a sweep builds several in one process."""

    def body(hierarchy):
        def build_and_drop():
            model, engine = place(hierarchy, "topo", overlap="full")
            backward(engine, model(batch(0)[:2]))
            engine.finish_gradients()
            return weakref.ref(engine), weakref.ref(model)

        known = set(threading.enumerate())
        dropped = build_and_drop()
        threads = set(threading.enumerate()) - known
        build_and_drop()  # the arbiter keeps the last user of the groups until the next one comes
        gc.collect()
        for thread in threads:
            thread.join(10)
        left = [reference() for reference in dropped]
        return len(threads), any(thread.is_alive() for thread in threads), left

    assert run_ranks((2, 2), body) == [(2, False, [None, None])] * 4


def test_device_streams_are_drained_before_an_engines_memory_is_freed(monkeypatch):
    """Even if the engine is dropped with its model while a publication is in flight."""
    seen = []

    class Stream(DeviceStream):
        def __init__(self, name, _device):
            self._name = name

        def run(self, task, after):
            task()
            return self

        def wait(self):
            seen.append(self._name)

    class Memory:
        """Freed with the unit that holds it."""

        def __del__(self):
            seen.append("memory")

    monkeypatch.setattr(streams_module, "make_stream", Stream)

    def body(hierarchy):
        model, engine = place(hierarchy, "zero1", overlap="full")
        engine.units[0].memory = Memory()
        engine.publish()
        seen.clear()
        del engine, model
        gc.collect()
        return seen

    for waited in run_ranks((2, 2), body):
        assert sorted(waited[:2]) == ["level-0", "level-1"]
        assert waited[2:] == ["memory"]


def test_a_chain_releases_its_buffers_once_and_not_before_its_end():
    """If a buffer were released twice, two chains would use it at a time."""
    pool = BufferPool(CPU)
    chains = [AsyncChain(torch.zeros(3), label) for label in ("publish blocks.0", "publish head")]
    first, second = (chain.acquire(pool, 8, torch.float32) for chain in chains)
    assert first.data_ptr() != second.data_ptr()
    for _ in range(3):
        chains[0].wait()
    again, new = (chains[0].acquire(pool, 8, torch.float32) for _ in range(2))
    assert again is first
    assert new.data_ptr() not in (first.data_ptr(), second.data_ptr())
    assert pool.held_bytes == 3 * 8 * 4
