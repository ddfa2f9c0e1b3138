"""Runs go on from snapshots near the ranks, to the bit, and lose at most the steps between two."""

import json
import re

import pytest

from megafrontier.parallel.fault_injection import VARIABLE
from tests import runs

TWO = (*runs.ONE, "train.micro_batch=8", "train.steps=9")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The folder of snapshots, and not that of this machine's other runs."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return f"checkpoint.local={{every: 2, folder: {folder}}}"


def kill_in_step(monkeypatch, step):
    fault = {"at": "step", "rank": 1, "step": step, "do": "kill"}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))


def test_a_run_goes_on_from_the_newest_snapshot_with_the_losses_of_the_unbroken_run(
    config_file, tmp_path, memory, monkeypatch
):
    unbroken = runs.run(config_file, 2, *TWO, f"run.directory={tmp_path}/unbroken")
    kill_in_step(monkeypatch, 7)
    assert runs.train(runs.load(config_file, *TWO, memory), 2) != 0
    monkeypatch.delenv(VARIABLE)
    lines = runs.run(config_file, 2, *TWO, memory)
    assert runs.losses(lines) == runs.losses(unbroken)
    log = runs.log(tmp_path / "run")
    (resumed,) = re.findall(r"resumed from (.*) at step (\d+)", log)
    assert resumed[1] in ("4", "6")
    assert list((tmp_path / "memory").glob("*/*")) == []
