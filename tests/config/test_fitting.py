"""Wrong keys and types are refused in one line, with where they stand."""

import pytest

from megafrontier.config import load_config, load_machine
from tests.config.refusals import refusal

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


def test_a_number_in_quotes_is_shown_with_them(write):
    path = write("top.yaml", "train: {steps: '2'}\noptimizer: {lr: 1.0e-3}")
    assert refusal(load_config, path) == f"{path}: train.steps: '2', need an integer"
