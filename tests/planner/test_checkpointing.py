"""`activation_checkpointing: auto` fills a memory budget and recomputes as little as possible."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.config import Config, check
from megafrontier.model.recompute.checkpointing import Mode
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.auto import choose_layout
from megafrontier.planner.checkpointing import MODES, cheapest, fill_memory, operations
from megafrontier.planner.search import CandidateLayout, search
from megafrontier.planner.simulation.rates import UNKNOWN
from megafrontier.planner.simulation.simulate import simulate
from tests import runs
from tests.planner.test_memory import WORST, config_of

TENSOR = {"partition.strategy": "topo", "parallel.tensor": 2}


def with_mode(config: Config, mode: Any, memory: float | None = None) -> Config:
    train = replace(config.train, activation_checkpointing=mode, memory_gib=memory)
    return replace(config, train=train)


def of_layers(case: dict[str, Any], layers: int = 8) -> Config:
    config = config_of(case)
    return replace(config, model=replace(config.model, layers=layers))


@pytest.mark.parametrize("saved", [(2, 20, 34), (1, 3, 34), (2, 33, 34)])
def test_no_other_modes_that_fit_recompute_less(saved: tuple[int, int, int]) -> None:
    sizes = dict(zip(MODES, saved, strict=True))

    def need(modes: Sequence[Mode]) -> int:
        return sum(sizes[mode] for mode in modes)

    for budget in range(0, 6 * 34 + 5, 5):
        found = cheapest(6, lambda modes, most=budget: need(modes) <= most)
        others = [m for m in combinations_with_replacement(MODES, 6) if need(m) <= budget]
        best = min(map(operations, others), default=operations(["block"]))
        assert operations(found) == pytest.approx(best)
        assert need(found) <= budget or found == ["block"] * 6


def check_budget(case: dict[str, Any]) -> None:
    """A budget between the least and the most that a rank may need is kept, and used."""
    config = of_layers(case)
    plan = resolve_plan(config, 4)
    least, most = (simulate(with_mode(config, mode), plan).worst_gib for mode in ("block", "none"))
    budget = (least + most) / 2
    chosen, predicted = fill_memory(config, plan, budget)
    assert predicted <= budget
    layout = CandidateLayout.of((), with_mode(config, "auto", budget), 4)  # as a plan has it
    assert layout.config == chosen
    assert layout.step.worst_gib == pytest.approx(predicted, rel=WORST)
    assert predicted > budget - (most - least) / 4
    if plan.division.ranks == 1:
        assert chosen.checkpointing == sorted(chosen.checkpointing, key=MODES.index)


def test_a_rank_needs_what_was_predicted_and_fills_the_budget() -> None:
    check_budget(TENSOR)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        {"parallel.pipeline": 2},
        {"parallel.pipeline": 2, "parallel.schedule": "interleaved", "parallel.stages_per_rank": 2},
        {"partition.strategy": "zero3", "train.precision": "bf16", "partition.overlap": "safe"},
        {"parallel.context": 2, "train.micro_batch": 4},
    ],
)
def test_other_layouts_fill_the_budget(case: dict[str, Any]) -> None:
    check_budget(case)


@pytest.mark.exhaustive
def test_layouts_of_a_plan_keep_the_budget() -> None:
    config = of_layers({**TENSOR, "train.global_batch": 8}, 4)
    budget = 0.9 * simulate(config, resolve_plan(config, 4)).gib
    layouts = search(with_mode(config, "auto", budget), 4, most=3, workers=1)
    chosen = [layout for layout in layouts if layout.overrides]
    assert chosen
    for layout in chosen:
        assert "train.activation_checkpointing=auto" in layout.overrides
        assert layout.step.gib <= budget * (1 + WORST)


def test_a_pipeline_with_auto_has_the_losses_of_one_without_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first stage, which holds more micro-batches, recomputes more."""
    path = runs.make_config_file(tmp_path)
    small = [*runs.ONE, "train.steps=2", "model.layers=4", "train.global_batch=8"]
    small += ["parallel.pipeline=2", "partition.wires.activations.world=fp32"]
    config = runs.load(path, *small)
    plan = resolve_plan(config, 2)
    sizes = [simulate(with_mode(config, mode), plan, UNKNOWN).gib for mode in ("block", "none")]
    auto = ["train.activation_checkpointing=auto", f"train.memory_gib={sum(sizes) / 2}"]
    said = "auto: activation checkpointing of 4 blocks: "
    assert main(["train", str(path), "--nproc", "2", "--dry-run", *small, *auto]) == 0
    assert said in runs.unaligned(capsys.readouterr().out)
    lines = runs.run(path, 2, *small, f"run.directory={tmp_path}/none")
    assert runs.losses(runs.run(path, 2, *small, *auto)) == runs.losses(lines)
    assert said in runs.log(tmp_path / "run")
    modes = runs.load(tmp_path / "run" / "config.yaml").train.activation_checkpointing
    assert isinstance(modes, list)
    assert operations(modes[:2]) > operations(modes[2:])


@pytest.mark.parametrize(
    ("mode", "memory", "line"),
    [
        ("auto", None, "train.activation_checkpointing: auto, need train.memory_gib or machine."),
        ("auto", 1e-6, "train.memory_gib: 1e-06 GiB for activation_checkpointing: auto, need at"),
        (["none"], None, "train.activation_checkpointing: ['none'], need 8 modes, one for each"),
        ("block", 4.0, "train.memory_gib: 4.0, need null, or train.activation_checkpointing=auto"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    mode: Any, memory: float | None, line: str
) -> None:
    config = with_mode(of_layers(TENSOR), mode, memory)

    def start() -> None:
        check(config)
        choose_layout(config, 4)

    with pytest.raises(UserError) as raised:
        start()
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
