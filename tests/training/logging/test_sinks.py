"""Metrics come back from every sink as they went in, also after a kill and a resume."""

import json
import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config import Config, save_config
from megafrontier.training.logging import run_log
from megafrontier.training.logging.sinks import (
    FINISH_SECONDS,
    JsonLines,
    MlflowSink,
    TensorboardSink,
    WandbSink,
    add_line,
    open_sinks,
)

STEP = {
    "step": 1,
    "loss": 3.5,
    "mfu": None,
    "skipped": True,
    "comm": {"pair": {"bytes": 4096, "seconds": 0.25}},
}


def wandb_config(mode):
    config = Config()
    config.log.wandb = mode
    return config


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(sink, first, last):
    for step in range(first, last + 1):
        sink.write({"step": step, "loss": float(step)})


def test_every_line_is_readable_as_soon_as_it_is_written_and_what_json_lacks_is_null(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl", 0)
    sink.write(STEP)
    sink.write({"step": 2, "loss": math.nan, "comm": {"pair": {"seconds": math.inf}}})
    null = {"step": 2, "loss": None, "comm": {"pair": {"seconds": None}}}
    assert lines(tmp_path / "metrics.jsonl") == [STEP, null]
    sink.close()


def test_a_resumed_run_drops_the_steps_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, resume_step=0)
    write_steps(first, 1, 9)
    first.write({"step": 6, "valid_loss": 1.0})
    first.close()
    second = JsonLines(path, resume_step=6)
    write_steps(second, 7, 8)
    second.close()
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6, 6, 7, 8]
    superseded = tmp_path / "metrics.superseded.jsonl"
    assert [line["step"] for line in lines(superseded)] == [7, 8, 9]
    assert sorted(tmp_path.iterdir()) == [path, superseded]


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    sink = JsonLines(path, 1)
    write_steps(sink, 2, 2)
    sink.close()
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_a_sink_that_fails_costs_metrics_and_not_the_run(tmp_path, monkeypatch):
    """If W&B's process has ended, its methods raise anything, also at the end."""

    class Gone:
        name = "wandb"

        def write(self, values):
            raise ConnectionResetError(104, "Connection reset by peer")

        def close(self):
            raise RuntimeError("mailbox\nis closed")

    def logged(*values):
        notes = []
        logger = run_log.RunLogger(SimpleNamespace(note=notes.append, update=lambda values: None))
        sinks = [Gone(), JsonLines(tmp_path / "metrics.jsonl", 0)]
        monkeypatch.setattr(run_log, "open_sinks", lambda *_: sinks)
        logger.open_sinks(Config(), 0)
        for line in values:
            logger.write(line)
        logger.close()
        return notes

    failure = "warning: metrics are not written to wandb: "
    assert logged({"step": 1}) == [f"{failure}Connection reset by peer"]
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert logged() == [f"{failure}mailbox is closed"]


@pytest.mark.parametrize("name", ["CommError", "AuthenticationError"])
def test_a_run_trains_though_wandb_cannot_be_reached(tmp_path, monkeypatch, capsys, name):
    """Otherwise a requeued job would end for good. A login that fails is an error."""
    import wandb

    modes = []

    def init(*, mode, **_):
        modes.append(mode)
        if mode == "online":
            raise getattr(wandb.errors, name)("timed out")
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setattr(wandb, "init", init)
    if name == "AuthenticationError":
        with pytest.raises(UserError, match=r"log\.wandb: online, wandb does not start"):
            WandbSink(wandb_config("online"), tmp_path, 0)
    else:
        WandbSink(wandb_config("online"), tmp_path, 0)
        assert modes == ["online", "offline"]
        assert capsys.readouterr().err.startswith("warning: log.wandb: timed out; offline")


def test_a_resumed_run_keeps_its_wandb_id_and_its_end_waits_for_no_network(tmp_path, monkeypatch):
    import wandb

    ids, limits = [], []

    def init(*, id, settings, **_):
        ids.append(id)
        limits.append(settings.finish_timeout)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setattr(wandb, "init", init)
    for resume_step in (0, 500, 0):
        WandbSink(wandb_config("offline"), tmp_path, resume_step)
    assert ids[0] == ids[1]
    assert len({*ids}) == 2
    assert all(ids)
    assert set(limits) == {FINISH_SECONDS}


def test_a_run_goes_to_the_project_and_entity_that_are_named(tmp_path, monkeypatch):
    import wandb

    found = []

    def init(*, entity, project, **_):
        found.append((entity, project))
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setattr(wandb, "init", init)
    for name in ("megafrontier", "pretraining", "our-team/pretraining"):
        config = wandb_config("offline")
        config.log.wandb_project = name
        WandbSink(config, tmp_path, 0)
    assert found == [(None, "megafrontier"), (None, "pretraining"), ("our-team", "pretraining")]


def test_tensorboard_has_nested_metrics_and_forgets_the_steps_that_a_resumed_run_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorboardSink(tmp_path, 0)
    first.write(STEP)
    write_steps(first, 2, 4)
    first.close()
    second = TensorboardSink(tmp_path, resume_step=2)
    write_steps(second, 3, 3)
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    tags = {"loss", "skipped", "comm/pair/bytes", "comm/pair/seconds"}
    assert set(events.Tags()["scalars"]) == tags
    assert [(e.step, e.value) for e in events.Scalars("comm/pair/bytes")] == [(1, 4096.0)]


def test_what_comes_after_a_run_is_added_to_its_sinks_and_a_sink_that_fails_costs_a_warning(
    tmp_path, monkeypatch, capsys, mlflow_calls
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config()
    config.log.tensorboard, config.log.mlflow = True, "http://host"
    save_config(config, tmp_path / "config.yaml")
    for sink in reversed(open_sinks(config, tmp_path, 0)):
        write_steps(sink, 1, 3)
        sink.close()
    kept = lines(tmp_path / "metrics.jsonl")
    mlflow_calls.clear()
    tasks = {"step": 2, "tasks": {"arc": {"acc": 0.5}}}
    log = replace(config.log, wandb="online")
    monkeypatch.setitem(sys.modules, "wandb", None)
    add_line(tmp_path, tasks, log)
    assert lines(tmp_path / "metrics.jsonl") == [*kept, tasks]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("tasks/arc/acc")] == [(2, 0.5)]
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    run = "megafrontier/run"
    assert [call for call in mlflow_calls if call[0] == run] == [(run, {"tasks/arc/acc": (0.5, 2)})]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: step 2 is not written: import of wandb")


@pytest.fixture
def mlflow_calls(monkeypatch):
    """A stand-in for MLflow's client. Gives what it was asked to do."""
    calls = []

    class Client:
        def __init__(self, tracking_uri):
            calls.append(("uri", tracking_uri))

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return name

        def create_run(self, experiment, run_name):
            return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

        def log_batch(self, run, metrics=(), params=(), synchronous=True):
            if metrics:
                assert not synchronous
                calls.append((run, {m.key: (m.value, m.step) for m in metrics}))
            return SimpleNamespace(wait=lambda: calls.append("sent"))

        def set_terminated(self, run):
            calls.append("ended")

    def entity(*names):
        return lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True)))

    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient = Client
    entities.Metric, entities.Param = entity("key", "value", "at", "step"), entity("key", "value")
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return calls


def test_mlflow_gets_every_number_by_its_path_and_a_resumed_run_is_the_same_run(
    tmp_path, mlflow_calls
):
    config = Config()
    config.run.name, config.log.mlflow = "mine", "http://host:5000"
    tasks = {"arc": {"acc,strict": 0.5}}
    for resume_step, line in ((0, STEP), (1, {"step": 2, "tasks": tasks})):
        sink = MlflowSink(config, tmp_path, resume_step)
        sink.write(line)
        sink.close()
        config.run.name = "renamed"
    first, second = (call for call in mlflow_calls if call[0] == "megafrontier/mine")
    assert first[1]["loss"] == (STEP["loss"], STEP["step"])
    assert any(key.startswith("comm/") for key in first[1])
    assert second[1] == {"tasks/arc/acc_strict": (0.5, 2)}
    assert mlflow_calls[-2:] == ["sent", "ended"]


def test_an_mlflow_server_that_cannot_be_used_is_named_in_one_line(
    tmp_path, mlflow_calls, monkeypatch
):
    def refuse(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(sys.modules["mlflow"].MlflowClient, "create_run", refuse)
    config = Config()
    config.log.mlflow = "http://host:5000"
    with pytest.raises(UserError, match=r"^log\.mlflow: http://host:5000, .* no route to host$"):
        MlflowSink(config, tmp_path, 0)
