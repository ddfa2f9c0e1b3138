"""A run says what its ranks hold and send, and what may go wrong."""

import re

import pytest
import torch

from megafrontier.config import Config, MoEConfig, ParallelConfig
from megafrontier.plan.describe import aligned, describe_run
from megafrontier.plan.resolve import resolve_plan
from tests import runs
from tests.model.small_models import small_config


@pytest.mark.parametrize(
    ("chosen", "ranks", "line"),
    [
        (
            ["train.precision=bf16"], 8,
            "weights pair bf16, node bf16, world bf16; gradients pair bf16, node bf16, world bf16; "
            "overlap safe",
        ),
        (
            ["partition.wires=low", "partition.overlap=full"], 8,
            "weights pair fp32, node delta4, world delta4; gradients pair fp32, node int8, "
            "world int4, rotated, error feedback over world; overlap full",
        ),
        (
            ["partition.wires=low"], 4,  # the world is one node
            "weights pair fp32, node delta4; gradients pair fp32, node int8, rotated; overlap safe",
        ),
        (
            ["parallel.tensor=2", "partition.wires.activations.pair=int8"], 4,
            "weights pair fp32, node fp32; gradients pair fp32, node fp32; activations pair int8; "
            "overlap safe",
        ),
        (
            ["parallel.expert=4", "model.moe={experts: 8}", "partition.wires.tokens.node=int8"], 4,
            "weights pair fp32, node fp32; gradients pair fp32, node fp32; tokens pair fp32, node "
            "int8; overlap safe",
        ),
        (
            ["parallel.expert=4", "model.moe={experts: 8}", "parallel.dispatch=flat"], 4,
            "weights pair fp32, node fp32; gradients pair fp32, node fp32; tokens pair fp32, node "
            "fp32 (pair with the next level); overlap safe",
        ),
        (
            ["parallel.pipeline=4", "model.layers=4", "partition.wires.activations=auto",
             "machine.levels.node.gigabytes_per_second=12.5",
             "machine.levels.world.gigabytes_per_second=50"], 8,
            "weights pair fp32; gradients pair fp32; activations node int8, world fp32 (auto); "
            "overlap safe",
        ),
        (
            ["parallel.pipeline=2", "machine=laptop", "partition.wires.activations.world=int8"], 2,
            "activations world int8; overlap safe",
        ),
        (["partition.strategy=ddp"], 4, "weights not sent; gradients pair fp32, node fp32; "
         "overlap safe"),
    ],
)  # fmt: skip
def test_the_wires_of_each_level_are_logged_as_resolved(tmp_path, chosen, ranks, line):
    config = runs.load(runs.make_config_file(tmp_path), *chosen)
    plan = resolve_plan(config, ranks)
    for device in (None, torch.device("cpu")):
        assert f"wires: {line}" in describe_run(config, plan, device)


def test_a_warm_up_longer_than_the_run_is_shortened_with_a_warning(tmp_path):
    path, said = runs.make_config_file(tmp_path), "warning: schedule.warmup_steps: "
    for steps, expected in (
        (5, []),
        (4, [f"{said}5, but train.steps: 4; the warm-up is shortened to 4 steps"]),
    ):
        config = runs.load(path, "schedule.warmup_steps=5", f"train.steps={steps}")
        lines = describe_run(config, resolve_plan(config, 8))
        assert [line for line in lines if line.startswith(said)] == expected


def test_levels_that_shrink_and_padding_are_said_and_the_lines_are_a_table(tmp_path):
    config = runs.load(runs.make_config_file(tmp_path), "train.elastic=true")
    warned, *rows = describe_run(config, resolve_plan(config, 3))
    assert warned.startswith(
        "warning: machine.levels: pair 2 x node 2, but 3 ranks; the levels are "
    )
    assert warned.endswith(" shrunk to pair 1 x node 3 x world 1")
    assert rows[0] == "layout: pair 1 x node 3 x world 1 = 3 ranks, on any"
    (batch,) = (row for row in rows if row.startswith("batch: "))
    assert batch.endswith("micro-batches of 2, some padding")
    first, *table = aligned([warned, *rows])
    assert first == warned
    assert len({len(re.match(r"[a-z ]+: +", line)[0]) for line in table}) == 1
    assert [line.split() for line in table] == [row.split() for row in rows]


def test_several_communicators_at_once_are_warned_of_on_devices_on_which_they_have_hung(tmp_path):
    path = runs.make_config_file(tmp_path)
    for machine, overlap in (("frontier", "safe"), ("frontier", "full"), ("nvlink8", "full")):
        config = runs.load(path, f"machine={machine}", f"partition.overlap={overlap}")
        lines = list(describe_run(config, resolve_plan(config, 8)))
        warned = [line for line in lines if line.startswith("warning: ")]
        assert len(warned) == ((machine, overlap) == ("frontier", "full"))
        assert all("overlap: full, but RCCL " in line for line in warned)


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        (64, "pipeline: 4 stages, 1f1b, 8 micro-batches: bubble "),
        (16, "warning: pipeline: 4 stages, 1f1b, 2 micro-batches: bubble "),
    ],
)
def test_a_pipelines_bubble_is_logged_and_warned_of_if_micro_batches_are_few(tmp_path, batch, line):
    chosen = ("parallel.pipeline=4", "model.layers=7", f"train.global_batch={batch}")
    config = runs.load(runs.make_config_file(tmp_path), *chosen)
    lines = list(describe_run(config, resolve_plan(config, 16)))
    (found,) = (text for text in lines if line in text)
    assert "blocks 2, 2, 2, 1" in found


@pytest.mark.parametrize(
    ("dispatch", "rates", "joined"),
    [
        ("auto", (150, 38, 20), (1,)),
        ("auto", (40, 20, 20), (0, 1)),
        ("auto", (150, None, 20), ()),
        ("levels", (20, 20, 20), ()),
        ("flat", (150, 38, 5), (0, 1)),
    ],
)
def test_tokens_cross_levels_of_like_links_at_once(dispatch, rates, joined):
    names = ("pair", "node", "world")
    levels = {
        name: {"size": 2} | ({} if rate is None else {"gigabytes_per_second": rate})
        for name, rate in zip(names, rates, strict=True)
    }
    config = Config(
        model=small_config(moe=MoEConfig(experts=8)),
        parallel=ParallelConfig(expert=8, dispatch=dispatch),
        machine={"levels": levels},
    )
    assert resolve_plan(config, 8).joined == joined
