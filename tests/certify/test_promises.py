"""How gaps to one process are judged."""

import pytest

from megafrontier.certify.certificate import Finding
from megafrontier.certify.promises import MOST_ROUNDING, beside_rounding, may_be_rounding


@pytest.mark.parametrize(
    ("rounding", "status", "bound"),
    [(1e-6, "broken", 1e-5), (4e-6, "proved", 3.2e-5), (1.0, "proved", MOST_ROUNDING)],
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
