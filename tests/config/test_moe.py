"""Options of a mixture of experts that do not fit are refused in one line."""

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config import Config, check
from megafrontier.config.building import build


@pytest.mark.parametrize(
    ("moe", "line"),
    [
        (
            {"experts": 4, "active": 5},
            "model.moe.active: 5, need at most model.moe.experts (4)",
        ),
        ({"every": 13}, "model.moe.every: 13, need at most model.layers (12)"),
        ({"first": 12}, "model.moe.first: 12, need at most model.layers - model.moe.every (11)"),
        (
            {"experts": 8, "groups": {"number": 3}},
            "model.moe.groups.number: 3, does not divide model.moe.experts (8), need one of "
            "1, 2, 4, 8",
        ),
        (
            {"experts": 8, "groups": {"number": 4, "active": 5}},
            "model.moe.groups.active: 5, need at most model.moe.groups.number (4)",
        ),
        (
            {"experts": 8, "active": 3, "groups": {"number": 4, "active": 1}},
            "model.moe.groups.active: 1, need groups with at least model.moe.active (3) experts, "
            "these have 2 each",
        ),
        (
            {"shared_gate": True},
            "model.moe.shared_gate: True, need false, or model.moe.shared_experts above 0",
        ),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused_in_one_line(moe, line):
    with pytest.raises(UserError) as error:
        check(build(Config, {"model": {"moe": moe}}))
    assert str(error.value) == line


def test_a_placement_of_experts_without_experts_is_refused():
    with pytest.raises(UserError, match=r"partition.experts: given, need null, or a mixture"):
        check(build(Config, {"partition": {"experts": {"strategy": "ddp"}}}))
