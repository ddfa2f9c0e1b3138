"""The timeline of a run says if it ends before the run does."""

import json
from types import SimpleNamespace

import torch

from megafrontier.config import Config
from megafrontier.partition.comm import ledger
from megafrontier.partition.comm.ledger import Ledger
from megafrontier.training.callbacks.log import TraceWriter


def test_events_that_a_trace_has_no_room_for_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "MAX_TRACE_EVENTS", 3)
    config, lines = Config(), []
    config.run.directory, config.log.trace = str(tmp_path), True
    engine = SimpleNamespace(
        ledger=Ledger(["world"], torch.device("cpu")), finish_publishing=lambda: None
    )
    run_logger = SimpleNamespace(info=lines.append)
    trainer = SimpleNamespace(config=config, is_first=True, engine=engine, run_logger=run_logger)
    for events in (3, 5):
        writer = TraceWriter(trainer)
        for _ in range(events):
            engine.ledger.trace.add("world", "gather", 0.0, 1.0)
        writer.at_end(trainer)
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == 3
    assert lines == [f"{tmp_path}/trace.json ends before the run: 2 events left out"]
