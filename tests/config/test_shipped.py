"""Files that come with the package: each of them works alone, copied to any folder."""

import re
from math import prod
from pathlib import Path

import pytest

from megafrontier.config import load_config, load_machine
from megafrontier.config.shipped import copy_shipped, describe_shipped, shipped_files
from megafrontier.plan.refuse import check_layout
from megafrontier.planner.search import ERROR, search
from megafrontier.planner.table import gain_over_configured
from tests.config.conftest import refusal

PER_NODE = 8


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


def test_the_list_of_files_fits_a_terminal():
    lines = describe_shipped()
    assert [line.split()[0] for line in lines] == [*shipped_files()]
    assert max(map(len, lines)) <= 100
    (line,) = (line for line in lines if line.startswith("gpt-20b "))
    assert line.endswith(" Black et al. 2022 (arXiv:2204.06745), …"), "cut between words"


@pytest.mark.parametrize("given", ["gtp-125m", "gtp-125m.yaml", "configs/gtp-125m.yaml"])
def test_a_config_that_does_not_exist_is_refused_with_the_names_that_are_nearest(
    tmp_path, monkeypatch, given
):
    monkeypatch.chdir(tmp_path)
    said = f"{given}: cannot read the config: No such file in {tmp_path}, need a YAML file or "
    message = refusal(load_config, given)
    assert message.startswith(f"{said}a name that `megafrontier configs` lists, such as gpt-125m, ")
    assert message.count(", ") == 4, "three names"


def test_a_folder_is_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my-hf").mkdir()
    need = "my-hf: a folder, need a YAML file, such as a run's config.yaml"
    assert refusal(load_config, "my-hf") == need
    Path("quickstart").mkdir()
    assert load_config("quickstart").run.name == "quickstart"


def test_the_quickstart_runs_on_any_number_of_ranks_from_1_to_8():
    config = load_config("quickstart")
    sizes = [check_layout(config, ranks).levels.sizes for ranks in range(1, 9)]
    assert [prod(size) for size in sizes] == [*range(1, 9)]
    assert sizes[-1] == (2, 4, 1)


RUNS = [name for name in shipped_files() if "/" not in name and name != "slurm"]
LARGE = [name for name in RUNS if load_config(shipped_files()[name]).machine == "frontier"]
"""Those that are for a cluster."""


def nodes_of(name: str) -> int:
    """The nodes that the first line of a run's file names."""
    first = shipped_files()[name].read_text().splitlines()[0]
    found = re.search(r" on (\d+) nodes?\b", first)
    assert found is not None, f"{name}: the first line must name the nodes"
    return int(found[1])


@pytest.mark.parametrize("name", LARGE)
def test_a_run_for_a_cluster_names_its_nodes_and_has_a_layout_for_them(name):
    config = load_config(shipped_files()[name])
    check_layout(config, nodes_of(name) * PER_NODE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LARGE)
def test_the_planner_finds_nothing_faster_than_a_shipped_layout_or_its_file_says_why(name):
    path = shipped_files()[name]
    layouts = search(load_config(path), nodes_of(name) * PER_NODE)
    (own,) = (each for each in layouts if each.is_configured)
    assert own.fits
    assert gain_over_configured(layouts) <= ERROR or "The planner's" in path.read_text()


@pytest.mark.parametrize("name", RUNS)
def test_a_ready_made_run_saves_every_half_hour_and_what_it_keeps_for_good(name):
    saves = load_config(shipped_files()[name]).checkpoint
    assert saves.minutes == (0 if name == "wire-quality" else 30), "its bits are compared"
    assert saves.every > 0
    assert saves.keep_every % saves.every == 0
