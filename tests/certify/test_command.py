"""Certificates of real runs: of the code as it is, and of code that is broken on purpose."""

import json
import os
import signal

import pytest

from megafrontier.certify import command
from megafrontier.certify.command import certify
from megafrontier.common.errors import UserError
from megafrontier.parallel.mesh import Mesh
from megafrontier.pipeline.work import Work
from tests import runs

SPLIT = ("parallel.tensor=2", "machine.levels.pair.size=2", "machine.levels.node.size=1")


@pytest.fixture
def config(tmp_path):
    return runs.load(runs.make_config_file(tmp_path), *SPLIT)


def test_a_loss_that_each_tensor_rank_counts_is_found_with_its_axis(config, tmp_path, monkeypatch):
    monkeypatch.setattr(Mesh, "counts_loss", True)
    found = certify(config, 4, broken=tmp_path / "broken")
    promises = [finding.promise for finding in found.broken]
    assert "gradient norm" in promises
    blamed = next(finding for finding in found.broken if finding.cause)
    assert blamed.cause == "holds without tensor 2 in pair"
    assert blamed.command == f"megafrontier certify {tmp_path}/broken-1.yaml --nproc 2"
    again = certify(runs.load(tmp_path / "broken-1.yaml"), 2, until_broken=True)
    assert "gradient norm" in [finding.promise for finding in again.broken]
    assert json.dumps(again.as_dict())


def test_a_run_that_fails_is_a_broken_promise_with_its_last_line(config, tmp_path, monkeypatch):
    def fail(self, *_, **__):
        raise UserError("no work")

    monkeypatch.setattr(Work, "__init__", fail)
    found = certify(config, 2)
    assert any("no work" in finding.where for finding in found.broken), str(found)


@pytest.mark.fast
def test_the_planner_of_a_certificate_ends_with_it_also_after_an_error(config, monkeypatch):
    started, start = [], command._start_scale

    def start_scale(*arguments):
        started.append(start(*arguments))
        return started[0]

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_start_scale", start_scale)
    monkeypatch.setattr(command, "write_scale", lambda *_: signal.pause())
    monkeypatch.setattr(command._Clock, "limited", stop)
    with pytest.raises(KeyboardInterrupt):
        certify(config, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0]._pid, 0)


@pytest.mark.fast
def test_a_config_that_cannot_run_is_refused(config):
    with pytest.raises(UserError, match=r"machine\.levels"):
        certify(config, 3)
