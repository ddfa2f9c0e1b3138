"""Files that come with the package: each of them works alone, copied to any folder."""

from pathlib import Path

import pytest

from megafrontier.config import load_config, load_machine
from megafrontier.config.shipped import copy_shipped, shipped_files
from tests.config.conftest import refusal


@pytest.mark.parametrize("name", [name for name in shipped_files() if name != "slurm"])
def test_a_copied_file_loads_in_an_empty_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    kind, _, stem = name.rpartition("/")
    if kind == "models":
        path = Path("configs/models/mine.yaml")
        path.parent.mkdir(parents=True)
        copy_shipped(name, path)
        empty = Path("empty.yaml")
        empty.write_text("{}")
        copied, original = (
            load_config(empty, [f"model={model}"]).model for model in ("mine", stem)
        )
    elif kind == "machines":
        copied, original = load_machine(str(copy_shipped(name))), load_machine(stem)
    else:
        copied, original = load_config(copy_shipped(name)), load_config(shipped_files()[name])
    assert copied == original


def test_a_file_inherits_from_a_shipped_one_by_name_and_from_its_neighbour_first(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("defaults: gpt-125m\ntrain: {steps: 1000}\n")
    assert load_config("mine.yaml").model.hidden == 768
    Path("gpt-125m").write_text("model: {hidden: 96}")
    assert load_config("mine.yaml").model.hidden == 96
    Path("mine.yaml").write_text("defaults: folder/gpt-125m.yaml")
    assert "cannot read the config: No such file" in refusal(load_config, "mine.yaml")


@pytest.mark.parametrize(
    "name", [name for name in shipped_files() if "/" not in name and name != "slurm"]
)
def test_a_ready_made_run_saves_every_half_hour_and_what_it_keeps_for_good(name):
    saves = load_config(shipped_files()[name]).checkpoint
    assert saves.minutes == (0 if name == "wire-quality" else 30), "its bits are compared"
    assert saves.every > 0
    assert saves.keep_every % saves.every == 0
