"""A user's own callback is named in the configuration, called around each step and restored."""

import json
import sys

import pytest

from megafrontier.cli import main
from tests import runs

MODULE = '''
import torch
from megafrontier.training.callbacks.base import Callback


class Norms(Callback):
    """Records metrics, changes a gradient, and counts its steps."""

    def __init__(self):
        self.steps, self.calls = 0, []

    def at_start(self, trainer):
        self.calls.append(f"start after {self.steps}")

    def before_step(self, trainer):
        trainer.metrics.record("rank", trainer.mesh.rank, "max")

    def before_optimizer(self, trainer, gradients):
        gradients[-1].zero_()
        largest = torch.stack([gradient.abs().max() for gradient in gradients])
        trainer.metrics.record("largest", largest, "max")

    def after_step(self, trainer, result):
        self.steps += 1
        self.calls.append(result.metrics["rank"])

    def on_checkpoint_saved(self, trainer, path):
        self.calls.append(path.name)

    def at_end(self, trainer):
        self.calls.append("end")
        trainer.run_logger.info(f"calls: {self.calls}")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


class Fails(Callback):
    priority = 1

    def after_step(self, trainer, result):
        raise ValueError("no more")

    def on_error(self, trainer, error):
        trainer.run_logger.info(f"on_error: {error}")
        raise KeyError("a second error")
'''


@pytest.fixture
def own_callbacks(tmp_path, monkeypatch):
    """A module of the user's."""
    (tmp_path / "own_callbacks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_callbacks", None)


def test_a_users_callback_records_metrics_and_goes_on_after_a_restart(
    config_file, tmp_path, own_callbacks
):
    chosen = (*runs.ONE, "log.callbacks=[own_callbacks.Norms]", "train.steps=4")
    saving = ("checkpoint.every=2", "checkpoint.asynchronous=false")  # else it would end later
    runs.run(config_file, 2, *chosen, *saving, "train.stop_at=3")
    lines = runs.run(config_file, 2, *chosen)
    assert [line["rank"] for line in lines] == [1] * 4
    for line in lines:
        *others, last = line["largest"]
        assert last == 0
        assert min(others) > 0
    log = runs.log(tmp_path / "run").splitlines()
    assert [line for line in log if line.startswith("calls")] == [
        "calls: ['start after 0', 1.0, 1.0, 'step-00000002', 1.0, 'step-00000003', 'end']",
        "calls: ['start after 3', 1.0, 'step-00000004', 'end']",
    ]
    manifest = tmp_path / "run/checkpoints/step-00000004/checkpoint.json"
    state = json.loads(manifest.read_text())["extra"]["callbacks"]
    assert state == {"own_callbacks.Norms": {"steps": 4}}


def test_a_callback_learns_of_the_error_that_ends_the_run(config_file, tmp_path, own_callbacks):
    """An error of its own there does not replace that error."""
    chosen = ("log.callbacks=[own_callbacks.Fails]", *runs.ONE)
    with pytest.raises(ValueError, match="no more"):
        main(["train", str(config_file), *chosen])
    log = runs.log(tmp_path / "run")
    assert "on_error: no more\nwarning: Fails.on_error: KeyError: 'a second error'\n" in log
    assert runs.metrics(tmp_path / "run") == [], "a higher priority comes first"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.Class", "(ModuleNotFoundError: No module named 'nowhere')"),
        ("own_callbacks.torch", "need a subclass of megafrontier.training.callbacks.base.Callback"),
    ],
)
def test_a_name_that_is_no_callback_is_refused_in_one_line(
    config_file, tmp_path, own_callbacks, capfd, name, reason
):
    assert main(["train", str(config_file), f"log.callbacks=[{name}]", *runs.ONE]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"megafrontier: log.callbacks: {name}, need ")
    assert reason in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
