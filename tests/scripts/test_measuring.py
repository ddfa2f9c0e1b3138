"""What the benchmarks ask before they measure."""

import argparse
from pathlib import Path

import pytest

from scripts.benchmarks.shared import measuring


@pytest.mark.parametrize(
    ("least", "kind", "words"), [(1, int, "0 -1 x 1.5 nan"), (0, float, "inf nan -0.1")]
)
def test_a_number_that_does_not_fit_is_named(least: int, kind: type, words: str) -> None:
    for word in words.split():
        with pytest.raises(argparse.ArgumentTypeError, match=f"{word}, need a number, at least"):
            measuring.at_least(least, kind)(word)
    assert measuring.at_least(least, kind)("1") == 1


def test_a_file_without_a_folder_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    assert measuring.in_a_folder(str(tmp_path / "rows.json")) == tmp_path / "rows.json"
    with pytest.raises(argparse.ArgumentTypeError, match="is no folder"):
        measuring.in_a_folder(str(tmp_path / "none" / "rows.json"))
