"""What a layout leaves of a device, by whatever asks."""

from dataclasses import replace

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config import DeviceConfig, load_config
from megafrontier.plan.footprint import buffer_gib, state_gib
from megafrontier.plan.refuse import check_memory
from megafrontier.plan.reserve import Reserve, communicators, usable_gib
from megafrontier.plan.resolve import RunPlan, resolve_plan
from megafrontier.planner.checkpointing import memory_budget
from megafrontier.planner.simulation.clock import Clock
from megafrontier.planner.simulation.dry_run import dry_mesh, dry_trainer
from megafrontier.planner.simulation.memory import Memory
from megafrontier.planner.simulation.meter import Meter
from megafrontier.planner.simulation.rates import Rates

SMALL = ["model.layers=4", "model.hidden=512", "model.heads=8", "model.vocab_size=512"]


def made(plan: RunPlan, config: object) -> int:
    """The communicators that a rank's trainer makes."""
    rates = Rates.of(plan.machine)
    clock = Clock()
    with dry_mesh(plan) as mesh, clock.running():
        meter = Meter(clock, rates.device, rates.links, Memory(512), mesh.levels_of_groups)
        with meter:
            dry_trainer(config, plan, mesh, meter, 2)  # type: ignore[arg-type]
        return len(mesh.levels_of_groups())


@pytest.mark.parametrize(
    "chosen",
    [
        (),
        ("parallel.tensor=2", "parallel.context=4"),
        ("parallel.tensor=2", "parallel.pipeline=2", "train.micro_batch=1"),
        ("parallel.expert=8", "model.moe={experts: 16, active: 2}"),
    ],
)
def test_communicators_are_those_that_a_rank_makes(chosen: tuple[str, ...]) -> None:
    config = load_config("configs/gpt-20b.yaml", [*SMALL, *chosen])
    plan = resolve_plan(config, 64)
    assert communicators(plan) == made(plan, config)


def test_a_device_keeps_context_communicators_and_holes_free() -> None:
    reserve = Reserve.of_device(DeviceConfig(name="MI250X GCD", memory_gib=64), 6)
    assert reserve.gib == pytest.approx(1 + 0.6 + 0.04 * 64)
    assert "6 communicators 0.6" in str(reserve)
    stated = DeviceConfig(name="MI250X GCD", memory_gib=64, reserved_gib=0.5)
    assert Reserve.of_device(stated, 6).gib == 0.5
    assert Reserve.of_device(DeviceConfig(name="cpu", memory_gib=10)).gib == 1


def test_nothing_is_reserved_where_no_memory_is_stated() -> None:
    plan = resolve_plan(load_config("configs/gpt-20b.yaml", ["machine=laptop"]), 1)
    assert usable_gib(plan) is None
    assert Reserve.of(plan).gib == 0


def test_a_start_refuses_what_fits_only_without_the_reserve() -> None:
    config = load_config("configs/gpt-20b.yaml", ["train.activation_checkpointing=offload"])
    plan = resolve_plan(config, 384)
    held = state_gib(config, plan) + buffer_gib(config, plan)
    machine = plan.machine
    for reserved, fits in ((0.0, True), (1.0, False)):
        device = replace(machine.device, memory_gib=held + 0.5, reserved_gib=reserved)
        small = replace(plan, machine=replace(machine, device=device))
        if fits:
            check_memory(config, small)
        else:
            with pytest.raises(UserError, match=r"machine.device.reserved_gib 1\)"):
                check_memory(config, small)


def test_auto_fills_what_the_reserve_leaves() -> None:
    config = load_config("configs/gpt-20b.yaml", ["train.activation_checkpointing=auto"])
    plan = resolve_plan(config, 384)
    assert memory_budget(config, plan)[1] == usable_gib(plan) == 64 - Reserve.of(plan).gib
