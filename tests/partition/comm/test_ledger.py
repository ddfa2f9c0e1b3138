"""What a device's events are counted as, and how many of them are kept."""

import json

import pytest
import torch

from megafrontier.partition.comm import ledger as module
from megafrontier.partition.comm.ledger import Ledger, Trace


class Event:
    """As of a device that is done with everything at once, a second after the event before; or of
    one that does not get on, where `is_over` is set to False."""

    def __init__(self, **_):
        self.is_over = True

    def record(self):
        pass

    def query(self):
        return self.is_over

    def elapsed_time(self, _other):
        return 1000.0


def test_a_loop_that_never_takes_keeps_few_events_and_loses_no_seconds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Ledger, "_is_exposed", lambda _: False)
    monkeypatch.setattr(module, "MAX_PENDING_EVENTS", 10)
    ledger = Ledger(["pair", "world"], torch.device("cuda"))
    for _ in range(50):
        with ledger.collective(1, "gather") as sent:
            sent.append(3)
        with ledger.waiting("gather"):
            pass
        assert len(ledger._events) <= 11
    assert ledger.take() == ([0, 150], [0.0, 50.0])
    assert ledger.take_waited() == 50.0


def test_a_trace_shows_a_devices_waits_where_the_device_stood_still(monkeypatch, tmp_path):
    """And not where the host handed it the wait, in microseconds."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Ledger, "_is_exposed", lambda _: False)
    ledger = Ledger(["pair"], torch.device("cuda"))
    ledger.trace = Trace(ledger.names)
    with ledger.waiting("gather"), ledger.collective(0, "gather"):
        pass
    ledger.take()
    ledger.take_waited()
    ledger.trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = {event["tid"]: event for event in events if event["ph"] == "X"}
    assert [bars[row]["name"] for row in (0, 1)] == ["gather"] * 2
    for bar in bars.values():
        assert bar["ts"] == pytest.approx((ledger._began + 1) * 1e6)
        assert bar["dur"] == pytest.approx(1e6)


def test_of_a_device_that_does_not_get_on_the_oldest_crossing_is_named(monkeypatch):
    """The host has given it more since, or waits to give it another."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Ledger, "_is_exposed", lambda _: False)
    ledger = Ledger(["pair", "world"], torch.device("cuda"))
    for level, label, begun, over in (
        (0, "gather 0", True, True),
        (0, "gather 1", True, False),
        (0, "gather 2", False, False),
        (1, "reduce 2", False, False),
    ):
        with ledger.collective(level, label):
            pass
        *_, start, stop = ledger._events[-1]
        start.is_over, stop.is_over = begun, over
    with ledger._lock:  # another thread may hold it, and wait for the device
        assert ledger.last() == {"pair": "gather 1, in flight", "world": "reduce 2, waiting"}
