"""The ledger counts seconds of a device's events, names collectives that hang, and records traces.

That its bytes are those that are sent is tested in `wires/test_wire.py`.
"""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megafrontier.comm import ledger as module
from megafrontier.comm.ledger import Ledger, Trace, Traffic
from megafrontier.partition import Placement, shard
from tests.partition.tiny import TinyModel, backward, batch
from tests.ranks import make_levels, run_ranks


class Event:
    """An event of a device that finishes everything at once, one second after the event before. The
    device has not reached it if `is_over` is False."""

    def __init__(self, **_):
        self.is_over = True

    def record(self):
        pass

    def query(self):
        return self.is_over

    def elapsed_time(self, _other):
        return 1000.0


@pytest.fixture
def ledger(monkeypatch):
    """A ledger of a device."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Ledger, "_is_exposed", lambda _: False)
    return Ledger(["pair", "world"], torch.device("cuda"))


def test_a_loop_that_never_takes_keeps_few_events_and_loses_no_seconds(ledger, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING_EVENTS", 10)
    for _ in range(50):
        with ledger.collective(1, "gather", "weights") as sent:
            sent.append(3)
        with ledger.waiting("gather"):
            pass
        assert len(ledger._events) <= 11
    assert ledger.take() == ([0, 150], [0.0, 50.0])
    assert ledger.take_waited() == 50.0


def test_hidden_seconds_are_those_in_which_the_computation_waited_for_nothing(monkeypatch):
    """On a stream, a collective takes from 1 to 6. The computation waits from 2 to 3, and from 5 to
    7. Then it runs a collective itself."""
    now = 1.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    ledger = Ledger(["pair", "world"], torch.device("cpu"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ledger, "_is_exposed", lambda: False)
        collective = ledger.collective(1, "gather", "activations")
        sent = collective.__enter__()
        now = 2.0
        with ledger.waiting("something else"):
            now = 3.0
        now = 5.0
        with ledger.waiting("activations"):
            now = 6.0
            sent.append(7)
            collective.__exit__(None, None, None)
            now = 7.0
    with ledger.collective(0, "gather", "weights") as sent:
        sent.append(3)
        now = 9.0
    pair, world = ledger.take_kinds()
    assert (pair.pop("weights"), world.pop("activations")) == (Traffic(3, 2, 0), Traffic(7, 5, 3))
    assert {*map(repr, [*pair.values(), *world.values()])} == {repr(Traffic())}
    assert ledger.take_waited() == 5.0


def test_hidden_seconds_on_a_device_come_from_its_events(monkeypatch):
    """The collective takes from 1 to 5. The computation waits from 2 to 3, and since 4."""

    class At(Event):
        times = iter([0.0, 2.0, 3.0, 1.0, 5.0, 4.0, 9.0])

        def __init__(self, **_):
            self.is_over, self.time = True, 0.0

        def record(self, *_):
            self.time = next(At.times)

        def elapsed_time(self, other):
            return (other.time - self.time) * 1000

    monkeypatch.setattr(torch.cuda, "Event", At)
    monkeypatch.setattr(Ledger, "_is_exposed", lambda _: False)
    ledger = Ledger(["world"], torch.device("cuda"))
    with ledger.waiting("gather"):
        pass
    with ledger.collective(0, "gather", "activations"):
        pass
    with ledger.waiting("gather"):
        pass
    ledger._events[-1][-1].is_over = False
    (found,) = ledger.take_kinds()
    assert found["activations"] == Traffic(0, 4.0, 2.0)


def test_a_trace_shows_when_a_device_waited_not_the_host(ledger, tmp_path):
    """The host only enqueues the wait, which takes microseconds."""
    ledger.trace = Trace(ledger.names)
    with ledger.waiting("gather"), ledger.collective(0, "gather", "weights"):
        pass
    ledger.take()
    ledger.trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = {event["tid"]: event for event in events if event["ph"] == "X"}
    assert [bars[row]["name"] for row in (0, 1)] == ["gather"] * 2
    for bar in bars.values():
        assert bar["ts"] == pytest.approx((ledger._began + 1) * 1e6)
        assert bar["dur"] == pytest.approx(1e6)


def test_the_oldest_collective_of_a_device_that_hangs_is_named(ledger):
    """The host has enqueued more since."""
    for level, label, started, over in (
        (0, "gather 0", True, True),
        (0, "gather 1", True, False),
        (0, "gather 2", False, False),
        (1, "reduce 2", False, False),
    ):
        with ledger.collective(level, label, "weights"):
            pass
        *_, start, stop = ledger._events[-1]
        start.is_over, stop.is_over = started, over
    with ledger._lock:  # another thread may hold it, and wait for the device
        assert ledger.last() == {"pair": "gather 1, in flight", "world": "reduce 2, waiting"}


def test_a_trace_has_a_row_per_level_and_names_collectives_and_units(tmp_path):
    levels = make_levels((2, 2))

    def body(hierarchy):
        model = TinyModel(tied=False)
        engine = shard(model, model.units(), Placement.named("zero1", levels), hierarchy)
        engine.ledger.trace = Trace(engine.ledger.names)
        backward(engine, model(batch(0)[:2]), is_last=True)
        engine.finish_gradients()
        engine.publish()
        engine.finish_publishing()
        engine.ledger.trace.write(tmp_path / f"{hierarchy.rank}.json")

    run_ranks((2, 2), body)
    events = json.loads((tmp_path / "3.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert list(rows.values()) == ["waiting", "pair", "world"]
    bars = [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    named = {(row, name) for row, name, _, _ in bars}
    labels = ("finish blocks.1", "publish blocks.1")
    assert {(level, label) for level in levels.names for label in labels} <= named
    assert any(row == "waiting" and duration > 0 for row, _, _, duration in bars)
    collectives = sorted((ts, ts + duration) for row, _, ts, duration in bars if row != "waiting")
    assert all(begin < end for begin, end in collectives)
    # One at a time, except for the rounding of a float of microseconds.
    assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(collectives))
