"""The benchmarks on slow links run from their links to their tables."""

import subprocess
from pathlib import Path
from runpy import run_module

import pytest

from scripts.benchmarks.shared import links as shared_links
from scripts.benchmarks.slow_network import __main__ as slow_network
from scripts.benchmarks.slow_network.report import load

SMALL = "model.layers=2 model.sequence_length=64 train.micro_batch=1"


@pytest.fixture
def network():
    """Skips without links."""
    try:
        with shared_links.links(1):
            pass
    except shared_links.Unable as reason:
        pytest.skip(f"no slow network here: {reason}")


def test_without_root_or_its_tools_it_refuses_in_one_line(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(shared_links.Unable, match="needs root"):
        shared_links.links(1).__enter__()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(shared_links.Unable, match="apt-get install iproute2"):
        shared_links.links(1).__enter__()


def test_links_are_gone_with_their_context_and_may_be_made_again_at_once(network):
    for _ in range(3):
        with shared_links.links(2) as made:
            pass
        there = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
        assert made.bridge not in there.stdout


@pytest.mark.parametrize("words", ["--slower 0", "--warmup -1", "--overlap fll"])
def test_an_option_that_cannot_be_is_bad_input(words, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["slow_network", "OUT", *words.split()])
    with pytest.raises(SystemExit) as end:
        slow_network.main()
    assert end.value.code == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(f"slow_network: error: argument {words.split()[0]}: ")


def test_two_nodes_send_what_the_formula_says(network, tmp_path, monkeypatch):
    words = "--nodes 2 --slower 2 --accumulation 1 --rounds 1 --steps 1 --tries 1 --overlap full"
    command = ["slow_network", str(tmp_path), *words.split(), "--block-seconds", "0.05"]
    monkeypatch.setattr("sys.argv", [*command, *SMALL.split(), "--strategies", "topo low"])
    monkeypatch.setattr(slow_network, "PATIENCE_SECONDS", 0)  # other tests disturb
    monkeypatch.setattr(slow_network.Bench, "full_rate", lambda *_: 2e6)  # one turn less
    slow_network.main()
    alone, low = load(tmp_path)[1].rows
    assert alone.median_seconds > 0.3, "two blocks, once forward and twice backward"
    assert low.formula_bytes == low.ledger_bytes == pytest.approx(0.55 * low.parameters, rel=0.1)
    assert abs(low.excess) < 0.03
    assert "topo low, full overlap" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("slow_network.context", "--rounds 1", "all-gather, forward"),
        ("experts", "OUT --slower 1 --steps 1 --tokens 8 --compute 0.1", "| worst (5.3) | 1 × "),
    ],
)
def test_other_benchmarks_print_their_tables(
    network, module, words, said, tmp_path: Path, monkeypatch, capfd
):
    monkeypatch.setattr("sys.argv", [module, *words.replace("OUT", str(tmp_path)).split()])
    run_module(f"scripts.benchmarks.{module}", run_name="__main__", alter_sys=True)
    assert said in capfd.readouterr().out
