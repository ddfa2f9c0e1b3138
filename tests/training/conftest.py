"""A small config and a checkpoint of another run, for all tests of training."""

import pytest

from megafrontier.launch import main as launch
from tests.training import runs


@pytest.fixture
def config_file(tmp_path):
    return runs.make_config_file(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with such a config, for all runs of a module."""
    path = tmp_path_factory.mktemp("runs")
    runs.make_config_file(path)
    return path


@pytest.fixture
def imported(config_file, tmp_path):
    """A checkpoint of another run, from which this one is to begin."""
    runs.run(config_file, 1, *runs.ONE, "train.stop_at=2", f"run.directory={tmp_path}/other")
    return f"checkpoint.resume={tmp_path}/other/checkpoints/step-00000002"


@pytest.fixture
def no_training(monkeypatch):
    """Let a run end after its pre-flight."""
    monkeypatch.setattr(launch, "_run", lambda *_: 0)
