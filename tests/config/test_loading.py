"""Files that inherit, overrides over them, and what is saved: read whole or refused in one line."""

import dataclasses

import pytest
import yaml

from megafrontier.config import (
    Config,
    ParallelConfig,
    WiresConfig,
    config_from_dict,
    config_to_dict,
    load_config,
    load_machine,
    save_config,
)
from tests.config.conftest import refusal


def test_the_defaults_fit_each_other(write):
    found = load_config(write("empty.yaml", ""))
    assert (
        dataclasses.replace(found, run=Config().run) == Config()
    )  # run.directory has a name in it


def test_a_file_changes_what_it_names_and_nothing_else(base):
    config = load_config(base)
    assert (config.model.layers, config.model.hidden) == (2, 64)
    assert config.train == Config().train


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("steps", "expected key=value, as in train.steps=100"),
        ("=3", "expected key=value"),
        ("train.steps=[", "not valid YAML after the '='"),
        ("train.steps=" + "[" * 60, "nested more than 50 deep, need less"),
        ("data.train[0].weight=2", "train has 0 items, need the index of one of them"),
        ("optimizer.betas[2]=0.5", "betas has 2 items, need the index of one of them"),
        ("data.train.x=2", "train has 0 items"),
    ],
)
def test_overrides_that_cannot_be_read_are_refused(base, override, reason):
    message = refusal(load_config, base, [override])
    assert message.startswith(f"override {override!r}: ")
    assert reason in message


def test_overrides_apply_in_order_and_keep_their_neighbours(base):
    config = load_config(
        base,
        [
            "model.layers=3",
            "model.layers=4",
            "data.train=[{path: a}, {path: b}]",
            "data.train[1].weight=2",
            "optimizer={lr: 1e-4, betas: [0.8, 0.9]}",
            "partition.wires.gather.pair=bf16",
            "run.name=2024",
            "data.split[1]=0.1",  # of the default
            "data.split[0]=0.9",
        ],
    )
    assert load_config(base, ["optimizer.betas[1]=0.98"]).optimizer.betas == (0.9, 0.98)
    assert load_config(base, ["optimizer.no_decay[1]=norm"]).optimizer.no_decay[1] == "norm"
    assert config.data.split == [0.9, 0.1]
    assert (config.model.layers, config.model.hidden) == (4, 64)
    assert [(corpus.path, corpus.weight) for corpus in config.data.train] == [("a", 1), ("b", 2)]
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-4, (0.8, 0.9))
    assert config.partition.wires.gather == {"pair": "bf16"}
    assert config.run.directory == "runs/2024"


def test_a_file_inherits_from_another_beside_it(write):
    write("shared/base.yaml", "model: {layers: 2, hidden: 64}\ntrain: {steps: 7}\n")
    write("middle.yaml", "defaults: shared/base.yaml\nmodel: {layers: 3}\n")
    config = load_config(write("top.yaml", "defaults: middle.yaml\nmodel: {heads: 4}\n"))
    assert (config.model.layers, config.model.hidden, config.model.heads) == (3, 64, 4)
    assert config.train.steps == 7


def test_a_file_changes_single_values_of_short_forms_it_inherits(write):
    parent = write("base.yaml", "partition: {wires: low}\nmachine: frontier\n")
    child = "partition: {wires: {reduce: {world: int8}}}\nmachine: {levels: {world: {size: 16}}}\n"
    config = load_config(write("top.yaml", f"defaults: base.yaml\n{child}"))
    chosen = ["partition.wires.reduce.world=int8", "machine.levels.world.size=16"]
    assert config == load_config(parent, chosen)
    assert config.partition.wires.preset == "low"
    assert list(config.machine["levels"]) == ["pair", "node", "world"]


@pytest.mark.parametrize("wires", ["partition.wires=low", "partition={wires: low}"])
def test_a_short_form_replaces_the_section_below_it(write, wires):
    path = write("a.yaml", "partition: {wires: {preset: exact, gather: {world: int8}}}")
    assert load_config(path, [wires]).partition.wires == WiresConfig(preset="low")
    single = load_config(path, [wires, "partition.wires.gather.pair=bf16"]).partition.wires
    assert single == WiresConfig(preset="low", gather={"pair": "bf16"})


def test_a_preset_replaces_the_model_before_it_and_is_changed_by_what_comes_after(write):
    published = {"layers": 36, "hidden": 4096, "qk_norm": "head", "tie_embeddings": False}
    beside = write("a.yaml", "model: {preset: qwen3-8b, sequence_length: 64}")
    below = write("b.yaml", "defaults: a.yaml\nmodel: {dropout: 0.5, attention: {out_bias: true}}")
    other = write("c.yaml", "model: {layers: 2, hidden: 64, activation: gelu, bias: true}")
    for path, changes, expected in (
        (beside, [], {"sequence_length": 64, "activation": "swiglu"}),
        (below, ["model.dropout=0"], {"sequence_length": 64, "dropout": 0}),
        (other, ["model=qwen3-8b", "model.heads=16"], {"heads": 16, "bias": False}),
        (other, ["model.heads=16", "model.preset=qwen3-8b"], {"heads": 32, "kv_heads": 8}),
    ):
        model = load_config(path, changes).model
        assert {key: getattr(model, key) for key in (*published, *expected)} == published | expected
    assert load_config(below).model.attention.out_bias
    assert refusal(load_config, beside, ["model=qwen-9"]).startswith(
        "model.preset: qwen-9, need a name that `megafrontier configs` lists, such as qwen"
    )


def test_a_split_is_a_number_or_a_levels_name_and_comes_back_as_it_was(write, tmp_path):
    path = write("a.yaml", "parallel: {tensor: pair, context: 2, layers: [2, 3]}")
    config = load_config(path, ["parallel.pipeline=0x2"])
    assert config.parallel == ParallelConfig("pair", 2, pipeline=2, layers=[2, 3])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_a_config_from_before_there_were_splits_has_none():
    old = config_to_dict(Config())
    del old["parallel"]
    assert config_from_dict(old, "old").parallel == ParallelConfig()


def test_a_circle_of_inheritance_is_refused(write):
    write("a.yaml", "defaults: b.yaml")
    path = write("b.yaml", "defaults: a.yaml")
    message = refusal(load_config, path)
    assert "b.yaml" in message
    assert "inherit from each other in a circle" in message


def test_the_parents_path_may_have_a_reference(write, monkeypatch):
    monkeypatch.setenv("ASKED", "shared")
    write("shared/base.yaml", "train: {steps: 7}")
    path = write("a.yaml", "defaults: ${oc.env:ASKED}/base.yaml")
    assert load_config(path).train.steps == 7


def test_a_missing_parent_names_the_file_that_asked(write):
    path = write("a.yaml", "defaults: gone.yaml")
    message = refusal(load_config, path)
    assert "gone.yaml" in message
    assert f"(the defaults of {path}): cannot read the config: No such file" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: {layers: 2", "not valid YAML"),
        ("a: 1\na: 2", "not valid YAML: duplicate key a"),
        ("[" * 10_000, "not valid YAML: nested more than 50 deep, need less"),
        ("a: &a [*a]", "not valid YAML: the alias *a lies inside its own anchor"),
        ("#" * (2**20 + 1), "not valid YAML: more than 1048576 bytes, need fewer"),
        ("- a\n- b", "a list or a single value, need keys and values at the top"),
        ("5", "a list or a single value, need keys and values at the top"),
        ("defaults: [a, b]", "defaults: ['a', 'b'], need the path of one file"),
    ],
)
def test_a_file_that_is_no_config_is_refused(write, text, reason):
    path = write("bad.yaml", text)
    assert refusal(load_config, path).startswith(f"{path}: {reason}")


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "bad.yaml").write_bytes(b"a: \xff\xfe")
    assert "not valid YAML" in refusal(load_config, tmp_path / "bad.yaml")
    assert "No such file" in refusal(load_config, tmp_path / "gone.yaml")
    assert "a folder, need a YAML file" in refusal(load_config, tmp_path)


def test_the_resolved_config_survives_saving(base, tmp_path):
    config = load_config(
        base,
        [
            "run.name=x",
            "machine={levels: {pair: {size: 2}, world: {}}}",
            "data.train=[{path: a, weight: 3}]",
            "data.skip=[[1, 2]]",
            "partition.wires.gather.world=fp32",
            "train.stop_at=5",
        ],
    )
    saved = tmp_path / "config.yaml"
    save_config(config, saved)
    assert load_config(saved) == config
    assert config_from_dict(config_to_dict(config), "saved") == config
    assert yaml.safe_load(saved.read_text())["run"]["directory"] == "runs/x"


def test_another_name_for_a_runs_own_config_is_another_folder(base, tmp_path):
    """Or the new run would go on in the old one's."""
    saved = tmp_path / "config.yaml"
    save_config(load_config(base, ["run.name=old"]), saved)

    def folder(*overrides):
        return load_config(saved, overrides).run.directory

    assert folder() == "runs/old"
    assert folder("run.name=new") == folder("run={name: new}") == "runs/new"
    assert folder("run.name=new", "run.directory=runs/old") == "runs/old"
    save_config(load_config(base, ["run.name=old", "run.directory=elsewhere"]), saved)
    assert folder("run.name=new") == "elsewhere"


def test_a_saved_config_with_a_foreign_key_names_its_file():
    values = config_to_dict(Config()) | {"future": 1}
    assert refusal(config_from_dict, values, "step-1").startswith("step-1: future: 1, no such key")


@pytest.mark.parametrize("text", ["1.10", "2024_01_15", "0012", "12:30", "3e-4", "12e4567"])
def test_text_that_yaml_takes_for_a_number_stays_as_it_is_written(write, text):
    """Or runs named 1.1 and 1.10 would share a folder, and each take up the other's weights."""
    assert load_config(write("a.yaml", "{}"), [f"run.name={text}"]).run.name == text
    lines = f"run: {{name: {text}}}\ndata: {{train: [{{path: {text}, weight: 2}}]}}\n"
    config = load_config(write("b.yaml", lines))
    assert config.run.directory == f"runs/{text}"
    assert [(corpus.path, corpus.weight) for corpus in config.data.train] == [(text, 2)]
    chosen = [f"data.train=[{{path: {text}}}, {{path: b}}]", f"data.train[1].path={text}"]
    found = load_config(write("c.yaml", "{}"), chosen).data.train
    assert [corpus.path for corpus in found] == [text, text]
    machine = write("m.yaml", f"levels: {{world: {{}}}}\ndevice: {{name: {text}}}\n")
    assert load_machine(str(machine)).device.name == text


@pytest.mark.parametrize("text", ["010", "-010", "1:30"])
def test_a_number_that_yaml_would_read_as_another_one_is_refused_by_key(write, text):
    path = write("a.yaml", f"data: {{skip: [[1, {text}]]}}")
    assert refusal(load_config, path) == f"{path}: data.skip[0][1]: {text}, need an integer"
    said = f"train.steps: {text}, need an integer"
    assert refusal(load_config, write("b.yaml", "{}"), [f"train.steps={text}"]) == said


def test_other_spellings_of_a_number_are_that_number(base):
    for text, value in {"+7": 7, "0": 0, "0x10": 16, "1_000": 1000, "'2'": 2}.items():
        assert load_config(base, [f"evaluate.every={text}"]).evaluate.every == value


def test_a_resolved_config_is_data(base, tmp_path, monkeypatch):
    """What looks like a reference in the config of a checkpoint, which may come from elsewhere, is
    a text, also after saving and loading."""
    monkeypatch.setenv("SECRET", "hidden")
    text = r"${oc.env:SECRET} \${run.name} \\${a"
    values = config_to_dict(load_config(base))
    values["run"]["name"] = values["tokenizer"] = text
    values["machine"] = {"levels": {"world": {}}, "device": {"name": text}}
    config = config_from_dict(values, "elsewhere")
    assert (config.run.name, config.tokenizer) == (text, text)
    assert load_machine(config.machine).device.name == text
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml").tokenizer == text
    given = config_from_dict(values, "elsewhere", ["tokenizer=${oc.env:SECRET}"])
    assert given.tokenizer == "hidden"
