"""Layouts ranked by `plan`, and the memory that a dry run states."""

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import yaml

from megafrontier.cli import main
from megafrontier.config import (
    AttentionConfig,
    Config,
    MoEConfig,
    WiresConfig,
    config_to_dict,
    load_config,
    load_machine,
)
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner import auto
from megafrontier.planner.auto import choose_layout
from megafrontier.planner.candidates import Free, LayoutKind, candidates
from megafrontier.planner.command import plan_command
from megafrontier.planner.layers import shallow_layers, simulate_blocks
from megafrontier.planner.search import ERROR, CandidateLayout, ranked, search
from megafrontier.planner.simulation.rank import Simulated
from megafrontier.planner.simulation.simulate import simulate
from megafrontier.planner.table import table
from tests.planner.test_memory import GPU, MACHINE, config_of

NODES = 2
PAIR = "partition.gradients=node", "partition.optimizer=world"
CATEGORIES = {
    "weights",
    "gradients",
    "optimizer",
    "error_feedback",
    "buffers",
    "messages",
    "activations",
    "other",
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "small.yaml"
    values = config_to_dict(config_of({"train.global_batch": 8}))
    values["tokenizer"] = "none"
    kept = ("machine", "model", "train", "tokenizer")
    path.write_text(yaml.safe_dump({key: values[key] for key in kept}))
    return path


@pytest.fixture(scope="module")
def plans(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `plan --json --write` gives on two nodes of two ranks."""
    written = tmp_path_factory.mktemp("best") / "best.yaml"

    text = plan_command(str(config_file), [], NODES, as_json=True, write=written)
    return {**json.loads(text), "written": written}


def test_plans_have_the_documented_fields_and_the_fastest_comes_first(
    plans: dict[str, Any],
) -> None:
    found = plans["plans"]
    assert plans["nodes"] == NODES
    assert len(found) > 3
    for plan in found:
        assert set(plan["memory"]) == CATEGORIES
        assert plan["gib"] == pytest.approx(sum(plan["memory"].values()))
        assert set(plan["bytes"]) == set(plan["exposed_seconds"]) == set(MACHINE["levels"])
    seconds = [plan["step_seconds"] for plan in found if plan["fits"]]
    assert all(later * (1 + ERROR) >= earlier for earlier, later in pairwise(seconds))
    configured = [plan for plan in found if plan["configured"]]
    assert [plan["overrides"] for plan in configured] == [[]]
    gain = 1 - seconds[0] / configured[0]["step_seconds"]
    assert plans["gain_over_configured"] == pytest.approx(gain)


def test_no_layout_is_listed_twice(plans: dict[str, Any], config_file: Path) -> None:
    kinds = []
    for found in plans["plans"]:
        config = load_config(config_file, found["overrides"])
        kinds.append(LayoutKind.of(config, resolve_plan(config, 2 * NODES)))
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("llama-70b", ("partition.optimizer=world", "parallel.tensor=8")),
        ("gpt-20b", ("partition.strategy=null", "partition.weights=pair", *PAIR)),
    ],
)
def test_the_same_layout_under_other_names_is_known(name: str, chosen: tuple[str, ...]) -> None:
    """A level's name or its number of ranks; a strategy or its placement."""
    own, other = (load_config(f"configs/{name}.yaml", extra) for extra in ((), chosen))
    one, two = (LayoutKind.of(each, resolve_plan(each, 1024)) for each in (own, other))
    assert one == two
    low = load_config(f"configs/{name}.yaml", [*chosen, "partition.wires=low"])
    three = LayoutKind.of(low, resolve_plan(low, 1024))
    assert three != one
    assert three.is_low
    assert three.sibling == one.sibling


def layout(seconds: float, gib: float, *chosen: str) -> CandidateLayout:
    """One that a search has found, with these overrides."""
    config = load_config("configs/gpt-20b.yaml", chosen)
    step = Simulated(seconds, 1, 1.0, 384, {}, {}, seconds, [{"weights": gib}])
    return CandidateLayout(chosen, config, resolve_plan(config, 384), step)


def test_among_equals_the_simplest_comes_first() -> None:
    """Fewer splits before more, and less recomputation before more memory left."""
    exact = layout(1.03, 20.0)
    block = layout(1.03, 10.0, "train.activation_checkpointing=block")
    tensor = layout(1.0, 10.0, "parallel.tensor=2")
    slow = layout(1.2, 5.0, "partition.strategy=zero1")
    large = layout(0.5, 63.0, "partition.strategy=zero3")
    found = ranked([slow, tensor, block, exact, large], 8)
    assert found == [exact, block, tensor, slow, large]


def test_low_wires_are_listed_where_they_gain_and_beside_the_exact_row() -> None:
    low = "partition.wires=low"
    few = layout(0.98, 10.0, low), layout(1.0, 10.0, "partition.wires=exact")
    assert [each.overrides for each in ranked(few, 8)] == [("partition.wires=exact",)]
    gains = layout(0.9, 10.0, low)
    between = layout(0.95, 10.0, "partition.strategy=zero1")
    slower = layout(1.1, 10.0, "partition.wires=exact")
    found = ranked([slower, between, gains], 8)
    assert found == [gains, slower, between]


def test_a_table_is_narrow_and_says_what_the_best_layout_gains() -> None:
    own, best = (
        layout(2.0, 10.0),
        layout(1.0, 10.0, "parallel.tensor=8", "partition.strategy=zero3"),
    )
    lines = table(own.config, [best, own], 48, None).splitlines()
    assert max(map(len, lines)) <= 120
    text = " ".join(line.strip() for line in lines)
    assert (
        "tensor 8 · weights world · gradients world · exact · micro-batch 1 · no recompute" in text
    )
    assert "as configured: weights pair · gradients node · exact" in text
    assert "The best layout takes 50.0% less time than the configured one (2)." in lines
    assert " 1  parallel.tensor=8 partition.strategy=zero3" in lines


def test_the_written_config_is_the_best_plan(plans: dict[str, Any]) -> None:
    best = plans["plans"][0]
    config = load_config(plans["written"])
    step = simulate_blocks(config, resolve_plan(config, 2 * NODES))
    assert step.seconds == pytest.approx(best["step_seconds"])


def test_overrides_of_a_plan_give_its_step(config_file: Path, plans: dict[str, Any]) -> None:
    plan = plans["plans"][-1]
    config = load_config(config_file, plan["overrides"])
    step = simulate_blocks(config, resolve_plan(config, 2 * NODES))
    assert step.seconds == pytest.approx(plan["step_seconds"])
    assert step.gib == pytest.approx(plan["gib"])


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        (16, {"attention": AttentionConfig(8, global_every=3)}),
        # Embedding and head are longer than a block: they have the same buffer, or two.
        (12, {"vocab_size": 800}),
        (13, {"vocab_size": 800}),
    ],
)
def test_a_deep_model_is_predicted_from_two_shallow_ones(
    layers: int, changes: dict[str, Any]
) -> None:
    deep = config_of({"partition.strategy": "topo", "partition.overlap": "safe"})
    deep = replace(deep, model=replace(deep.model, layers=layers, **changes))
    whole = simulate(deep, resolve_plan(deep, 4))
    found = simulate_blocks(deep, resolve_plan(deep, 4))
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert found.gib == pytest.approx(whole.gib, rel=1e-3)
    assert found.sent == pytest.approx(whole.sent)


def test_the_peak_of_a_deep_model_may_lie_elsewhere_than_that_of_shallow_ones() -> None:
    """On an accelerator: before the gradients of a shallow model, and with those of a deep one."""
    changes = {"partition.strategy": "zero1", "train.activation_checkpointing": "block", **GPU}
    config = config_of(changes)
    config = replace(config, model=replace(config.model, vocab_size=800))
    gradients = []
    for layers in (shallow_layers(config)[-1], 18):
        deep = replace(config, model=replace(config.model, layers=layers))
        whole = simulate(deep, resolve_plan(deep, 4))
        gradients.append(whole.memory["gradients"])
    assert gradients[0] == 0 < gradients[1]
    assert simulate_blocks(deep, resolve_plan(deep, 4)).gib == pytest.approx(whole.gib, rel=1e-3)


def test_a_window_costs_less_the_shorter_it_is() -> None:
    """One as long as the sequence costs what attention without a window does."""
    whole = config_of({"partition.strategy": "ddp"})
    seconds = []
    for window in (None, whole.model.sequence_length, 64, 8):
        part = replace(whole, model=replace(whole.model, attention=AttentionConfig(window)))
        seconds.append(simulate(part, resolve_plan(part, 4)).computing)
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)
    assert seconds[1] > seconds[2] > seconds[3]


def test_overlap_hides_communication_and_none_of_it_is_lost() -> None:
    steps = {}
    for overlap in ("none", "safe", "full"):
        config = config_of({"partition.strategy": "zero3", "partition.overlap": overlap})
        steps[overlap] = simulate(config, resolve_plan(config, 4))
    assert steps["safe"].sent == steps["full"].sent
    assert steps["full"].seconds <= steps["safe"].seconds < steps["none"].seconds
    assert steps["none"].seconds == pytest.approx(steps["none"].computing)  # one timeline has all
    assert sum(steps["none"].exposed.values()) > sum(steps["safe"].exposed.values()) > 0


@pytest.mark.parametrize("pipeline", [1, 2])
def test_no_message_of_a_step_is_free(pipeline: int) -> None:
    """Neither what the step before publishes under this one, nor a pipeline's last gradients."""
    link = {"size": 2, "gigabytes_per_second": 0.001, "latency_microseconds": 0}
    machine = {**MACHINE, "levels": {**MACHINE["levels"], "pair": link}}
    chosen = {"parallel.pipeline": pipeline, "partition.strategy": "zero1"}
    config = config_of({**chosen, "partition.overlap": "full", "train.global_batch": 16})
    config = replace(config, machine=machine, model=replace(config.model, layers=2))
    step = simulate(config, resolve_plan(config, 4))
    assert step.seconds >= step.sent["pair"] / 1e6


def test_a_border_costs_what_its_wire_sends() -> None:
    """A step over a link this slow is all border: 32 bits or 8 bits and the scales."""
    link = {"size": 2, "gigabytes_per_second": 0.001}
    machine = {**MACHINE, "levels": {**MACHINE["levels"], "world": link}}
    seconds = []
    for wires in (WiresConfig(), WiresConfig(activations="auto")):
        chosen = {"parallel.pipeline": 2, "partition.strategy": "ddp", "partition.wires": wires}
        config = replace(config_of({**chosen, "train.global_batch": 8}), machine=machine)
        config = replace(config, model=replace(config.model, layers=2))
        seconds.append(simulate(config, resolve_plan(config, 4)).seconds)
    assert seconds[1] / seconds[0] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        ((), "= 4 ranks"),
        (
            ("parallel.tensor=2", "parallel.pipeline=2", "parallel.schedule=zero_bubble"),
            " 2 stages, zero_bubble, ",
        ),
    ],
)
def test_a_dry_run_says_what_a_rank_holds(
    config_file: Path, capsys: pytest.CaptureFixture[str], chosen: tuple[str, ...], line: str
) -> None:
    assert main(["train", str(config_file), "--nproc", "4", "--dry-run", *chosen]) == 0
    said = capsys.readouterr().out
    assert line in said
    assert "GiB of tensors at the peak" in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["train", "{}", "--nproc", "4", "--dry-run", "machine.device.memory_gib=0.001"],
            "megafrontier: machine.device.memory_gib: 0.001, need at least 0.0",
        ),
        (
            ["plan", "{}", "--nodes", "2", "machine.levels.world.gigabytes_per_second=null"],
            "megafrontier: machine.levels.world.gigabytes_per_second: missing, need it to plan",
        ),
        (
            ["plan", "{}", "--nodes", "2", "machine.device.memory_gib=0.0001"],
            "megafrontier: plan: ",
        ),
        (
            ["plan", "{}", "--nodes", "2", "parallel=auto", "machine.device.memory_gib=0.0001"],
            "megafrontier: parallel: auto, but no layout fits on 4 ranks, need more",
        ),
        (["plan", "{}", "--nodes", "0"], "megafrontier: --nodes: 0, need 1 or more"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(
    config_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    filled = [argument.format(config_file) for argument in arguments]
    assert main(filled) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1


def test_plans_of_a_mixture_state_both_routings_and_try_expert_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of({"train.global_batch": 8, "model.moe": MoEConfig(ffn_hidden=64)})
    config = replace(config, model=replace(config.model, layers=1))
    found = search(config, 2 * NODES, most=4, workers=1)
    loaded = replace(config, machine=load_machine(config.machine))
    tried = candidates(loaded, 2 * NODES, Free())
    assert {each.kind.splits.expert for each in tried} == {1, 2, 4}
    for layout in found:
        assert layout.step.worst_gib >= layout.step.gib
        again = load_config_of(config, layout.overrides)
        assert again.parallel == layout.config.parallel
        assert again.partition == layout.config.partition
    monkeypatch.setattr(auto, "SIMULATED", 2)
    whole = replace(config.parallel, tensor="auto")
    chosen, _ = choose_layout(replace(config, parallel=whole), 2 * NODES, workers=1)
    assert not chosen.has_auto_layout


def test_memory_does_not_depend_on_when_python_collects_garbage() -> None:
    config = config_of({"train.global_batch": 8, "model.moe": MoEConfig(ffn_hidden=64)})
    config = replace(config, model=replace(config.model, layers=2))
    plan = resolve_plan(config, 4)
    gc.collect()
    gc.disable()
    try:
        without = simulate(config, plan)
    finally:
        gc.enable()
    assert without.memory["other"] * 2**30 < 1e6
    assert without.gib == pytest.approx(simulate(config, plan).gib, rel=1e-3)


def load_config_of(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with overrides, as a user would give them."""
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(yaml.safe_dump(config_to_dict(config)))
        file.flush()
        return load_config(file.name, overrides)


def test_auto_takes_the_fastest_layout_and_says_so(config_file: Path) -> None:
    config = load_config(config_file, ["partition.strategy=auto", "parallel=auto"])
    assert config.has_auto_layout
    chosen, (line,) = choose_layout(config, 2 * NODES)
    assert not chosen.has_auto_layout
    assert line.startswith("auto: ")
    assert "partition.strategy=null partition.weights=" in line
    step = simulate(chosen, resolve_plan(chosen, 2 * NODES))
    for strategy in ("zero3", "topo", "ddp"):
        other = load_config(config_file, [f"partition.strategy={strategy}"])
        seconds = simulate(other, resolve_plan(other, 2 * NODES)).seconds
        assert step.seconds <= (1 + ERROR) * seconds
    assert choose_layout(other, 2 * NODES) == (other, [])


@pytest.mark.parametrize(
    ("split", "changes"),
    [
        # Many parameters, few tokens: hidden states of borders are the least to send.
        ("pipeline", ["train.global_batch=64", "model.hidden=256", "model.sequence_length=32"]),
        # One long sequence, and few key heads.
        (
            "context",
            [
                "train.global_batch=1",
                "train.micro_batch=1",
                "model.sequence_length=8192",
                "model.layers=2",
                "model.kv_heads=1",
            ],
        ),
    ],
)
def test_auto_takes_a_pipeline_and_context_where_they_win(
    config_file: Path, split: str, changes: list[str]
) -> None:
    slow = [*changes, "machine.levels.world.gigabytes_per_second=0.001"]
    whole = load_config(config_file, [*slow, "partition.strategy=auto", "parallel=auto"])
    chosen, _ = choose_layout(whole, 2 * NODES)
    assert getattr(chosen.parallel, split) == 2
    found = simulate_blocks(chosen, resolve_plan(chosen, 2 * NODES))
    other = {"pipeline": "partition.strategy=zero1", "context": "parallel.tensor=4"}[split]
    without = load_config(config_file, [*slow, other])
    step = simulate_blocks(without, resolve_plan(without, 2 * NODES))
    assert found.seconds < (1 - ERROR) * step.seconds


def test_auto_drops_the_copy_of_the_weights_if_no_layout_fits_with_it(config_file: Path) -> None:
    zero3 = load_config(config_file, ["partition.strategy=zero3"])
    least = simulate(zero3, resolve_plan(zero3, 2 * NODES)).gib
    short = [
        "partition.strategy=auto",
        f"machine.device.memory_gib={0.999 * least}",
        "machine.device.reserved_gib=0",
    ]
    chosen, (line,) = choose_layout(load_config(config_file, short), 2 * NODES)
    assert not chosen.partition.weights_copy
    assert "partition.weights_copy=false; predicted" in line
