"""What a device's events are counted as, and how many of them are kept."""

import torch

from megafrontier.partition import ledger as module
from megafrontier.partition.ledger import Ledger


class Event:
    """As of a device that is done with everything at once, a second after the event before."""

    def __init__(self, **_):
        pass

    def record(self):
        pass

    def query(self):
        return True

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
