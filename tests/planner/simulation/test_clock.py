"""The clock of a simulated step: collectives slow the computation beside them."""

from dataclasses import replace

import pytest

from megafrontier.comm.streams import DONE
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.simulation.clock import Clock, ClockStream
from megafrontier.planner.simulation.simulate import simulate
from tests.planner.test_memory import MACHINE, config_of


@pytest.mark.parametrize(
    ("slows", "computing", "expected"),
    [
        (0.0, 10.0, 10.0),
        # Of a collective of 4 s, a shorter computation meets a part only.
        (0.25, 10.0, 11.0),
        (0.25, 2.0, 2.5),
        # They take turns, or hinder each other.
        (1.0, 10.0, 14.0),
        (1.5, 10.0, 16.0),
    ],
)
def test_computing_loses_a_share_of_a_collectives_seconds(
    slows: float, computing: float, expected: float
) -> None:
    clock = Clock()
    with clock.running():
        stream = ClockStream("world")
    stream.run(lambda: clock.communicate(4.0, "world", slows), DONE)
    clock.advance(computing)
    assert clock.now == pytest.approx(expected)
    assert clock.lost == pytest.approx(expected - computing)


def test_losses_of_collectives_side_by_side_add_up_and_those_of_a_stream_follow_each_other() -> (
    None
):
    clock = Clock()
    with clock.running():
        streams = {name: ClockStream(name) for name in ("node", "world")}
    for name, seconds, slows in (("node", 2.0, 0.5), ("world", 4.0, 0.25), ("world", 2.0, 1.0)):
        streams[name].run(lambda s=seconds, n=name, f=slows: clock.communicate(s, n, f), DONE)  # type: ignore[misc]
    ends = []
    for _ in range(8):
        clock.advance(1.0)
        ends.append(clock.now)
    assert ends == pytest.approx([1.75, 3.5, 4.75, 6.0, 8.0, 10.0, 11.0, 12.0])
    assert clock.busy["compute"] == pytest.approx(12.0)


def test_a_computation_that_waits_for_a_collective_loses_nothing() -> None:
    clock = Clock()
    with clock.running():
        stream = ClockStream("world")
    work = stream.run(lambda: clock.communicate(4.0, "world", 0.5), DONE)
    work.wait()
    clock.advance(1.0)
    assert (clock.now, clock.lost, clock.exposed["world"]) == (5.0, 0.0, 4.0)


@pytest.mark.parametrize(("slows", "fastest"), [(0.0, "full"), (0.16, "full"), (2.0, "none")])
def test_the_best_overlap_follows_from_what_collectives_cost_the_computation(
    slows: float, fastest: str
) -> None:
    levels = {name: {**level, "slows_compute": slows} for name, level in MACHINE["levels"].items()}
    seconds = {}
    for overlap in ("none", "safe", "full"):
        config = config_of({"partition.strategy": "zero3", "partition.overlap": overlap})
        config = replace(config, machine={**MACHINE, "levels": levels})
        seconds[overlap] = simulate(config, resolve_plan(config, 4)).seconds
    slowest = "none" if fastest == "full" else "full"
    assert seconds[fastest] < seconds[slowest]
    assert min(seconds.values()) == pytest.approx(seconds[fastest], rel=0.01)
