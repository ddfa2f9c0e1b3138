"""Links measured by `probe`, and the levels found in them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafrontier.config import LevelConfig, MachineConfig, load_machine
from megafrontier.parallel.hierarchy import Levels
from megafrontier.probe.levels import cluster, surprises
from megafrontier.probe.links import prime_levels
from scripts.benchmarks.slow_network.links import NIC, Links, Unable, links

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


NODES, RANKS, RATE = 2, 2, 8e6


def test_ranks_on_a_shaped_network_find_its_levels_and_rates(tmp_path: Path) -> None:
    """Two nodes of two ranks that share a NIC: each rank has half of its rate."""
    written = tmp_path / "machine.yaml"
    try:
        with links(NODES) as made:
            made.shape(RANKS * RATE)
            outputs = [done.communicate(timeout=120) for done in start_ranks(made, written)]
    except Unable as reason:
        pytest.skip(f"no slow network here: {reason}")
    found = json.loads(outputs[0][0])
    assert list(found["levels"]) == ["node", "world"], outputs
    assert found["levels"]["node"]["size"] == RANKS
    # How close depends on what else the machine does. docs/planning.md has figures.
    rate = found["levels"]["world"]["gigabytes_per_second"] * 1e9
    assert RATE / 2 < rate < 2 * RATE
    machine = load_machine(str(written))
    assert machine.device.ranks_per_host == RANKS
    assert machine.device.matrix_tflops == found["device"]["matrix_tflops"]


def start_ranks(made: Links, written: Path) -> list[subprocess.Popen[str]]:
    """`probe` on each rank, as torchrun would start it."""
    found = []
    for rank in range(NODES * RANKS):
        node, local = divmod(rank, RANKS)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(NODES * RANKS),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": made.address(0),
            "MASTER_PORT": "3442",
            "GLOO_SOCKET_IFNAME": NIC,
            "OMP_NUM_THREADS": "1",
        }
        command = [*made.inside(node), sys.executable, "-m", "megafrontier"]
        arguments = ["probe", "--json", "--write", str(written)]
        pipe = subprocess.PIPE
        found.append(
            subprocess.Popen(
                [*command, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True
            )
        )
    return found
