"""Random cases are the same for the same seed, valid, and kept."""

import json
import random

import pytest

from megafrontier.certify.certificate import Finding
from megafrontier.plan.refuse import check_layout
from scripts.compose import build, draw, findings, finished, judged


def test_a_case_is_drawn_again_from_its_name_and_both_layouts_can_run(tmp_path):
    values, layouts = draw(random.Random("3-1"), tmp_path)
    assert (values, layouts) == draw(random.Random("3-1"), tmp_path)
    assert values != draw(random.Random("3-2"), tmp_path)[0]
    for layout in layouts:
        check_layout(build(values | layout["values"], tmp_path), layout["ranks"])


def test_a_layout_that_cannot_end_is_a_finding(tmp_path):
    values, layouts = draw(random.Random("3-1"), tmp_path)
    layouts[0]["ranks"] += 1  # the levels do not hold so many
    (found,) = [f for f in findings(values, layouts, tmp_path) if f.status == "broken"]
    assert (found.promise, "machine.levels" in found.where) == ("runs end well", True)


@pytest.mark.parametrize(
    ("figure", "bound", "status"),
    [(2e-5, 1e-5, "proved"), (5e-5, 1e-5, "broken"), (6e-2, 1e-5, "broken"), (1e-9, 0.0, "broken")],
)
def test_a_gap_is_a_fault_unless_one_process_has_nearly_the_same_to_itself(figure, bound, status):
    finding = Finding("every gradient", "broken", figure, bound)
    assert judged(finding, rounding=8e-6).status == status


def test_a_large_gap_is_open_if_one_process_alone_differs_from_itself_by_much():
    finding = judged(Finding("every gradient", "broken", 0.14, 1e-5), rounding=0.04)
    assert (finding.status, finding.where) == ("open", "one process differs from itself by 0.04")
    finding = judged(Finding("every gradient", "broken", 0.03, 1e-5), rounding=0.04)
    assert finding.status == "proved"


def test_cases_in_the_file_are_not_run_again(tmp_path):
    path = tmp_path / "compose.jsonl"
    assert finished(path) == {}
    path.write_text(json.dumps({"case": "1-0", "status": "proved"}) + "\n")
    assert list(finished(path)) == ["1-0"]
