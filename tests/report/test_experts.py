"""The report says how evenly experts are used, and how sure the routers are."""

from pathlib import Path

from megafrontier.report.experts import expert_rows
from megafrontier.report.read import Run


def run_of(*lines):
    return Run("a", Path("a"), None, list(lines), [])


def test_the_rows_hold_the_balance_of_the_last_steps():
    first = {
        "expert_tokens": [400, 0],
        "expert_imbalance": [2.0, 2.0],
        "expert_rank_imbalance": [1.0, 1.0],
        "router_entropy": [0.5, 0.1],
        "dropped_tokens": 0.0,
    }
    then = first | {"expert_tokens": [200, 200], "expert_imbalance": [1.0, 1.5]}
    rows = expert_rows([run_of(first, *[then] * 100), run_of({"loss": 1.0})])
    assert rows == {
        "fullest expert, tokens over the mean": ["1.25, worst block 1.5", ""],
        "fullest expert rank, tokens over the mean": ["1, worst block 1", ""],
        "share of tokens of each expert": ["0.5 to 0.5", ""],
        "router entropy, nats": ["0.3, worst block 0.1", ""],
        "dropped tokens": ["0", ""],
    }


def test_runs_without_experts_have_no_such_rows():
    assert expert_rows([run_of({"loss": 1.0})]) == {}
