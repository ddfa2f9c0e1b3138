"""`megafrontier checkpoint` says which checkpoints there are and whether they are whole."""

import errno
import json
import os
import shutil
from pathlib import Path
from pkgutil import resolve_name

import pytest

from megafrontier.checkpoint.sets import shard_path
from megafrontier.cli import main
from megafrontier.common import progress
from megafrontier.common.errors import LOST
from tests.checkpoint.helpers import SHAPES, flip, save_all


@pytest.fixture
def run(tmp_path):
    for step in (100, 200):
        save_all(tmp_path / "checkpoints", step, 2, config={"model": {"layers": 2}})
    return tmp_path


def test_list_shows_all_of_a_run_whatever_path_it_is_given_by(run, capsys):
    for path in (run, run / "checkpoints"):
        assert main(["checkpoint", "list", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["100", "200"]
        assert all(line.endswith("whole") for line in lines)
    assert main(["checkpoint", "list", str(run / "checkpoints" / "step-00000200")]) == 0
    assert capsys.readouterr().out.split()[0] == "200"


def test_list_names_what_is_not_whole(run, capsys):
    (run / "checkpoints" / "step-00000100" / shard_path(1)).unlink()
    assert main(["checkpoint", "list", str(run), "--json"]) == 2
    first, second = json.loads(capsys.readouterr().out)
    assert (first["whole"], second["whole"]) == (False, True)
    assert "00000001.safetensors: missing" in first["problem"]


@pytest.mark.parametrize(
    ("action", "reader"), [("list", "read_manifest"), ("verify", "_check_shard")]
)
def test_checkpoints_that_a_training_prunes_meanwhile_are_left_out(
    run, capsys, monkeypatch, action, reader
):
    """Just before they are read."""
    reader = f"megafrontier.checkpoint.commands.{reader}"
    read = resolve_name(reader)
    old = run / "checkpoints" / "step-00000100"

    def pruned_before(path, *args):
        if path == old:
            shutil.rmtree(path, ignore_errors=True)
        return read(path, *args)

    monkeypatch.setattr(reader, pruned_before)
    assert main(["checkpoint", action, str(run)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert len(shown.out.splitlines()) == 1
    assert "whole" in shown.out


def test_show_prints_tensors_states_and_config_of_the_newest(run, capsys):
    assert main(["checkpoint", "show", str(run)]) == 0
    text = capsys.readouterr().out
    assert "step:        200" in text
    assert 'config:      model: {"layers": 2}' in text
    assert main(["checkpoint", "show", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tensors"] == {name: list(shape) for name, shape in SHAPES.items()}
    assert facts["states"] == {"weight": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
    assert facts["tokens"] == 200_000


def test_verify_says_whole_or_names_every_damaged_file(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("whole, 3 files") == 2
    broken = [run / "checkpoints" / "step-00000200" / shard_path(index) for index in (0, 1)]
    for path in broken:
        flip(path, 99)
    assert main(["checkpoint", "verify", str(run)]) == 2
    out, err = capsys.readouterr()
    assert [line.split(": ")[1] for line in err.splitlines()] == [str(path) for path in broken]
    assert "step-00000100: whole" in out
    assert main(["checkpoint", "verify", str(run), "--json"]) == 2
    assert [r["whole"] for r in json.loads(capsys.readouterr().out)] == [True, False]


def test_verify_says_how_far_it_is(run, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert main(["checkpoint", "verify", str(run)]) == 0
    lines = [line.split(", ")[0] for line in capsys.readouterr().err.splitlines()]
    steps = ("step-00000100", "step-00000200")
    assert lines == [f"verify {step}: {done} of 2 files" for step in steps for done in (0, 1)]


def test_a_path_without_checkpoints_is_refused_in_one_line(tmp_path, capsys):
    for action in ("list", "show", "verify"):
        assert main(["checkpoint", action, str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert f"{tmp_path}: no checkpoints" in err
        assert err.count("\n") == 1
    assert main(["checkpoint", "list", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_is_refused_in_one_line(run, capsys, monkeypatch):
    def refuse(_):  # modes do not hold back root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", refuse)
    for action in ("list", "show", "verify"):
        assert main(["checkpoint", action, str(run)]) == 2
        err = capsys.readouterr().err
        assert f"{run}: Permission denied, need a folder to read" in err
        assert err.count("\n") == 1


def test_storage_that_fails_hides_no_other_checkpoint(run, capsys, monkeypatch):
    whole = Path.read_bytes

    def read(path):
        if path.parent.name == "step-00000100":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert main(["checkpoint", "list", str(run)]) == 2
    bad, good = capsys.readouterr().out.splitlines()[-2:]
    assert "cannot read: Input/output error" in bad
    assert good.endswith("whole")
    assert main(["checkpoint", "show", str(run / "checkpoints" / "step-00000100")]) == LOST
    assert capsys.readouterr().err.count("\n") == 1
