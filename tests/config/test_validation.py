"""Wrong keys, types and values are refused in one line: the key, its value, the fix."""

from dataclasses import fields, is_dataclass

import pytest

from megafrontier.config import Config, check, load_config, load_machine
from megafrontier.config.fields import RESUME
from tests.config.conftest import refusal

# Wrong keys and types: an override, then the start of the line.
MISFITS = [
    (
        "modell.layers=2",
        "modell: {'layers': '2'}, no such key; did you mean model? known keys: run,",
    ),
    ("model.layer=2", "model.layer: 2, no such key; did you mean layers? known keys: layers,"),
    ("zzz=1", "zzz: 1, no such key; known keys: run, model"),
    (
        "data.train=[{path: a}, {path: b, wei: 2}]",
        "data.train[1].wei: 2, no such key; did you mean weight? known keys: path, weight",
    ),
    ("partition.wires.x={a: b}", "partition.wires.x: {'a': 'b'}, no such key; known keys: preset"),
    ("model=3", "model.preset: 3, need a name that `megafrontier configs` lists"),
    ("data.train=[a]", "data.train[0]: a, need keys among path, weight"),
    ("data.train={a: 1}", "data.train: {'a': '1'}, need a list"),
    ("data.skip=[[1, b]]", "data.skip[0][1]: b, need an integer"),
    ("partition.wires.gather=fp32", "partition.wires.gather: fp32, need keys and values"),
    ("model.layers=1.5", "model.layers: 1.5, need an integer"),
    ("model.layers=true", "model.layers: true, need an integer"),
    ("train.steps=null", "train.steps: null, need an integer"),
    ("model.bias=7", "model.bias: 7, need true or false"),
    ("optimizer.lr=fast", "optimizer.lr: fast, need a finite number"),
    ("optimizer.lr=.nan", "optimizer.lr: .nan, need a finite number"),
    ("optimizer.lr=.inf", "optimizer.lr: .inf, need a finite number"),
    (f"optimizer.lr={'1' * 400}", f"optimizer.lr: {'1' * 57}..., need a finite number"),
    ("optimizer.betas=[1]", "optimizer.betas: ['1'], need a list of 2"),
    ("optimizer.betas=[0.9, b]", "optimizer.betas[1]: b, need a finite number"),
    ("model.norm=batch", "model.norm: batch, need one of layernorm, rmsnorm"),
    ("optimizer.no_decay=[head]", "optimizer.no_decay[0]: head, need one of norm, bias, embedding"),
    ("tokenizer={a: 1}", "tokenizer: {'a': '1'}, need text"),
    ("run.name=", "run.name: null, need text"),
    ("run.name=${nothing}", "run.name: Interpolation key 'nothing' not found"),
]
# Values out of range or that do not fit each other: overrides, then a part of the line.
GRAPHS = ("train.compile=true", "train.cuda_graphs=true")
REFUSED = [
    (["train.cuda_graphs=true"], "train.compile: false, need true with train.cuda_graphs"),
    ([*GRAPHS, "parallel.tensor=2"], "parallel.tensor: 2, need 1 with train.cuda_graphs"),
    ([*GRAPHS, "data.document_mask=true"], "data.document_mask: true, need false"),
    (
        [*GRAPHS, "train.activation_checkpointing=block"],
        "train.activation_checkpointing: block, need none or selective with train.cuda_graphs",
    ),
    (["optimizer.qk_clip=-1"], "optimizer.qk_clip: -1.0, need at least 0"),
    (
        ["optimizer.qk_clip=9", "model.qk_norm=head"],
        "model.qk_norm: head, need none with optimizer",
    ),
    (
        ["optimizer.qk_clip=9", "model.attention.softcap=50"],
        "model.attention.softcap: 50.0, need null with optimizer.qk_clip",
    ),
    (["model.layers=0"], "model.layers: 0, need at least 1"),
    (["model.layers=2147483648"], "model.layers: 2147483648, need less than 2147483648"),
    (["train.loss_scale=1e39"], "train.loss_scale: 1e+39, need at most 4294967296"),
    (["train.spike_loss=1"], "train.spike_loss: 1.0, need more than 1, or 0 for never"),
    (['run.name=""'], "run.name: empty, need a name"),
    (['run.directory=""'], "run.directory: empty, need a folder"),
    (["run.directory=~/runs/a"], "run.directory: ~/runs/a, need it without ~, as $HOME"),
    (["model.heads=5"], "model.heads: 5, must divide model.hidden (64)"),
    (["model.kv_heads=3"], "model.kv_heads: 3, must divide model.heads (4)"),
    *[
        (["model.position=rotary", f"model.rotary_fraction={fraction}"], said)
        for fraction, said in (
            ("0", "model.rotary_fraction: 0.0, must be above 0"),
            ("1.5", "model.rotary_fraction: 1.5, must be"),
            ("0.2", "even number of rotating dimensions (2 or more) in a head of 16"),
        )
    ],
    (["model.rotary_scaling={factor: 8}"], "need null, or model.position=rotary"),
    *[
        (["model.position=rotary", f"model.rotary_scaling={{{name}: {value}}}"], f"{name}: {said}")
        for name, value, said in (
            ("factor", 0.5, "0.5, need at least 1"),
            ("high_frequency", 1, "1.0, need more than model.rotary_scaling.low_frequency (1.0)"),
        )
    ],
    *[
        (["model.position=rotary", f"model.rotary_scaling={{{name}: {value}}}"], f"{name}: {said}")
        for name, value, said in (
            ("attention_factor", 2, "2.0, need null, or model.rotary_scaling.kind=yarn"),
            ("query_growth", 0.1, "0.1, need 0, or model.rotary_scaling.kind=yarn"),
            ("truncate", "false", "False, need true, or model.rotary_scaling.kind=yarn"),
        )
    ],
    (["model.attention.window=0"], "model.attention.window: 0, need at least 1"),
    (
        ["model.attention.global_every=2"],
        "model.attention.global_every: 2, need null, or model.attention.window",
    ),
    (
        ["model.attention={window: 8, global_every: 99}"],
        "model.attention.global_every: 99, need at most model.layers",
    ),
    (
        ["model.attention.no_rotary_every=2"],
        "model.attention.no_rotary_every: 2, need null, or model.position=rotary",
    ),
    (
        ["model.attention.sinks=true", "model.dropout=0.1"],
        "model.dropout: 0.1, need 0 with model.attention.sinks",
    ),
    *[
        (["model.position=rotary", "model.bias=false", *changes], said)
        for changes, said in (
            (["model.attention.pattern=[delta]"], "pattern: ['delta'], need delta in it with"),
            (["model.attention.delta={}"], "model.attention.pattern: [], need delta in it with"),
            (
                ["model.attention={pattern: [delta], delta: {key_heads: 3, value_heads: 4}}"],
                "model.attention.delta.value_heads: 4, need a multiple of",
            ),
            (
                ["model.attention={pattern: [delta, full, full], delta: {}}", "model.layers=2"],
                "['delta', 'full', 'full'], need at most model.layers (2) of them",
            ),
            (["model.attention.latent={value_size: 200}"], "value_size: 200, need at most"),
            (["model.attention.latent={rope_size: 3}"], "rope_size: 3, need an even number"),
            (
                ["model.attention.latent={}", "model.kv_heads=1"],
                "model.kv_heads: 1, need 4 with model.attention.latent",
            ),
            (
                ["model.attention.latent={}", "model.attention.output_gate=true"],
                "model.attention.output_gate: True, need false with model.attention.latent",
            ),
            (
                ["model.attention.latent={}", "model.qkv_bias=true"],
                "model.qkv_bias: True, need false with model.attention.latent",
            ),
        )
    ],
    (["model.prediction={}"], "model.position: learned, need rotary with model.prediction"),
    (["model.norm_unit_offset=true"], "need false, or model.norm=rmsnorm"),
    (["model.norm=rmsnorm", "model.norm_bias=false"], "need true, or model.norm=layernorm"),
    (
        ["model.scaling={base_hidden: 8, base_layers: 2}", "model.scale_embedding=true"],
        "model.scale_embedding: true, need false with model.scaling",
    ),
    (
        ["model.scaling={base_layers: 2}"],
        "model.scaling.base_hidden: null, need model.hidden of the",
    ),
    (
        ["model.scaling={base_hidden: 8}"],
        "model.scaling.base_layers: null, need model.layers of the",
    ),
    (
        ["model.scaling={name: mup, base_hidden: 8, base_layers: 2}"],
        "model.scaling.base_layers: 2, need null, or model.scaling.name=completep",
    ),
    (["data.train=[{weight: 1}]"], "data.train[0].path: empty, need a corpus prefix"),
    (
        ["data.valid=[{path: a}, {path: b, weight: 0}]"],
        "data.valid[1].weight: 0.0, need more than 0",
    ),
    (["data.split=[1, 0, 0]"], "data.split: [1.0, 0.0, 0.0], need two parts"),
    (
        ["train.batch_warmup={start: 3, step_by: 2, until: 9}"],
        "train.batch_warmup.step_by: 2, must divide 5 (train.global_batch - train.batch_warmup.st",
    ),
    (
        ["data.train=[{path: a, weight: [[1, 0.5]]}]"],
        "data.train[0].weight: [[1.0, 0.5]], need [[0, weight], [step, weight], …] with steps that",
    ),
    (
        ["data.train=[{path: a, weight: [[0, 1], [5, 0]]}, {path: b, weight: [[0, 0], [9, 1]]}]"],
        "data.train: weights of step: 5, need one above 0",
    ),
    (["data.valid=[{path: a, weight: [[0, 1]]}]"], "data.valid[0].weight: [[0.0, 1.0]], need a n"),
    (
        ["data.train=[{path: a, weight: b}]"],
        "data.train[0].weight: b, need a finite number or a list",
    ),
    (
        ["data.valid=[{path: a, epochs: 2}]"],
        "data.valid[0].epochs: 2.0, need null; only",
    ),
    (["data.packing=best_fit"], "data.packing: best_fit, need none, or data.document_mask=true"),
    (["data.skip=[[1, 2], [5, 5]]"], "data.skip[1]: [5, 5], need [from, to] with 0 <= from < to"),
    (
        ["train.global_batch=8", "train.micro_batch=3"],
        "train.global_batch: 8, must be a multiple of train.micro_batch (3)",
    ),
    (
        ["schedule.name=constant", "schedule.decay_steps=5"],
        "schedule.decay_steps: 5, need null with schedule.name=constant",
    ),
    (
        ["schedule.warmup_steps=6", "schedule.decay_steps=5"],
        "schedule.warmup_steps: 6, need at most schedule.decay_steps (5)",
    ),
    (
        ["schedule.warmup_steps=6", "schedule.warmup_fraction=0.01"],
        "schedule.warmup_steps: 6, need 0 with schedule.warmup_fraction (0.01)",
    ),
    (
        ["optimizer.lr=0.1", "schedule.min_lr=0.2"],
        "schedule.min_lr: 0.2, need at most optimizer.lr (0.1)",
    ),
    (["train.steps=5", "train.stop_at=6"], "train.stop_at: 6, need 1 to train.steps (5)"),
    (
        ["partition.wires.activations.pair=int4"],
        "partition.wires.activations.pair: int4, need one of fp32, bf16, fp16, int8",
    ),
    (
        ["partition.wires.tokens.pair=int4"],
        "partition.wires.tokens.pair: int4, need one of fp32, bf16, fp16, int8",
    ),
    (
        ["partition.wires.reduce.pair=int3"],
        "partition.wires.reduce.pair: int3, need one of fp32, bf16, fp16, int8, int4",
    ),
]


@pytest.mark.parametrize(("override", "expected"), MISFITS, ids=lambda v: v[:60])
def test_unknown_keys_and_wrong_types_are_refused(base, override, expected):
    assert refusal(load_config, base, [override]).startswith(expected)


@pytest.mark.parametrize(("overrides", "expected"), REFUSED, ids=lambda v: str(v)[:60])
def test_values_that_do_not_fit_are_refused(base, overrides, expected):
    assert expected in refusal(load_config, base, overrides)


def test_every_bound_beside_a_field_is_checked():
    outside = {"at_least": -1, "above": 0, "at_most": 1, "below": 0}
    checked = set()
    for section in filter(lambda f: is_dataclass(f.type), fields(Config)):
        for option in fields(section.type):
            for bound, limit in option.metadata.items():
                if bound == RESUME:
                    continue
                config, key = Config(), f"{section.name}.{option.name}"
                wrong = limit + outside[bound]
                is_pair = isinstance(option.default, tuple)
                setattr(
                    getattr(config, section.name), option.name, (0, wrong) if is_pair else wrong
                )
                assert refusal(check, config).startswith(f"{key}[1]: " if is_pair else f"{key}: ")
                checked.add(key)
    assert len(checked) > 40


@pytest.mark.parametrize(
    ("override", "value", "expected"),
    [
        ("optimizer.lr=${oc.env:ASKED}", "inf", "optimizer.lr: inf, need a finite number"),
        ("train.steps=${oc.env:ASKED}", "9223372036854775808", "train.steps: 9223372036854775808"),
        ("train.compile=${oc.env:ASKED}", "maybe", "train.compile: maybe, need true or false"),
    ],
)
def test_a_reference_is_refused_like_its_value(base, monkeypatch, override, value, expected):
    monkeypatch.setenv("ASKED", value)
    assert refusal(load_config, base, [override]).startswith(expected)


def test_references_stand_for_numbers_and_flags(base, monkeypatch):
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("COMPILE", "true")
    chosen = ["train.steps=${oc.env:STEPS}", "train.compile=${oc.env:COMPILE}"]
    config = load_config(base, [*chosen, "train.stop_at=${train.steps}"])
    assert (config.train.steps, config.train.compile, config.train.stop_at) == (12, True, 12)


def test_a_machine_files_reference_is_refused_like_its_value(write, monkeypatch):
    monkeypatch.setenv("ASKED", "inf")
    path = write("m.yaml", "levels: {world: {}}\ndevice: {memory_gib: '${oc.env:ASKED}'}\n")
    said = f"{path}: device.memory_gib: inf, need a finite number"
    assert refusal(load_machine, str(path)) == said


def test_a_file_is_blamed_for_what_is_wrong_in_it_and_an_override_for_the_rest(write):
    path = write("a.yaml", "model: {head: 5}")
    for overrides in ([], ["train.steps=3"], ["train.steps=3.5"]):
        assert refusal(load_config, path, overrides).startswith(f"{path}: model.head: 5, no such")
    long = write("b.yaml", "many words " * 100)
    assert len(refusal(load_config, long)) < 400


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.layers=1000000000", "model.layers: 1000000000, need at most 10000"),
        ("model.hidden=1000000000", "model.hidden: 1000000000, need at most 1048576"),
        ("model.vocab_size=1000000000", "model.vocab_size: 1000000000, need at most"),
        ("model.moe={experts: 1000000000}", "model.moe.experts: 1000000000, need at most 65536"),
        (
            "model.attention.latent={rope_size: 1000000000}",
            "model.attention.latent.rope_size: 1000000000, need at most 16384",
        ),
        (
            "model.sequence_length=2000000000",
            "train.micro_batch: 2, need at most 1 with model.sequence_length (2000000000)",
        ),
    ],
)
def test_sizes_that_could_only_be_built_in_hours_are_refused_at_once(base, override, reason):
    chosen = ["train.micro_batch=2", override]
    assert refusal(load_config, base, chosen).removeprefix(f"{base}: ").startswith(reason)
