"""The timeline of a run says where it ends before the run does."""

import json
from types import SimpleNamespace

import torch

from megafrontier.config import Config
from megafrontier.partition.comm import trace
from megafrontier.partition.comm.ledger import Ledger
from megafrontier.training.callbacks.trace import TraceWriter


def test_bars_that_a_trace_has_no_room_for_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "LARGEST", 3)
    config, said = Config(), []
    config.run.directory, config.log.trace = str(tmp_path), True
    engine = SimpleNamespace(
        ledger=Ledger(["world"], torch.device("cpu")), finish_publishing=lambda: None
    )
    trainer = SimpleNamespace(config=config, is_first=True, engine=engine)
    for bars in (3, 5):
        timeline = TraceWriter(trainer, SimpleNamespace(info=said.append))
        for _ in range(bars):
            engine.ledger.trace.add("world", "gather", 0.0, 1.0)
        timeline.at_end(trainer)
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == 3
    assert said == [f"{tmp_path}/trace.json ends before the run: 2 bars too many"]
