"""What the benchmark on a slow network makes of its measurements."""

import contextlib
import subprocess
from types import SimpleNamespace

import pytest

from scripts.benchmarks.slow_network import __main__ as slow_network
from scripts.benchmarks.slow_network import links as slow_network_links
from scripts.benchmarks.slow_network.bars import Bar
from scripts.benchmarks.slow_network.job import Answer
from scripts.benchmarks.slow_network.report import ALONE, Figures, Row, load, row_of


def why_no_links():
    try:
        with slow_network_links.links(1):
            return None
    except slow_network_links.Unable as reason:
        return str(reason)


def make_answer(begins, ends, **others):
    values = {
        "cpu_seconds": 1.0,
        "machine_cpu_seconds": 4.0,
        "tokens": 100,
        "parameters": 10,
        "steps_sent": 4,
        "nic_bytes": 1000,
        "nic_packets": 4,
        "formula_bytes": 40,
        "protocol_bytes": 0,
        "ledger_bytes": 40,
        "ledger_seconds": {"world": 0.5},
        "memory_bytes": 1,
        "loss": 2.0,
    }
    return Answer(begins, ends, **(values | others))


def make_row(strategy, nodes, seconds, slower=1.0, accumulation=1, **others):
    values = {"tokens": 100, "bytes_per_second": 10.0, "formula_bytes": 1.0, "parameters": 10}
    return Row(strategy, nodes, accumulation, slower, seconds=[seconds], **(values | others))


def make_figures():
    return Figures(
        [
            make_row(ALONE, 1, 1.0),
            make_row("topo exact", 1, 1.25),
            make_row(ALONE, 4, 4.0, 16.0),
            make_row("FSDP2 hybrid", 4, 12.0, 16.0),
            make_row("topo exact", 4, 10.0, 16.0, nic_bytes=60.0),
            make_row("topo exact, full overlap", 4, 6.0, 16.0, nic_bytes=60.0),
            make_row("topo low", 4, 5.0, 16.0, nic_bytes=20.0),
        ]
    )


def test_a_step_lasts_from_the_last_rank_that_begins_to_the_last_that_ends():
    answers = [make_answer([0.0, 5.0], [4.0, 8.0]), make_answer([1.0, 4.5], [3.0, 9.0])]
    row = row_of("mics", answers, per_node=1, accumulation=1)
    assert row.seconds == [3.0, 4.0]
    assert row.nic_bytes == 250, "of one node and one step, the warm-up's counted too"
    assert row.formula_bytes == 40, "of one node"
    assert row.others_cores == pytest.approx((4.0 - 2.0) / 8.0), "from the first begin to the end"


def test_bytes_on_the_nic_are_compared_without_headers_and_preambles():
    row = make_row("mics", 2, 1.0, nic_bytes=1000.0, nic_packets=5.0, formula_bytes=500.0)
    row.protocol_bytes = 155.0
    assert row.excess == pytest.approx((1000 - 5 * 66 - 155) / 500 - 1)


def test_exposed_seconds_and_efficiency_are_relative_to_computing_alone():
    figures = make_figures()
    row = figures.find("topo exact", 4, 16.0, 1)
    assert figures.exposed(row) == 6.0
    assert figures.efficiency(row) == pytest.approx((4.0 / 10.0) / (1.0 / 1.25))
    assert figures.link_seconds(row) == 6.0
    assert figures.over_bound(row) == pytest.approx(10.0 / 6.0)


def test_a_missed_bar_says_by_how_much():
    assert "missed by 50.0 %" in Bar("x", 0.5, 1.0).line()
    assert "missed by 10.0 %" in Bar("x", 1.1, 1.0, least=False).line()
    assert "reached" in Bar("x", 1.0, 1.0).line()


@pytest.mark.parametrize(
    "words",
    [
        *("--slower 0", "--slower -4", "--rounds 0", "--steps 0", "--tries 0", "--warmup -1"),
        *("--accumulation 0", "--overlap fll", "--block-seconds nan"),
    ],
)
def test_an_option_that_cannot_be_is_bad_input(words, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["slow_network.py", "OUT", *words.split()])
    with pytest.raises(SystemExit) as end:
        slow_network.parse()
    assert end.value.code == 2
    assert (
        capfd.readouterr()
        .err.splitlines()[-1]
        .startswith(f"slow_network: error: argument {words.split()[0]}: ")
    )


def fake_network(monkeypatch):
    """Neither links nor nodes."""
    nothing = contextlib.nullcontext(SimpleNamespace(run=None))
    monkeypatch.setattr(slow_network, "links", lambda count: nothing)
    monkeypatch.setattr(slow_network, "Cluster", lambda *_: nothing)


def test_an_override_that_cannot_be_is_bad_input_before_anything_runs(tmp_path, monkeypatch, capfd):
    fake_network(monkeypatch)
    out = str(tmp_path / "out")
    monkeypatch.setattr("sys.argv", ["slow_network.py", out, "data.train=[{path: /nowhere}]"])
    assert slow_network.main() == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("slow_network: /nowhere.idx: ")


def test_without_root_or_its_tools_it_refuses_in_one_line(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(slow_network_links.Unable, match="needs root"):
        slow_network_links.links(1).__enter__()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(slow_network_links.Unable, match="apt-get install iproute2"):
        slow_network_links.links(1).__enter__()


def test_links_are_gone_with_their_context_and_may_be_made_again_at_once():
    if reason := why_no_links():
        pytest.skip(f"no slow network here: {reason}")
    for _ in range(10):
        with slow_network_links.links(2) as made:
            pass
        there = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
        assert made.bridge not in there.stdout


def test_two_nodes_send_what_the_formula_says_over_a_link_that_fits_their_computing(
    tmp_path, monkeypatch
):
    """The whole way: namespaces, a rate that follows from computing, real ranks, the report."""
    if reason := why_no_links():
        pytest.skip(f"no slow network here: {reason}")
    settings = (
        "--nodes 2 --slower 2 --accumulation 1 --rounds 1 --steps 1 --tries 1 --overlap full "
        "--block-seconds 0.1 model.layers=2 model.sequence_length=64 train.micro_batch=1"
    )
    names = "topo low", "topo exact", "FSDP2 hybrid"
    command = ["slow_network.py", str(tmp_path), *settings.split(), "--strategies", *names]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(slow_network, "PATIENCE_SECONDS", 0)  # other tests disturb: no time is told
    turns, turn = [], slow_network.Bench.undisturbed
    monkeypatch.setattr(
        slow_network.Bench, "undisturbed", lambda *args: turns.append(turn(*args)) or turns[-1]
    )
    assert slow_network.main() == 0
    _, figures = load(tmp_path)
    alone, hybrid, exact, low = figures.rows
    assert alone.median_seconds > 0.6, "two blocks, once forward and twice backward"
    # A pass of all weights in bf16 is to take 0.12 of a micro-step's computing, and twice that
    # here; the turn that it follows from ran two micro-steps a step.
    computing = turns[0].median_seconds / 2
    assert (turns[0].strategy, computing > 0.6) == (alone.strategy, True)
    rate = 2 * alone.parameters / (0.12 * computing) / 2
    assert alone.bytes_per_second == pytest.approx(rate)
    for row, bytes_per_parameter in ((exact, 2.0), (low, 0.55), (hybrid, 2.0)):
        assert abs(row.excess) < 0.03, row.strategy
        assert row.formula_bytes == pytest.approx(bytes_per_parameter * row.parameters, rel=0.1)
        assert row.median_seconds > 0.6
        assert row.loss == pytest.approx(exact.loss, rel=0.01)
    assert (exact.ledger_bytes, low.ledger_bytes) == (exact.formula_bytes, low.formula_bytes)
    assert "topo low, full overlap" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "picture.png").stat().st_size > 10_000
