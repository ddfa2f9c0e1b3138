"""The report shows what the time of runs was spent on."""

import json
from datetime import UTC, datetime

import pytest

from megafrontier.report.draw import write_report
from megafrontier.report.goodput import describe_seconds, goodput_rows
from megafrontier.report.read import read_runs


def at(second, **values):
    return {"at": datetime.fromtimestamp(second, UTC).isoformat(), **values}


def write(directory, records, lines):
    directory.mkdir(parents=True)
    for name, rows in (("attempts.jsonl", records), ("metrics.jsonl", lines)):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def make_run(directory, failures):
    """50 steps of 10 s between failures that lose 5 of them, a save every 10 steps, and an hour in
    the queue at the end."""
    records, lines, now, step = [], [], 1e9, 0
    for number in range(failures + 1):
        end = (number + 1) * 50
        finished = {"finished": now} if number else {}
        now += 20 * bool(number)
        start = {"reached": step, "launched": now, "job": "7", "restarts": [0, 0, number]}
        records.append(at(now + 5, **start, **finished))
        now += 40
        records.append(at(now + 10, first_step=step + 1, step_seconds=10.0))
        while step < end:
            step += 1
            saved = {"saves": 3.0} if step % 10 == 1 else {}
            now += 10 + saved.get("saves", 0.0)
            lines.append(at(now, step=step, loss=2.0, step_seconds=10.0, between_seconds=saved))
        if number < failures:
            step -= 5
            del lines[-5:]
            records.append(at(now + 15, ended=70))
            now += 0
    records.append(at(now, ended=75))
    records.append(
        at(now + 3605, reached=step, launched=now + 3600, job="8", restarts=[0], finished=now)
    )
    return write(directory, records, lines)


def test_rows_say_what_share_of_the_time_was_spent_on_what(tmp_path):
    calm, stormy = (make_run(tmp_path / str(n), n) for n in (0, 4))
    rows = goodput_rows(read_runs([calm, stormy]))
    wall = 40 + 50 * 10 + 5 * 3
    assert rows["goodput"][0] == f"{500 / (wall + 5):.1%} of 9.33 minutes"
    assert rows["goodput: steps done again"][0] == ""
    lost, again = (float(rows[f"goodput: {name}"][1].split("%")[0]) for name in
                   ("steps done again", "failures"))  # fmt: skip
    assert lost == pytest.approx(100 * 200 / 3000, rel=0.2)
    assert again > 0
    assert rows["goodput: between jobs"] == ["60 minutes", "60 minutes"]


def test_the_picture_is_part_of_the_page_only_if_the_run_has_recorded_its_times(tmp_path):
    runs = [make_run(tmp_path / str(n), n) for n in (0, 4)]
    page = write_report(runs, tmp_path / "report")
    assert (tmp_path / "report" / "goodput.png").stat().st_size > 5000
    assert page.read_text().count('src="data:image/png;base64,') == 4
    old = write(tmp_path / "old", [], [{"step": 1, "loss": 2.0, "step_seconds": 1.0}])
    assert "goodput" not in write_report([old]).read_text()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (119, "119 s"), (5400, "90 minutes"), (86400, "24 hours")]
)
def test_a_length_is_in_the_largest_unit_of_which_there_are_two(seconds, text):
    assert describe_seconds(seconds) == text
