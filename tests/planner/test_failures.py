"""What `plan --mtbf` says of failures: costs of saves and starts, intervals, expected goodput."""

import json
from dataclasses import replace
from typing import Any

import pytest

from megafrontier.config import Config
from megafrontier.config.schema import SnapshotConfig
from megafrontier.plan.intervals import FailureModel
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner import command
from megafrontier.planner.command import as_dict, plan_command
from megafrontier.planner.failures import (
    Failures,
    LayoutFailures,
    configured_intervals,
    save_costs,
)
from megafrontier.planner.layers import simulate_blocks
from megafrontier.planner.search import CandidateLayout
from megafrontier.training.callbacks.save import checkpoint_bytes
from tests.planner.test_memory import DEVICE, MACHINE, config_of

RANKS = 4


@pytest.fixture(scope="module")
def layout() -> CandidateLayout:
    config = config_of({})
    plan = resolve_plan(config, RANKS)
    return CandidateLayout((), config, plan, simulate_blocks(config, plan))


def with_checkpoint(config: Config, **values: Any) -> Config:
    return replace(config, checkpoint=replace(config.checkpoint, **values))


def test_a_save_costs_what_the_rates_of_the_machine_file_say(layout: CandidateLayout) -> None:
    rates = {
        "host_gigabytes_per_second": 0.5,
        "gigabytes_per_second": 1.25,
        "latency_seconds": 0.25,
    }
    device = {**DEVICE, "host_memory_gigabytes_per_second": 8}
    config = replace(layout.config, machine={**MACHINE, "device": device, "storage": rates})
    total = checkpoint_bytes(config, layout.plan) / 1e9
    for nodes, rate in ((1, 0.5), (2, 1.0), (4, 1.25)):
        storage, local = save_costs(config, layout.plan, nodes)
        copy = total / RANKS / 8
        assert (storage.stall, storage.behind) == pytest.approx((copy + 0.25, total / rate))
    assert (local.stall, local.behind) == pytest.approx((copy, copy + total / RANKS / 1))
    at_once, _ = save_costs(with_checkpoint(config, asynchronous=False), layout.plan, 1)
    assert (at_once.stall, at_once.behind) == pytest.approx((copy + 0.25 + total / 0.5, 0))


def test_the_configured_interval_is_the_one_that_comes_first(layout: CandidateLayout) -> None:
    def every(minutes: float, steps: int) -> float:
        config = with_checkpoint(layout.config, minutes=minutes, every=steps)
        config.train.steps = 1000
        return configured_intervals(config, layout.plan, step_seconds=2.0)[0]

    assert [every(30, 0), every(30, 600), every(0, 600), every(0, 0)] == [1800, 1200, 1200, 2000]


def test_a_start_takes_what_the_run_has_measured(tmp_path) -> None:
    config = Config()
    config.run.directory = str(tmp_path)
    assert Failures.of(config, 48, 1000).start_seconds == 300
    records = [{"reached": 1}, *({"first_step": 1, "start_seconds": s} for s in (40, 90, 45))]
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    failures = Failures.of(config, 48, 1000)
    assert (failures.start_seconds, failures.is_measured) == (45, True)
    assert "one node in 1000 hours" in str(failures)
    assert "the job every 20.8 hours on 48 nodes; a start takes 45 s" in str(failures)


def test_both_kinds_of_save_are_told_in_text_and_json(layout: CandidateLayout) -> None:
    failures = Failures(1.0, 2, 5.0, False)
    found = LayoutFailures.of(layout, failures)
    assert found.with_local.goodput >= found.without_local.goodput >= found.configured > 0
    head, alone, both = found.lines("best layout")
    assert head == f"goodput, best layout: {found.configured:.2%} as configured"
    assert "checkpoint.minutes=" in alone
    assert f"checkpoint.local.every={found.local_steps} " in both
    of = as_dict(layout, failures)["goodput"]
    assert of["configured"] == found.configured
    model = FailureModel(1800, 5.0, found.storage)
    assert of["storage"]["goodput"] == model.goodput(60 * of["storage"]["minutes"])


def test_plan_says_it_of_the_best_and_of_the_configured_layout(
    layout: CandidateLayout, tmp_path, monkeypatch
) -> None:
    other = replace(layout, overrides=("train.micro_batch=4",))
    path = tmp_path / "config.yaml"
    path.write_text("model: {}\n")
    monkeypatch.setattr(command, "search", lambda *_, **__: [other, layout])
    monkeypatch.setattr(command, "load_config", lambda *_: layout.config)
    monkeypatch.setattr(command, "check_layout", lambda *_: None)
    monkeypatch.setattr(command, "warn_of_files", lambda *_, **__: [])
    lines = plan_command(str(path), [], 2, mtbf=500).splitlines()
    assert [line for line in lines if line.startswith("goodput, ")] == [
        line for line in lines if "layout: " in line
    ]
    assert sum("checkpoint.minutes=" in line for line in lines) == 4
    found = json.loads(plan_command(str(path), [], 2, as_json=True, mtbf=500))
    assert found["failures"]["job_mtbf_seconds"] == 500 * 3600 / 2
    assert all("goodput" in plan for plan in found["plans"])
    without = json.loads(plan_command(str(path), [], 2, as_json=True))
    assert "failures" not in without


def test_local_snapshots_that_are_configured_count(layout: CandidateLayout) -> None:
    config = with_checkpoint(layout.config, local=SnapshotConfig(every=10))
    assert configured_intervals(config, layout.plan, 2.0)[1] == 20.0
    assert configured_intervals(layout.config, layout.plan, 2.0)[1] is None
