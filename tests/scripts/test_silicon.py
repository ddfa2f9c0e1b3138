"""The script for an accelerator: its sections go on where they ended, and compare with the host."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.benchmarks.silicon.__main__ import main, run_all
from scripts.benchmarks.silicon.equal import EXACT, FEATURES, MIXED, judge_gap
from scripts.benchmarks.silicon.sections import SECTIONS, Section


def section(name, command, least_seconds=0):
    return Section(name, least_seconds, command, command)


def test_a_section_is_run_until_it_succeeds_within_the_time(tmp_path, capsys):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "table.md").write_text("| a figure |")
    sections = [
        section("found", "platform"),
        section("failed", "json.tool nothing"),
        section("endless", "http.server 0 --bind 127.0.0.1"),
        section("late", "platform", least_seconds=100),
    ]
    arguments = argparse.Namespace(out=tmp_path, minutes=1.0, small=True, packages=tmp_path)
    run_all(sections[:2], arguments)
    arguments.minutes = 0.02
    run_all(sections[2:], arguments)
    said = capsys.readouterr().out
    endings = dict(line.split(": ") for line in said.splitlines())
    assert endings["found"].startswith("succeeded after")
    assert endings["failed"].startswith("failed with exit code")
    assert endings["endless"].startswith("out of time after")
    assert endings["late"].startswith("left out")

    arguments.minutes = 1.0
    run_all([*sections[:2], replace(sections[2], small="platform")], arguments)
    assert "found" not in capsys.readouterr().out


def test_the_report_has_the_tables_of_sections_in_their_smallest_form(tmp_path):
    words = ["silicon", str(tmp_path), "--small", "--sections", "equal", "contention"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        main()
    report = (tmp_path / "report.md").read_text()
    assert "## equal: succeeded" in report
    assert "| window | 0.0e+00, 0.0e+00 | " in report
    assert "## contention: failed with exit code 1" in report
    assert "contention: no GPU" in report


@pytest.mark.exhaustive
def test_all_sections_run_in_their_smallest_form(tmp_path):
    names = [section.name for section in SECTIONS if section.name not in ("contention", "tests")]
    with pytest.MonkeyPatch.context() as patch:
        words = ["silicon", str(tmp_path), "--small", "--minutes", "60", "--sections", *names]
        patch.setattr("sys.argv", words)
        main()
    report = (tmp_path / "report.md").read_text()
    assert report.count(": succeeded after") == len(names)


def test_a_gap_above_the_bound_and_a_missing_answer_do_not_agree():
    host = [(8.0, 1.0), (7.0, 2.0)]
    assert judge_gap(host, host, EXACT) == (True, "0.0e+00, 0.0e+00")
    other = [(8.0, 1.0), (7.0, 2.02)]
    assert judge_gap(other, host, EXACT) == (False, "0.0e+00, 1.0e-02: above the bound")
    assert judge_gap(other, host, MIXED)[0]
    assert judge_gap("no answer", host, MIXED) == (False, "no answer")
    assert judge_gap(host, "out of memory", MIXED) == (False, "host: out of memory")


def test_every_command_of_a_section_names_a_module_that_exists():
    root = Path(__file__).resolve().parents[2]
    for each in SECTIONS:
        for command in (each.command, each.small):
            module = command.split()[0]
            path = root / module.replace(".", "/")
            assert module == "pytest" or path.with_suffix(".py").is_file() or path.is_dir()
    assert FEATURES["fp8"].places == (MIXED,)
