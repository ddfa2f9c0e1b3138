"""Links measured by `probe`, and the levels found in them."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafrontier.config import DeviceConfig, LevelConfig, MachineConfig, load_machine
from megafrontier.parallel.hierarchy import Levels
from megafrontier.probe import contention, device
from megafrontier.probe.levels import cluster, machine_of, surprises
from megafrontier.probe.links import Link, prime_levels
from scripts.benchmarks.probing import probe_shaped
from scripts.benchmarks.shared.links import Unable

GIGA = 1e9


@pytest.mark.parametrize(
    ("ranks", "per_host", "sizes"),
    [(8, 8, (2, 2, 2)), (24, 6, (2, 3, 2, 2)), (5, 1, (5,)), (4, 4, (2, 2))],
)
def test_ranks_of_a_host_come_first_in_the_strides(
    ranks: int, per_host: int, sizes: tuple[int, ...]
) -> None:
    assert prime_levels(ranks, per_host).sizes == sizes


@pytest.mark.parametrize(
    ("rates", "per_host", "names", "sizes"),
    [
        # Frontier: pairs, a node of four pairs, nodes.
        ([200, 50, 48, 12, 12.5, 11], 8, ("pair", "node", "world"), (2, 4, 8)),
        # Racks of four nodes too.
        ([200, 50, 48, 12, 12, 3, 3], 8, ("pair", "node", "level1", "world"), (2, 4, 4, 4)),
        ([400, 390, 410, 50, 50], 8, ("node", "world"), (8, 4)),
        # A fast network is still a level of its own.
        ([10, 10, 10], 4, ("node", "world"), (4, 2)),
        ([10, 10], 4, ("world",), (4,)),
    ],
)
def test_distances_of_similar_bandwidth_form_a_level(
    rates: list[float], per_host: int, names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    strides = prime_levels(2 ** len(rates), per_host)
    found = cluster(strides, [rate * GIGA for rate in rates], per_host)
    assert (found.names, found.sizes) == (names, sizes)


def test_a_slow_link_and_a_level_that_the_machine_file_states_otherwise_are_named() -> None:
    stated = MachineConfig(
        {
            "pair": LevelConfig(2, 200.0),
            "node": LevelConfig(2, 50.0),
            "world": LevelConfig(None, 12.5),
        }
    )
    strides, found = prime_levels(8, 4), Levels(("pair", "node", "world"), (2, 2, 2))
    pairs = [[200 * GIGA, 50 * GIGA, 12 * GIGA] for _ in range(8)]
    pairs[3][0] = pairs[2][0] = 48 * GIGA
    rates = [200 * GIGA, 50 * GIGA, 6 * GIGA]
    assert list(surprises(strides, pairs, found, rates, stated)) == [
        "rank 2 at distance 1: 48 GB/s, others 200",
        "rank 3 at distance 1: 48 GB/s, others 200",
        "level world: 6 GB/s measured, the machine file says 12.5",
    ]


@pytest.mark.parametrize(
    ("measured", "lines"),
    [
        (4.5, []),  # what collectives reach
        (12.0, ["level world: 12 GB/s measured, the machine file says 5"]),
        (14.0, ["level world: 14 GB/s measured, more than its line rate 12.5"]),
    ],
)
def test_a_measured_rate_is_compared_with_the_reached_one(
    measured: float, lines: list[str]
) -> None:
    stated = MachineConfig({"world": LevelConfig(None, 5.0, 12.5)})
    strides, found = prime_levels(2, 1), Levels(("world",), (2,))
    pairs = [[measured * GIGA]] * 2
    assert list(surprises(strides, pairs, found, [measured * GIGA], stated)) == lines


def test_a_written_file_has_the_line_rates_of_the_machine_file_beside_the_measured_ones() -> None:
    stated = MachineConfig({"pair": LevelConfig(2, 150.0, 200.0)})
    levels, links = Levels(("pair", "world"), (2, 4)), [Link(140e9, 5e-6), Link(4e9, 2e-5)]
    machine = machine_of(levels, links, [0.2, 0.05], DeviceConfig(), stated)
    assert machine.levels == {
        "pair": LevelConfig(2, 140.0, 200.0, 5.0, 0.2),
        "world": LevelConfig(None, 4.0, None, 20.0, 0.05),
    }


@pytest.mark.parametrize(
    ("stated", "trained"),
    [(DeviceConfig(), 90.0), (DeviceConfig(matrix_tflops=80, line_matrix_tflops=125), 64.0)],
)
def test_training_reaches_the_machine_files_proportion_of_products_alone(
    stated: DeviceConfig, trained: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "measure_products", lambda of: {256: 60.0, 512: 100.0})
    monkeypatch.setattr(device, "measure_training", lambda of: 90.0)
    found, _ = device.measure_device(torch.device("cpu"), stated)
    assert (found.matrix_tflops, found.line_matrix_tflops) == (trained, 100.0)


@pytest.mark.parametrize("loss", [0.0, 0.25, 1.5])
def test_contention_is_what_products_lose_for_each_second_of_a_collective(
    loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock on which a collective takes 10 ms, and delays products beside it by a share."""
    now = debt = 0.0

    def gather(out: object, shard: object, group: object, async_op: bool = False) -> object:
        nonlocal now, debt
        now += 0.0 if async_op else 0.01
        debt += 0.01 * loss if async_op else 0.0
        return SimpleNamespace(wait=lambda: None)

    def product() -> torch.Tensor:
        nonlocal now, debt
        now, debt = now + 0.002 + debt, 0.0
        return torch.empty(0)

    monkeypatch.setattr(contention, "_all_gather", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    world = SimpleNamespace(barrier=lambda: None, maximum=lambda seconds: seconds)
    hierarchy: Any = SimpleNamespace(device=torch.device("cpu"), world=world)
    group: Any = object()
    assert contention._loss(hierarchy, group, 8, product) == pytest.approx(loss)
    assert contention._loss(hierarchy, None, 8, product) == 0.0


SIZES, RATES, RANKS_PER_HOST = (2, 2, 2), (64e6, 24e6, 8e6), 4


def test_ranks_on_three_shaped_levels_find_them_and_their_rates(tmp_path: Path) -> None:
    written = tmp_path / "machine.yaml"
    try:
        found = probe_shaped(SIZES, RATES, RANKS_PER_HOST, written)
    except Unable as reason:
        pytest.skip(f"no slow network here: {reason}")
    levels = found["levels"]
    assert [(name, level["size"]) for name, level in levels.items()] == [
        ("pair", 2),
        ("node", 2),
        ("world", None),
    ]
    # How close depends on what else the machine does. docs/planning.md has figures.
    for level, rate in zip(levels.values(), RATES, strict=True):
        assert rate / 2 < level["gigabytes_per_second"] * GIGA < 1.5 * rate
    machine = load_machine(str(written))
    assert machine.device.ranks_per_host == RANKS_PER_HOST
    assert machine.device.matrix_tflops == found["device"]["matrix_tflops"]
