"""Configurations are read whole or refused in one line: the key, its value, what would fit."""

import dataclasses

import pytest
import yaml

from megafrontier.config import (
    Config,
    config_from_dict,
    config_to_dict,
    load_config,
    load_machine,
    save_config,
)
from megafrontier.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def base(write):
    return write("base.yaml", "model: {layers: 2, hidden: 64, heads: 4}\n")


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_defaults_fit_each_other(write):
    found = load_config(write("empty.yaml", ""))
    assert (
        dataclasses.replace(found, run=Config().run) == Config()
    )  # run.directory has a name in it


def test_a_file_changes_what_it_names_and_nothing_else(base):
    config = load_config(base)
    assert (config.model.layers, config.model.hidden) == (2, 64)
    assert config.train == Config().train


# Values that are out of range or do not fit the others: overrides, then key, value and fix.
REFUSED = [
    *[
        ([f"{key}=0"], f"{key}: 0, need at least 1")
        for key in (
            "model.layers",
            "model.hidden",
            "model.heads",
            "model.kv_heads",
            "model.head_size",
            "model.ffn_hidden",
            "model.sequence_length",
            "model.vocab_size",
            "model.vocab_multiple",
            "train.steps",
            "train.global_batch",
            "train.micro_batch",
            "train.loss_chunk_tokens",
            "train.nonfinite_limit",
            "log.every",
        )
    ],
    *[
        ([f"{key}=-1"], f"{key}: -1, need at least 0")
        for key in (
            "run.seed",
            "schedule.warmup_steps",
            "checkpoint.every",
            "checkpoint.keep",
            "checkpoint.keep_every",
            "evaluate.every",
            "evaluate.batches",
            "train.gc_every",
            "partition.prefetch",
        )
    ],
    (['run.name=""'], "run.name: empty, need a name"),
    (['run.directory=""'], "run.directory: empty, need a folder"),
    (["run.directory=~/runs/a"], "run.directory: ~/runs/a, need it without ~, as $HOME"),
    *[
        ([f"{key}=-1"], f"{key}: -1.0, need at least 0")
        for key in (
            "train.clip_grad_norm",
            "optimizer.lr",
            "optimizer.weight_decay",
            "schedule.min_lr",
        )
    ],
    *[
        ([f"{key}=0"], f"{key}: 0.0, need more than 0")
        for key in (
            "model.norm_eps",
            "model.rotary_base",
            "model.init_std",
            "optimizer.eps",
            "train.loss_scale",
        )
    ],
    (["train.spike_window=1000001"], "train.spike_window: 1000001, need at most 1000000"),
    (["train.loss_scale=1e39"], "train.loss_scale: 1e+39, need at most 4294967296"),
    *[
        ([f'{key}="a{escape}b"'], f"{key}: 'a{shown}b', need it without control characters")
        for key in ("run.name", "run.directory", "checkpoint.resume")
        for escape, shown in (
            ("\\0", "\\x00"),
            ("\\n", "\\n"),
            ("\\e", "\\x1b"),
        )
    ],
    (["model.heads=5"], "model.heads: 5, must divide model.hidden (64)"),
    (["model.kv_heads=3"], "model.kv_heads: 3, must divide model.heads (4)"),
    (["model.position=rotary", "model.rotary_fraction=0"], "model.rotary_fraction: 0.0, must be"),
    (["model.position=rotary", "model.rotary_fraction=1.5"], "rotary_fraction: 1.5, must be"),
    (
        ["model.position=rotary", "model.rotary_fraction=0.2"],
        "even number of rotating dimensions (2 or more) in a head of 16",
    ),
    (
        ["model.position=rotary", "model.rotary_fraction=0.01"],
        "even number of rotating dimensions (2 or more) in a head of 16",
    ),
    (
        ["model.position=learned", "model.rotary_scaling={factor: 8}"],
        "need null, or model.position=rotary",
    ),
    *[
        (["model.position=rotary", f"model.rotary_scaling={{{name}: {value}}}"], f"{name}: {said}")
        for name, value, said in (
            ("factor", 0.5, "0.5, need at least 1"),
            ("original_length", 0, "0, need at least 1"),
            ("low_frequency", 0, "0.0, need more than 0"),
            ("high_frequency", 1, "1.0, need more than model.rotary_scaling.low_frequency (1.0)"),
        )
    ],
    (["model.dropout=1"], "model.dropout: 1.0, need 0 or more, below 1"),
    (["data.train=[{weight: 1}]"], "data.train[0].path: empty, need a corpus prefix"),
    (
        ["data.valid=[{path: a}, {path: b, weight: 0}]"],
        "data.valid[1].weight: 0.0, need more than 0",
    ),
    (["data.split=[1, 0, 0]"], "data.split: [1.0, 0.0, 0.0], need two parts"),
    (["data.split=[0, 1]"], "data.split: [0.0, 1.0], need two parts, training above 0"),
    (["data.split=[1, -1]"], "data.split: [1.0, -1.0], need two parts"),
    (["data.skip=[[1, 2], [5, 5]]"], "data.skip[1]: [5, 5], need [from, to] with 0 <= from < to"),
    (
        ["data.skip=[[0, 9223372036854775807]]"],
        "data.skip[0]: [0, 9223372036854775807], need [from, to] with 0 <= from < to, which a run",
    ),
    (["data.skip=[[1]]"], "data.skip[0]: [1], need [from, to]"),
    (
        ["train.global_batch=8", "train.micro_batch=3"],
        "train.global_batch: 8, must be a multiple of train.micro_batch (3)",
    ),
    (["run.name=\\${x}"], "run.name: ${x}, need it without ${"),
    (["optimizer.betas=[0.9, 1]"], "optimizer.betas: [0.9, 1.0], need two numbers, each 0 or more"),
    (
        ["train.steps=5", "schedule.warmup_steps=6"],
        "schedule.warmup_steps: 6, need at most train.steps (5)",
    ),
    (
        ["optimizer.lr=0.1", "schedule.min_lr=0.2"],
        "schedule.min_lr: 0.2, need at most optimizer.lr (0.1)",
    ),
    (["schedule.decay_fraction=2"], "schedule.decay_fraction: 2.0, need 0 to 1"),
    (["train.steps=5", "train.stop_at=6"], "train.stop_at: 6, need 1 to train.steps (5)"),
    (["train.stop_at=0"], "train.stop_at: 0, need 1 to train.steps (1000)"),
    (
        ["partition.wires.reduce.pair=int3"],
        "partition.wires.reduce.pair: int3, need one of fp32, bf16, fp16, int8, int4",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), REFUSED, ids=lambda v: str(v)[:60])
def test_values_that_do_not_fit_are_refused(base, overrides, expected):
    assert expected in refusal(load_config, base, overrides)


# Wrong keys and types: an override, then key, value and fix.
MISFITS = [
    ("modell.layers=2", "modell: {'layers': 2}, no such key; did you mean model? known keys: run,"),
    ("model.layer=2", "model.layer: 2, no such key; did you mean layers? known keys: layers,"),
    ("zzz=1", "zzz: 1, no such key; known keys: run, model"),
    (
        "data.train=[{path: a}, {path: b, wei: 2}]",
        "data.train[1].wei: 2, no such key; did you mean weight? known keys: path, weight",
    ),
    ("partition.wires.x={a: b}", "partition.wires.x: {'a': 'b'}, no such key; known keys: preset"),
    ("model=3", "model: 3, need keys among layers, hidden"),
    ("data.train=[a]", "data.train[0]: a, need keys among path, weight"),
    ("data.train=a", "data.train: a, need a list"),
    ("data.skip=[3]", "data.skip[0]: 3, need a list"),
    ("data.skip=[[1, b]]", "data.skip[0][1]: b, need an integer"),
    ("partition.wires.gather=fp32", "partition.wires.gather: fp32, need keys and values"),
    ("model.layers=two", "model.layers: two, need an integer"),
    ("model.layers=1.5", "model.layers: 1.5, need an integer"),
    ("model.layers=true", "model.layers: True, need an integer"),
    ("model.kv_heads=x", "model.kv_heads: x, need an integer"),
    ("train.steps=null", "train.steps: null, need an integer"),
    ("model.bias=7", "model.bias: 7, need true or false"),
    ("optimizer.lr=fast", "optimizer.lr: fast, need a finite number"),
    ("optimizer.lr=.nan", "optimizer.lr: nan, need a finite number"),
    ("optimizer.lr=.inf", "optimizer.lr: inf, need a finite number"),
    (f"optimizer.lr={'1' * 400}", f"optimizer.lr: {'1' * 57}..., need a finite number"),
    (f"train.steps=0x{'f' * 5000}", "train.steps: thousands of digits, need an integer"),
    ("optimizer.betas=[1]", "optimizer.betas: [1], need a list of 2"),
    ("optimizer.betas=[0.9, b]", "optimizer.betas[1]: b, need a finite number"),
    ("model.norm=batch", "model.norm: batch, need one of layernorm, rmsnorm"),
    ("partition.strategy=fsdp", "partition.strategy: fsdp, need one of ddp, zero1,"),
    ("optimizer.no_decay=[head]", "optimizer.no_decay[0]: head, need one of norm, bias, embedding"),
    ("tokenizer={a: 1}", "tokenizer: {'a': 1}, need text"),
    ("tokenizer=true", "tokenizer: True, need text"),
    ("run.name=", "run.name: null, need text"),
    ("run.name=${nothing}", "run.name: Interpolation key 'nothing' not found"),
]


@pytest.mark.parametrize(("override", "expected"), MISFITS, ids=lambda v: v[:60])
def test_unknown_keys_and_wrong_types_are_refused(base, override, expected):
    message = refusal(load_config, base, [override])
    assert message.startswith(expected)


@pytest.mark.parametrize(
    ("override", "value", "expected"),
    [
        ("optimizer.lr=${oc.env:ASKED}", "inf", "optimizer.lr: inf, need a finite number"),
        ("optimizer.betas=[0.9, '${oc.env:ASKED}']", "nan", "optimizer.betas[1]: nan, need a fin"),
        (
            "data.train=[{path: a, weight: '${oc.env:ASKED}'}]",
            "inf",
            "data.train[0].weight: inf, need a finite number",
        ),
        ("train.steps=${oc.env:ASKED}", "9223372036854775808", "train.steps: 92233720368547758"),
    ],
)
def test_what_a_reference_stands_for_is_refused_as_if_written_out(
    base, monkeypatch, override, value, expected
):
    monkeypatch.setenv("ASKED", value)
    assert refusal(load_config, base, [override]).startswith(expected)


def test_a_machine_files_reference_is_refused_as_if_written_out(write, monkeypatch):
    monkeypatch.setenv("ASKED", "inf")
    path = write("m.yaml", "levels: {world: {}}\ndevice: {memory_gib: '${oc.env:ASKED}'}\n")
    assert (
        refusal(load_machine, str(path)) == f"{path}: device.memory_gib: inf, need a finite number"
    )


def test_a_file_is_blamed_for_what_is_wrong_in_it_and_an_override_for_the_rest(write):
    path = write("a.yaml", "model: {head: 5}")
    for overrides in ([], ["train.steps=3"], ["train.steps=3.5"]):
        assert refusal(load_config, path, overrides).startswith(f"{path}: model.head: 5, no such")
    long = write("b.yaml", "many words " * 100)
    assert len(refusal(load_config, long)) < 400


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("steps", "expected key=value, as in train.steps=100"),
        ("=3", "expected key=value"),
        ("train.steps=[", "not valid YAML after the '='"),
        ("data.train[0].weight=2", "data.train has 0 items, need one of them or data.train=[…]"),
        ("data.valid[0].path=x", "data.valid has 0 items, need one of them or data.valid=[…]"),
        ("data.skip[0][1]=3", "data.skip has 0 items, need"),
        ("optimizer.betas[2]=0.5", "optimizer.betas has 2 items, need"),
        ("data.train.x=2", "no such place in the config"),
    ],
)
def test_overrides_that_cannot_be_read_are_refused(write, override, reason):
    path = write("a.yaml", "data: {train: []}")
    message = refusal(load_config, path, [override])
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


def test_levels_given_in_another_order_are_in_that_order(write):
    """Fastest first: an override that names all of them says which that is."""
    chosen = ["machine=frontier", "machine.levels={node: {size: 2}, pair: {size: 4}, world: {}}"]
    levels = load_config(write("a.yaml", "{}"), chosen).machine["levels"]
    assert list(levels) == ["node", "pair", "world"]
    assert levels["pair"]["gigabytes_per_second"] == 200


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


def test_a_file_that_names_all_levels_says_their_order(write):
    write("base.yaml", "machine: laptop")
    child = "machine: {levels: {node: {size: 8}, world: {}}}"
    config = load_config(write("top.yaml", f"defaults: base.yaml\n{child}"))
    assert list(load_machine(config.machine).levels) == ["node", "world"]


def test_a_machine_given_whole_replaces_the_files(write):
    path = write("a.yaml", "machine: {levels: {node: {size: 4}, world: {}}, device: {name: x}}")
    whole = {"levels": {"pair": {"size": 2}, "world": {}}}
    assert load_config(path, ["machine={levels: {pair: {size: 2}, world: {}}}"]).machine == whole


def test_values_that_cannot_be_merged_are_refused_with_both_files(write):
    write("base.yaml", "data: {train: [{path: a}]}")
    path = write("top.yaml", "defaults: base.yaml\ndata: {train: {path: b}}")
    message = refusal(load_config, path)
    assert "top.yaml: over base.yaml: " in message


def test_a_missing_value_is_refused_and_does_not_leave_the_parents(write):
    write("base.yaml", "train: {steps: 7}")
    path = write("top.yaml", "defaults: base.yaml\ntrain: {steps: '???'}")
    assert refusal(load_config, path) == f"{path}: train.steps: ???, need a value"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("machine=???", "machine"),
        ("machine.levels={world: {size: '???'}}", "machine.levels.world.size"),
        ("train.steps=???", "train.steps"),
        ("model={layers: '???'}", "model.layers"),
    ],
)
def test_a_missing_value_does_not_leave_the_files(write, override, key):
    path = write("a.yaml", "machine: frontier\ntrain: {steps: 7}")
    said = f"override {override!r}: {key}: ???, need a value"
    assert refusal(load_config, path, [override]) == said


def test_a_number_in_quotes_is_shown_with_them(write):
    path = write("top.yaml", "train: {steps: '2'}\noptimizer: {lr: 1.0e-3}")
    assert refusal(load_config, path) == f"{path}: train.steps: '2', need an integer"


def test_a_circle_of_inheritance_is_refused(write):
    write("a.yaml", "defaults: b.yaml")
    path = write("b.yaml", "defaults: a.yaml")
    message = refusal(load_config, path)
    assert "b.yaml" in message
    assert "inherit from each other in a circle" in message


def test_a_missing_parent_names_the_file_that_asked(write):
    path = write("a.yaml", "defaults: gone.yaml")
    message = refusal(load_config, path)
    assert "gone.yaml" in message
    assert f"(the defaults of {path}): cannot read the config: No such file" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: {layers: 2", "not valid YAML"),
        ("a: 1\na: 2", "not valid YAML"),
        ("- a\n- b", "a list or a single value, need keys and values at the top"),
        ("[1, 2]", "a list or a single value, need keys and values at the top"),
        ("5", "a list or a single value, need keys and values at the top"),
        (f"train: {{steps: {'1' * 5000}}}", "not valid YAML: Exceeds the limit"),
        ("a: " + "[" * 600 + "]" * 600, "not valid YAML: "),
        ("defaults: [a, b]", "defaults: ['a', 'b'], need the path of one file"),
        ("defaults: ${oc.env:NOWHERE_SET}/a.yaml", "defaults: "),
    ],
)
def test_a_file_that_is_no_config_is_refused(write, text, reason):
    path = write("bad.yaml", text)
    assert refusal(load_config, path).startswith(f"{path}: {reason}")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "bad.yaml").write_bytes(b"a: \xff\xfe")
    assert "not valid YAML" in refusal(load_config, tmp_path / "bad.yaml")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert "No such file" in refusal(load_config, tmp_path / "gone.yaml")
    assert "Is a directory" in refusal(load_config, tmp_path)


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


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("frontier", {"pair": 2, "node": 4, "world": None}),
        ("lumi", {"pair": 2, "node": 4, "world": None}),
        ("nvlink8", {"node": 8}),
        ("nvlink8-cluster", {"node": 8, "world": None}),
        ("workstations", {"node": 2, "world": None}),
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


def test_an_override_changes_one_value_of_a_named_machine(write):
    path = write("a.yaml", "machine: frontier")
    config = load_config(path, ["machine.levels.world.size=9408"])
    machine = load_machine(config.machine)
    expected = load_machine("frontier")
    expected.levels["world"].size = 9408
    assert dataclasses.asdict(machine) == dataclasses.asdict(expected)


def test_an_override_changes_one_value_of_the_machine_that_no_file_names(write):
    config = load_config(write("a.yaml", "run: {name: x}"), ["machine.device.name=cpu"])
    expected = load_machine("laptop")
    expected.device.name = "cpu"
    assert dataclasses.asdict(load_machine(config.machine)) == dataclasses.asdict(expected)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("fronteer", "machine: fronteer, need the path of a machine file or one of ['frontier',"),
        ({}, "machine: levels: none, need 1 to 5 levels"),
        ({"levels": {f"l{i}": {"size": 2} for i in range(6)}}, "'l5'], need 1 to 5 levels"),
        ({"levels": {"none": {}}}, "need other names than 'none'"),
        (
            {"levels": {"a": {}, "b": {}}},
            "machine: levels.a.size: not given, only the outermost level may leave it open",
        ),
        ({"levels": {"a": {"size": 0}}}, "machine: levels.a.size: 0, need at least 1"),
        (
            {"levels": {"a": {"gigabytes_per_second": 0}}},
            "machine: levels.a.gigabytes_per_second: 0.0, need more than 0",
        ),
        *[
            (
                {"levels": {"a": {}}, "device": {key: 0}},
                f"machine: device.{key}: {zero}, need more than 0",
            )
            for key, zero in (("memory_gib", 0.0), ("peak_tflops", 0.0), ("ranks_per_host", 0))
        ],
        ({"level": {}}, "machine: level: {}, no such key; did you mean levels?"),
        (
            {"levels": {"a": {"sise": 2}}},
            "machine: levels.a.sise: 2, no such key; did you mean size?",
        ),
    ],
)
def test_machines_that_are_not_whole_are_refused(machine, expected):
    assert expected in refusal(load_machine, machine)
