"""What a device's events are counted as, and how many of them are kept."""

import torch

from megafrontier.partition import ledger as module
from megafrontier.partition.ledger import Ledger


class Event:
    """As of a device that is done with everything at once, a second after the event before; or of
    one that does not get on, from where `is_over` is False."""

    is_over = True

    def __init__(self, **_):
        self.is_over = Event.is_over

    def record(self):
        pass

    def query(self):
        return self.is_over

    def elapsed_time(self, _other):
        return 1000.0


def test_a_loop_that_never_takes_keeps_few_events_and_loses_no_seconds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Ledger, "_is_exposed", lambda _: False)
    monkeypatch.setattr(module, "MOST_EVENTS", 10)
    ledger = Ledger(["pair", "world"], torch.device("cuda"))
    for _ in range(50):
        with ledger.crossing(1, "gather") as sent:
            sent.append(3)
        with ledger.waiting("gather"):
            pass
        assert len(ledger._events) + len(ledger._waits) <= 11
    assert ledger.take() == ([0, 150], [0.0, 50.0])
    assert ledger.take_waited() == 50.0


def test_of_a_device_that_does_not_get_on_the_oldest_crossing_is_named(monkeypatch):
    """The host has given it more since, or waits to give it another."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Ledger, "_is_exposed", lambda _: False)
    ledger = Ledger(["pair", "world"], torch.device("cuda"))
    for label, is_over in (("gather 0", True), ("gather 1", False), ("gather 2", False)):
        monkeypatch.setattr(Event, "is_over", is_over)
        with ledger.crossing(0, label):
            pass
    with ledger._lock:  # another thread may hold it, and wait for the device
        assert ledger.last() == {"pair": "gather 1, in flight", "world": "none, done"}
