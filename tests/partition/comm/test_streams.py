"""CommStreams run what they are given in order, and end with their engine."""

import gc
import threading
import weakref

import pytest
import torch

from megafrontier.parallel.hierarchy import CommArbiter
from megafrontier.partition.comm import streams as streams_module
from megafrontier.partition.comm.streams import DONE, CommStreams, DeviceStream
from tests.partition.tiny import batch, place
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_a_lane_runs_tasks_in_order_and_after_what_they_wait_for():
    streams = CommStreams("full", 2, CPU, CommArbiter())
    gate, seen = threading.Event(), []
    first = streams.run(0, lambda: (gate.wait(), seen.append("gate")), DONE)
    second = streams.run(1, lambda: seen.append("after the gate"), first)
    third = streams.run(0, lambda: seen.append("same lane"), DONE)
    last = streams.run(1, lambda: seen.append("last"), DONE)
    assert seen == []
    gate.set()
    second.wait()
    last.wait()
    third.wait()
    assert seen[0] == "gate"
    assert seen.index("after the gate") < seen.index("last")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("policy", ["safe", "full"])
def test_a_streams_task_comes_after_the_computation_before_it_and_before_that_after_it(policy):
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


@pytest.mark.parametrize("policy", ["none", "safe", "full"])
def test_two_engines_do_not_mix_their_collectives(policy):
    """They use the same process groups; a teacher and a student, say."""
    turn = CommArbiter()
    one, other = CommStreams("full", 2, CPU, turn), CommStreams(policy, 2, CPU, turn)
    gate, seen = threading.Event(), []
    for number in (0, 1):
        one.run(number, lambda: (gate.wait(10), seen.append("one")), DONE)
    threading.Timer(0.05, gate.set).start()
    other.run(0, lambda: seen.append("other"), DONE)
    other.drain()
    assert seen == ["one", "one", "other"]


@pytest.mark.parametrize("policy", ["safe", "full"])
def test_after_an_error_a_lane_issues_nothing_more(policy):
    streams = CommStreams(policy, 1, CPU, CommArbiter())
    seen = []
    broken = streams.run(0, lambda: 1 / 0, DONE)
    later = streams.run(0, lambda: seen.append("issued"), DONE)
    for handle in (broken, later):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    assert seen == []


def test_an_engine_that_is_dropped_with_its_model_is_freed_and_its_threads_end():
    """A notebook or a sweep builds one after another in one process."""

    def body(hierarchy):
        def build_and_drop():
            model, engine = place(hierarchy, "topo", overlap="full")
            engine.backward(model(batch(0)[:2]))
            engine.finish_gradients()
            return weakref.ref(engine), weakref.ref(model)

        known = set(threading.enumerate())
        dropped = build_and_drop()
        streams = set(threading.enumerate()) - known
        build_and_drop()  # whoever used the groups last is known until the next comes
        gc.collect()
        for thread in streams:
            thread.join(10)
        left = [reference() for reference in dropped]
        return len(streams), any(thread.is_alive() for thread in streams), left

    assert run_ranks((2, 2, 2), body) == [(3, False, [None, None])] * 8


def test_a_device_is_done_with_an_engines_memory_before_that_goes(monkeypatch):
    """Of an engine that is dropped with its model while its publication is on its way."""
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
        """Goes with the unit that it is part of."""

        def __del__(self):
            seen.append("memory")

    monkeypatch.setattr(streams_module, "_make_stream", Stream)

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap="full")
        engine.units[0].memory = Memory()
        engine.publish()
        seen.clear()
        del engine, model
        gc.collect()
        return seen

    # The lane of the pair has nothing to publish.
    for waited in run_ranks((2, 2, 2), body):
        assert sorted(waited[:2]) == ["level-1", "level-2"]
        assert waited[2:] == ["memory"]


def test_safe_has_one_lane_and_full_one_a_level():
    def lane_count(policy):
        streams = CommStreams(policy, 3, CPU, CommArbiter())
        threads = set()

        def note():
            threads.add(threading.get_ident())

        handles = [streams.run(streams.index(level), note, DONE) for level in range(3)]
        for handle in handles:
            handle.wait()
        return len(threads), threading.get_ident() in threads

    assert lane_count("none") == (1, True)
    assert lane_count("safe") == (1, False)
    assert lane_count("full") == (3, False)
