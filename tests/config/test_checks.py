"""Values that do not fit are refused in one line: the key, its value, what would."""

import pytest

from megafrontier.config import load_config
from tests.config.refusals import refusal

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
    (["model.dropout=1"], "model.dropout: 1.0, need less than 1"),
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
        "data.skip[0]: [0, 9223372036854775807], need [from, to] with 0 <= from < to < 2**48",
    ),
    (["data.skip=[[1]]"], "data.skip[0]: [1], need [from, to]"),
    (
        ["train.global_batch=8", "train.micro_batch=3"],
        "train.global_batch: 8, must be a multiple of train.micro_batch (3)",
    ),
    (["run.name=\\${x}"], "run.name: ${x}, need it without ${"),
    (["optimizer.betas=[0.9, 1]"], "optimizer.betas[1]: 1.0, need less than 1"),
    (
        ["train.steps=5", "schedule.warmup_steps=6"],
        "schedule.warmup_steps: 6, need at most train.steps (5)",
    ),
    (
        ["optimizer.lr=0.1", "schedule.min_lr=0.2"],
        "schedule.min_lr: 0.2, need at most optimizer.lr (0.1)",
    ),
    (["schedule.decay_fraction=2"], "schedule.decay_fraction: 2.0, need at most 1"),
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
