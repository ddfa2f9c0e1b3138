"""What the benchmarks of one device share: turns in rounds, kept, and gone on with."""

import errno
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rounds

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
            return rounds.Turn(task.group, task.variant, number, task.arguments, values, lacks)

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


def test_what_was_measured_of_other_code_is_measured_again(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ["a0", "a1"]
    for version, made in (("1", both), ("1", []), ("2", both), ("2+", both), ("2+", both)):
        monkeypatch.setattr(rounds, "code_version", lambda version=version: version)
        assert measured("a") == made


def test_a_row_without_figures_is_tried_once_in_each_run(measured: Measure, tmp_path: Path) -> None:
    assert measured("a", "b", skipped="a") == ["a0", "b0", "b1"]
    assert measured("a", "b") == ["a0", "a1"]
    assert (tmp_path / "table.md").read_text().endswith("a,b\n")


def test_out_of_time_no_turn_begins(measured: Measure) -> None:
    assert measured("a", minutes=-1.0) == []
    assert measured("a") == ["a0", "a1"]


def test_packages_are_found_from_the_folder_in_which_the_benchmark_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "of_theirs.py").write_text("figures = lambda: {'seconds': 2.0}")
    monkeypatch.chdir(tmp_path)
    turn = rounds._turn(rounds.Task("group", "a", "of_theirs:figures"), 0, Path("theirs"))
    assert (turn.values, turn.skipped) == ({"seconds": 2.0}, "")


def test_a_contender_that_cannot_be_imported_is_told_from_one_that_is_not_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "of_another_version.py").write_text("from json import newer")
    skipped = [
        rounds._turn(rounds.Task("group", "a", function), 0, tmp_path).skipped
        for function in ("of_another_version:figures", "of_nobody:figures")
    ]
    assert skipped[0].startswith("cannot be imported: cannot import name 'newer' from 'json'")
    assert skipped[1] == "not installed: of_nobody"


def test_turns_are_kept_when_the_disk_is_full(
    measured: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured("a")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            measured("a", "b")
    assert measured("a", "b") == ["b0", "b1"]


def test_one_out_is_of_one_benchmark(
    measured: Measure, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measured("a")
    monkeypatch.setattr(rounds, "BENCHMARK", "another")
    with pytest.raises(SystemExit) as end:
        measured("a")
    assert end.value.code == 2
    assert "another OUT" in capfd.readouterr().err


def test_a_name_that_nothing_has_is_bad_input(
    measured: Measure, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        measured("a", variants=["b"])
    assert end.value.code == 2
    assert "nothing has such a name" in capfd.readouterr().err


def test_ratios_are_of_rounds_of_the_same_code(
    measured: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured("a", "b")
    assert rounds.Results(tmp_path).ratios("group", "a", "b", "seconds") == [1.0, 1.0]
    monkeypatch.setattr(rounds, "code_version", lambda: "2")
    measured("a", "b", variants=["a"])
    assert rounds.Results(tmp_path).ratios("group", "a", "b", "seconds") == []
    assert "commit 1, 2\n" in (tmp_path / "table.md").read_text()


def test_turns_of_code_that_is_not_known_do_not_stay_beside_new_ones(
    measured: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rounds, "code_version", lambda: "1+")
    measured("a", rounds=3)
    measured("a", rounds=2)
    assert rounds.Results(tmp_path).values("group", "a", "seconds") == [1.0, 2.0]
