"""Machines: named, from a file, inline, changed by overrides, or refused."""

import pytest
import yaml

from megafrontier.config import (
    config_from_dict,
    config_to_dict,
    load_config,
    load_machine,
    save_config,
)
from tests.config.conftest import refusal


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("frontier", {"pair": 2, "node": 4, "world": None}),
        ("lumi", {"pair": 2, "node": 4, "world": None}),
        ("nvlink8", {"node": 8}),
        ("nvlink8-cluster", {"node": 8, "world": None}),
        ("alps", {"node": 4, "world": None}),
        ("el-capitan", {"node": 4, "world": None}),
        ("workstations", {"node": 2, "world": None}),
        ("workstations-3090", {"node": 2, "world": None}),
        ("laptop", {"world": None}),
    ],
)
def test_the_machines_that_come_along_load_from_anywhere(tmp_path, monkeypatch, name, levels):
    monkeypatch.chdir(tmp_path)
    machine = load_machine(name)
    assert {level: values.size for level, values in machine.levels.items()} == levels


def test_a_machine_comes_from_a_path_or_inline(write):
    text = "levels: {node: {size: 2}}\ndevice: {memory_gib: 8}\n"
    from_file = load_machine(str(write("mine.yaml", text)))
    assert from_file == load_machine(yaml.safe_load(text))
    assert from_file.device.memory_gib == 8


def test_levels_given_in_another_order_are_in_that_order(write):
    """Fastest first: an override that names all of them says which that is."""
    chosen = ["machine=frontier", "machine.levels={node: {size: 2}, pair: {size: 4}, world: {}}"]
    levels = load_config(write("a.yaml", "{}"), chosen).machine["levels"]
    assert list(levels) == ["node", "pair", "world"]
    assert levels["pair"]["line_gigabytes_per_second"] == 200


def test_a_file_that_names_all_levels_says_their_order(write):
    write("base.yaml", "machine: laptop")
    child = "machine: {levels: {node: {size: 8}, world: {}}}"
    config = load_config(write("top.yaml", f"defaults: base.yaml\n{child}"))
    assert list(load_machine(config.machine).levels) == ["node", "world"]


def test_a_machine_given_whole_replaces_the_files(write):
    path = write("a.yaml", "machine: {levels: {node: {size: 4}, world: {}}, device: {name: x}}")
    whole = {"levels": {"pair": {"size": 2}, "world": {}}}
    assert load_config(path, ["machine={levels: {pair: {size: 2}, world: {}}}"]).machine == whole


def test_an_override_changes_one_value_of_a_named_machine(write):
    path = write("a.yaml", "machine: frontier")
    config = load_config(path, ["machine.levels.world.size=9408"])
    expected = load_machine("frontier")
    expected.levels["world"].size = 9408
    assert load_machine(config.machine) == expected
    unnamed = load_config(write("b.yaml", "run: {name: x}"), ["machine.device.name=cpu"]).machine
    assert load_machine(unnamed).levels == load_machine("laptop").levels
    assert load_machine(unnamed).device.name == "cpu"


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (
            "fronteer",
            "machine: fronteer, need the path of a machine file or a name that "
            "`megafrontier configs` lists, such as frontier, ",
        ),
        ({}, "machine: levels: none, need 1 to 5 levels"),
        ({"levels": {f"l{i}": {"size": 2} for i in range(6)}}, "'l5'], need 1 to 5 levels"),
        ({"levels": {"none": {}}}, "need other names than 'none'"),
        (
            {"levels": {"a": {}, "b": {}}},
            "machine: levels.a.size: not given, only the outermost level may leave it open",
        ),
        ({"levels": {"a": {"size": 0}}}, "machine: levels.a.size: 0, need at least 1"),
        (
            {"levels": {"a": {}}, "device": {"memory_gib": 0}},
            "machine: device.memory_gib: 0.0, need more than 0",
        ),
        (
            {"levels": {"a": {"sise": 2}}},
            "machine: levels.a.sise: 2, no such key; did you mean size?",
        ),
    ],
)
def test_machines_that_are_not_whole_are_refused(machine, expected):
    assert expected in refusal(load_machine, machine)


def test_a_machine_in_a_file_replaces_the_default_and_not_its_parents(write):
    """The default machine, laptop, has the level `world`."""
    own = "{levels: {a: {size: 2}, b: {size: 2}, c: {size: 2}, d: {}}}"
    path = write("a.yaml", f"machine: {own}")
    config = load_config(path)
    assert config.machine == yaml.safe_load(own) | {
        "levels": {"a": {"size": 2}, "b": {"size": 2}, "c": {"size": 2}, "d": {}}
    }
    assert list(load_machine(config.machine).levels) == ["a", "b", "c", "d"]
    changed = load_config(path, ["machine.levels.c.size=4", "machine.device.name=cpu"]).machine
    assert list(changed["levels"]) == ["a", "b", "c", "d"]
    assert (changed["levels"]["c"], changed["device"]) == ({"size": 4}, {"name": "cpu"})
    child = write("b.yaml", "defaults: a.yaml\nmachine: {levels: {b: {size: 8}}}")
    assert list(load_config(child).machine["levels"]) == ["a", "b", "c", "d"]
    lone = write("c.yaml", "machine: {device: {name: cpu}}")
    assert "levels: none, need 1 to 5 levels" in refusal(load_machine, load_config(lone).machine)


def test_a_runs_own_config_has_the_machine_that_the_run_had(write, tmp_path):
    chosen = ["machine={levels: {a: {size: 2}, b: {size: 2}, c: {}}}"]
    config = load_config(write("a.yaml", "{}"), chosen)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    assert config_from_dict(config_to_dict(config), "checkpoint") == config
