"""How gaps to one process are judged."""

import pytest

from megafrontier.certify.certificate import Finding
from megafrontier.certify.command import computing_alone
from megafrontier.certify.miniature import make_miniatures
from megafrontier.certify.promises import (
    MOST_ROUNDING,
    Laboratory,
    beside_rounding,
    may_be_rounding,
)
from megafrontier.certify.runs import write_corpora
from megafrontier.plan.refuse import check_layout
from tests import runs


@pytest.mark.parametrize(
    ("rounding", "status", "bound"),
    [(1e-6, "broken", 1e-5), (8e-6, "proved", 3.2e-5), (1.0, "proved", MOST_ROUNDING)],
)
def test_a_gap_is_a_fault_unless_one_process_has_nearly_the_same_to_itself(rounding, status, bound):
    found = beside_rounding(
        Finding("every gradient", "broken", 2e-5, 1e-5), rounding, MOST_ROUNDING
    )
    assert (found.status, found.figure, found.bound) == (status, 2e-5, pytest.approx(bound))


def test_no_rounding_excuses_a_large_gap_or_values_that_must_be_equal():
    large = Finding("losses", "broken", 2e-4, 1e-5)
    assert beside_rounding(large, rounding=1.0, most=MOST_ROUNDING).status == "broken"
    assert not may_be_rounding(Finding("tokens", "broken", 1e-9, 0.0))
    assert not may_be_rounding(Finding("losses", "proved", 1e-6, 1e-5))


@pytest.mark.parametrize("init", ["gpt2", "neox"])
def test_one_process_with_other_last_bits_differs_from_itself_whatever_init_it_has(tmp_path, init):
    config = runs.load(runs.make_config_file(tmp_path), *runs.ONE, f"model.init={init}")
    (miniature,) = make_miniatures(config, check_layout(config, 1), tmp_path, 1)
    write_corpora(miniature.config)
    with computing_alone():
        rounding = Laboratory(tmp_path).rounding(miniature.alone)
    assert 1e-7 < rounding < 1e-4
