"""docs/support.md says which features go together, by what the package refuses."""

import re
from itertools import islice

import pytest

from scripts.support_matrix import ALL, PAGE, pairs, refusal

NAMED = {feature.name: feature for feature in ALL}
ROW = re.compile(r"\| ([^|]+) \| ([^|]+) \| `(.+)` \|")


def refused():
    """The pairs of the page's last table, each with its line."""
    table = PAGE.read_text().partition("## Pairs")[2]
    for name, others, line in ROW.findall(table):
        yield from ((name, other, line) for other in others.split(", "))


def test_the_page_has_a_row_for_each_feature():
    table = PAGE.read_text().partition("## Pairs")[0]
    assert re.findall(r"^\| [A-Z].+? \| (.+?) \|", table, re.MULTILINE) == list(NAMED)


@pytest.mark.parametrize(("first", "second", "line"), list(refused()))
def test_a_pair_of_the_page_is_refused_in_its_line(first, second, line):
    assert refusal(NAMED[first], NAMED[second]) == line


def test_pairs_that_are_not_on_the_page_can_be_built():
    known = {pair[:2] for pair in refused()}
    others = [pair for pair in pairs() if (pair[0].name, pair[1].name) not in known]
    for first, second in islice(others, 0, None, 25):
        assert refusal(first, second) is None, (first.name, second.name)


@pytest.mark.exhaustive
def test_every_pair_that_is_not_on_the_page_can_be_built():
    known = {pair[:2] for pair in refused()}
    found = {
        (first.name, second.name) for first, second in pairs() if refusal(first, second) is not None
    }
    assert found == known
