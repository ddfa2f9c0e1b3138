"""What the benchmarks of one device share: turns in rounds, kept, and gone on with."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.shared import rounds

Measure = Callable[..., list[str]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Measures variants without any process; returns the turns that were made."""
    monkeypatch.setattr(rounds, "code_version", lambda: "1")

    def measure(*variants: str, size: int = 1, skipped: str = "", **options: Any) -> list[str]:
        made: list[str] = []

        def turn(task: Any, number: int, packages: Any) -> Any:
            made.append(f"{task.variant}{number}")
            lacks = "not installed" if task.variant == skipped else ""
            values = {} if lacks else {"seconds": 1.0 + number}
            return rounds.Measurement(
                task.group, task.variant, number, task.arguments, values, lacks
            )

        monkeypatch.setattr(rounds, "_turn", turn)
        tasks = [rounds.Task("group", variant, "", {"size": size}) for variant in variants]
        common = {"out": tmp_path, "rounds": 2, "minutes": None, "packages": None}
        arguments = Namespace(**(common | {"variants": None, "groups": None} | options))
        rounds.measure(tasks, arguments, lambda results: ",".join(results.variants("group")))
        return made

    return measure


def test_variants_take_turns(measured: Measure) -> None:
    assert measured("a", "b") == ["a0", "b0", "b1", "a1"]


def test_what_was_measured_is_not_measured_again(measured: Measure) -> None:
    measured("a", "b")
    assert measured("a", "b", rounds=3) == ["a2", "b2"]
    assert measured("a", "b", variants=["b"], size=2) == ["b0", "b1"]


def test_packages_are_found_from_the_starting_folder_and_say_why_they_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "of_theirs.py").write_text(
        "from scripts.benchmarks.shared.child import Unable\n"
        "def figures():\n    raise Unable('no such device')\n"
    )
    monkeypatch.chdir(tmp_path)
    turn = rounds._turn(rounds.Task("group", "a", "of_theirs:figures"), 0, Path("theirs"))
    assert (turn.values, turn.skipped) == ({}, "no such device")


def test_ratios_are_of_rounds_of_the_same_code(
    measured: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured("a", "b")
    assert rounds.Results(tmp_path).ratios("group", "a", "b", "seconds") == [1.0, 1.0]
    monkeypatch.setattr(rounds, "code_version", lambda: "2")
    measured("a", "b", variants=["a"])
    assert rounds.Results(tmp_path).ratios("group", "a", "b", "seconds") == []
    assert "commit 1, 2\n" in (tmp_path / "table.md").read_text()
