"""Links measured by `probe`, and the levels found in them."""

from pathlib import Path

import pytest

from megafrontier.config import LevelConfig, MachineConfig, load_machine
from megafrontier.parallel.hierarchy import Levels
from megafrontier.probe.levels import cluster, surprises
from megafrontier.probe.links import prime_levels
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
