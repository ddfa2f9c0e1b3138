"""A trace tells when each level was crossed and when the computation waited."""

import json
from itertools import pairwise

from megafrontier.partition import Placement, shard
from megafrontier.partition.comm.ledger import Trace
from tests.partition.tiny import LEVELS, TinyModel, batch
from tests.ranks import run_ranks


def test_a_trace_has_a_row_a_level_and_names_moves_and_units(tmp_path):
    def body(hierarchy):
        model = TinyModel(tied=False)
        engine = shard(model, model.units(), Placement.named("topo", LEVELS), hierarchy)
        engine.ledger.trace = Trace(engine.ledger.names)
        engine.backward(model(batch(0)[:2]), is_last=True)
        engine.finish_gradients()
        engine.publish()
        engine.finish_publishing()
        engine.ledger.trace.write(tmp_path / f"{hierarchy.rank}.json")

    run_ranks((2, 2, 2), body)
    events = json.loads((tmp_path / "3.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    bars = {(rows[e["tid"]], e["name"]) for e in events if e["ph"] == "X"}
    assert list(rows.values()) == ["waiting", "pair", "node", "world"]
    assert ("pair", "gather blocks.1") in bars
    assert ("node", "reduce blocks.1") in bars
    assert ("world", "finish blocks.1") in bars
    assert ("world", "publish blocks.1") in bars
    assert not any(label.startswith("place") for _, label in bars)
    timed = [e for e in events if e["ph"] == "X"]
    assert any(rows[e["tid"]] == "waiting" and e["dur"] > 0 for e in timed)
    crossings = sorted((e["ts"], e["ts"] + e["dur"]) for e in timed if rows[e["tid"]] != "waiting")
    assert all(begin < end for begin, end in crossings)
    # One at a time, but for the rounding of a float of microseconds.
    assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(crossings))
