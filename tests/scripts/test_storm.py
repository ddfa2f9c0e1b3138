"""The storm of kills reads its figures from the run's own files."""

import json
from datetime import UTC, datetime

import pytest

from megafrontier.training.goodput import read_goodput
from scripts.benchmarks.planning.storm import predict, report


def at(second, **values):
    return {"at": datetime.fromtimestamp(second, UTC).isoformat(), **values}


def make_run(directory, losses):
    """Steps of a second, a save of half a second every 10 steps, and starts of 3 s after failures
    that lose 4 steps."""
    records, lines, now, step = [], [], 1e6, 0
    for number in range(losses + 1):
        finished = {"finished": now - 1} if number else {}
        records.append(at(now, reached=step, launched=now, job="a", restarts=[0], **finished))
        now += 2
        records.append(at(now + 1, first_step=step + 1, step_seconds=1.0, start_seconds=3.0))
        for _ in range(24 if number < losses else 20):
            step += 1
            saves = 0.5 * (step % 10 == 1)
            now += 1 + saves
            lines.append(at(now, step=step, step_seconds=1.0, between_seconds={"saves": saves}))
        if number < losses:
            step -= 4
            del lines[-4:]
            now += 1
            records.append(at(now, ended=70))
    records += [at(now, between_seconds={}), at(now, ended=75)]
    for name, rows in (("attempts.jsonl", records), ("metrics.jsonl", lines)):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_formula_gets_the_means_that_the_run_has_measured(tmp_path):
    make_run(tmp_path, losses=5)
    found = read_goodput(tmp_path)
    model, interval = predict(tmp_path, found, every=10, kills=5)
    assert interval == pytest.approx(10)
    assert model.storage.stall == pytest.approx(0.5, rel=0.1)
    assert model.start == pytest.approx(3, abs=0.3)
    assert "measured: goodput" in report(tmp_path, 10, 5)
