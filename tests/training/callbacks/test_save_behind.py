"""Checkpoints are written behind the steps, and are those of a run that waits for them."""

import json
import re

import pytest

from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.common.checkpoints import list_checkpoints
from megafrontier.parallel.fault_injection import VARIABLE
from tests import runs

TWO = (*runs.ONE, "train.micro_batch=8")
CHOSEN = (*TWO, "train.steps=7", "checkpoint.every=3", "checkpoint.keep=0")


@pytest.fixture
def fault(monkeypatch):
    """Let something happen in the thread that writes the checkpoint of step 3, on rank 0."""

    def choose(**what):
        monkeypatch.setenv(VARIABLE, json.dumps([{"at": "save", "step": 3, "rank": 0, **what}]))

    return choose


def test_the_bytes_are_those_of_a_checkpoint_that_training_waits_for(config_file, tmp_path):
    folders = {}
    for kind in ("true", "false"):
        folders[kind] = tmp_path / kind
        runs.run(
            config_file, 2, *CHOSEN, f"run.directory={folders[kind]}",
            f"checkpoint.asynchronous={kind}",
        )  # fmt: skip
    for paths in zip(*(list_checkpoints(f / "checkpoints") for f in folders.values()), strict=True):
        behind, waited = (open_checkpoint(path) for path in paths)
        assert behind.path.name == waited.path.name
        for state in ("weight", "exp_avg", "exp_avg_sq"):
            for name, values in waited.tensors(state, list(waited.shapes)).items():
                assert behind.tensor(state, name).equal(values)
    assert runs.metrics(folders["true"])[-1].keys() == runs.metrics(folders["false"])[-1].keys()


def test_steps_go_on_behind_a_save_and_the_next_that_is_due_waits_for_it(
    config_file, tmp_path, fault
):
    late = "the checkpoint of step 3 is still being written: waiting for it, because the next one"
    fault(do="wait", path=str(tmp_path / "run" / "log.txt"), message=late)
    runs.run(config_file, 2, *CHOSEN)
    log = runs.log(tmp_path / "run")
    assert log.count(late) == 1
    saved = [int(step) for step in re.findall(r"checkpoint \S+/step-(\d+)", log)]
    assert saved == [3, 6, 7]
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [
        f"step-{step:08d}" for step in saved
    ]


def test_a_kill_while_one_is_written_leaves_the_older_ones_and_the_losses(
    config_file, tmp_path, fault, monkeypatch
):
    two = (*TWO, "train.steps=6", "checkpoint.every=1", "checkpoint.keep=0")
    unbroken = runs.run(config_file, 2, *two, f"run.directory={tmp_path}/unbroken")
    fault(do="kill")
    assert runs.train(runs.load(config_file, *two), 2) != 0
    found = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in found] == ["step-00000001", "step-00000002"]
    assert all(verify(path).whole for path in found)
    monkeypatch.delenv(VARIABLE)
    assert runs.losses(runs.run(config_file, 2, *two)) == runs.losses(unbroken)
