"""The report shows what the metrics say, for any run that left some."""

import json
import math
import re
import sys

import pytest

from megafrontier.certify.certificate import FILE_NAME, Certificate, Finding
from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.config import Config, save_config
from megafrontier.report import draw
from megafrontier.report.draw import (
    level_colours,
    run_look,
    short,
    smooth,
    write_report,
)
from megafrontier.report.predicted import predicted_rows
from megafrontier.report.read import levels_of, read_runs, strategy_of
from tests.runs import make_config_file
from tests.runs import run as train

PICTURES = ("loss.png", "throughput.png", "traffic.png")


def step_line(step, **changes):
    seconds = 0.5 if step > 1 else 9.0
    return {
        "step": step,
        "loss": 2 + 8 * math.exp(-step / 20),
        "grad_norm": 1.0,
        "lr": 3e-4,
        "tokens": 1000 * step,
        "step_seconds": seconds,
        "tokens_per_second": 1000 / seconds,
        "tflops_per_device": 0.4,
        "mfu": None,
        "memory_gib": 1.5,
        "comm": {
            "pair": {"bytes": 4_000_000, "seconds": 0.01},
            "world": {
                "bytes": 1_000_000,
                "seconds": 0.04,
                "activations": {"bytes": 600_000, "seconds": 0.03, "hidden": 0.024},
            },
        },
    } | changes


@pytest.fixture
def make_run(tmp_path):
    def make(folder, lines, name=None, tail=""):
        directory = tmp_path / folder
        directory.mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / "metrics.jsonl").write_text(text + tail)
        if name:
            config = Config()
            config.run.name, config.machine = name, "frontier"
            save_config(config, directory / "config.yaml")
        return directory

    return make


def steps(last):
    return [step_line(step) for step in range(1, last + 1)]


def test_the_page_holds_everything_it_shows(make_run):
    run = make_run("a", [*steps(60), {"step": 60, "valid_loss": 2.75}], "quick <&> $\\run$")
    page = write_report([run])
    assert page == run / "report.html"
    assert all((run / name).stat().st_size > 5000 for name in PICTURES)
    text = page.read_text()
    assert text.count('src="data:image/png;base64,') == 3
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "quick &lt;&amp;&gt; $\\run$" in text
    for shown in (
        "topo",
        "pair 2 · node 4 · world",
        "60 of 1000",
        "2.7500",
        "2k",
        "4 MB",
        "1 MB",
        "600 kB, 30 ms, 80% hidden",
    ):
        assert f"{shown}<" in text


def test_several_runs_stand_side_by_side_in_a_folder_of_their_own(make_run, tmp_path, monkeypatch):
    runs = [make_run("a", steps(30), "same"), make_run("b", steps(10), "same")]
    monkeypatch.chdir(tmp_path)
    page = write_report(runs)
    assert page.resolve() == tmp_path / "report" / "report.html"
    text = page.read_text()
    assert f"same ({runs[0]})" in text
    assert f"same ({runs[1]})" in text
    assert {path.name for path in page.parent.iterdir()} == {*PICTURES, "report.html"}


def test_odd_runs_are_drawn_without_a_complaint(make_run, tmp_path, recwarn):
    skipped = {"loss": None, "grad_norm": None, "skipped": True, "comm": None}
    no_bytes = {"comm": {"world": {"bytes": 0, "seconds": 0.0}}}
    lines = [[step_line(1, **skipped)], [step_line(1, **no_bytes)], [{"step": 1, "loss": 3.0}]]
    write_report([make_run(str(i), of) for i, of in enumerate(lines)], tmp_path / "report")
    assert all((tmp_path / "report" / name).stat().st_size > 2000 for name in PICTURES)
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []


def test_a_rare_extreme_does_not_flatten_the_rest(make_run, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(draw, "_save", lambda figure, path: figures.append(figure))
    lines = [step_line(s, loss=2.0 + 0.01 * (s % 7)) for s in range(1, 2000)]
    lines[1000]["loss"] = 90.0
    draw.draw_loss(read_runs([make_run("a", lines)]), tmp_path / "loss.png")
    bottom, top = figures[0].axes[0].get_ylim()
    assert 1.9 < bottom < 2.0
    assert 2.06 < top < 2.2


def test_a_resumed_runs_later_lines_win(make_run):
    lines = [*steps(9), step_line(5, loss=1.5), {"step": 5, "valid_loss": 3.0}]
    (run,) = read_runs([make_run("a", [*lines, {"step": 5, "valid_loss": 2.0}])])
    assert [line["step"] for line in run.steps] == list(range(1, 10))
    assert run.series("loss")[1][4] == 1.5
    assert run.evaluations == [(5, 2.0)]


def test_results_of_tasks_and_named_corpora_are_rows_with_their_newest_value(make_run, tmp_path):
    found = [{"step": s, "tasks": {"arc": {"acc": s / 10}}} for s in (1, 2)]
    loss = {"step": 2, "valid_loss": 3.0, "valid_loss/wiki": 2.5}
    page = write_report([make_run("a", [step_line(1), step_line(2), *found, loss])], tmp_path / "r")
    text = page.read_text()
    assert "<td>arc: acc</td><td>0.2000</td>" in text
    assert "<td>validation loss of wiki</td><td>2.5000</td>" in text


def test_a_certificate_in_the_run_directory_is_shown_with_its_promises(make_run):
    run = make_run("a", steps(3), "certified")
    findings = [Finding.within("every gradient", 1.25e-07, 1e-5), Finding("export", "open")]
    made = Certificate("certified", 8, "other", "code", {}, "2026-11-28", findings)
    made.write(run / FILE_NAME)
    text = write_report([run]).read_text()
    for shown in ("of 2026-11-28, of another config", "proved, 1.25e-07 of 1e-05", "open"):
        assert f"{shown}" in text
    (run / FILE_NAME).write_text("{")
    assert "not readable" in write_report([run]).read_text()


def test_a_half_written_last_line_is_left_out(make_run):
    (run,) = read_runs([make_run("a", steps(3), tail='{"step": 4, "lo')])
    assert run.steps[-1]["step"] == 3


def test_traffic_and_speed_are_medians_so_that_the_first_step_does_not_count(make_run):
    first = step_line(1, comm={"pair": {"bytes": 9, "seconds": 9.0}})
    (run,) = read_runs([make_run("a", [first, *steps(9)[1:]])])
    assert run.traffic("pair", "bytes") == 4_000_000
    assert run.traffic("world", "seconds") == 0.04
    assert run.traffic("node", "bytes") is None
    assert run.median("tokens_per_second") == 2000
    assert run.levels == ["pair", "world"]


def test_a_run_without_a_config_is_named_by_its_directory(make_run):
    (run,) = read_runs([make_run("nameless", steps(2))])
    assert (run.label, run.config) == ("nameless", None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "metrics.jsonl: No such file or directory, need the directory of a run"),
        ("", "metrics.jsonl: no steps yet"),
        ('{"step": 1, "valid_loss": 3}\n', "metrics.jsonl: no steps yet"),
        ('{"step": 1}\nnonsense\n{"step": 2}\n', "metrics.jsonl:2: 'nonsense', need JSON"),
        ('{"loss": 1}\n', "metrics.jsonl:1: '{\"loss\": 1}', need JSON with a step"),
        ("[1]\n", "metrics.jsonl:1: '[1]', need JSON with a step"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys, text, reason):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_all_that_a_real_run_writes_is_read(tmp_path):
    config = make_config_file(tmp_path)
    device = "{name: cpu, matrix_tflops: 0.05, memory_gigabytes_per_second: 5}"
    machine = f"machine={{levels: {{world: {{gigabytes_per_second: 0.001}}}}, device: {device}}}"
    written = train(config, 2, machine, "train.steps=3", "evaluate.every=1")
    (run,) = read_runs([tmp_path / "run"])
    assert run.steps == [line for line in written if "valid_loss" not in line]
    assert len(run.evaluations) == 3
    assert run.levels == ["world"]
    # What plan predicts stands beside it. Bytes of the usual step are the same.
    rows = predicted_rows([run], short)
    assert list(rows) == [
        "seconds per step, predicted (measured)",
        "world: sent per step, predicted (measured)",
        "world: waited per step, predicted (measured)",
    ]
    assert all(re.fullmatch(r"[\d.e-]+ [mµ]?s \([\d.e-]+ [mµ]?s\)", rows[name][0])
               for name in rows if "sent" not in name)  # fmt: skip
    predicted, measured = rows["world: sent per step, predicted (measured)"][0].split(" (")
    assert f"{predicted})" == measured


def test_a_missing_matplotlib_is_named_with_its_install_command(make_run, monkeypatch):
    run = make_run("a", steps(3))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install megafrontier\[report\]"):
        write_report([run])


def test_smoothing_follows_a_fall_and_ignores_a_spike():
    falling = [10 - 0.1 * i for i in range(100)]
    assert smooth(falling)[50] == pytest.approx(falling[50])
    spiked = [2.0] * 100
    spiked[40] = 1000.0
    assert smooth(spiked) == [2.0] * 100
    assert smooth([3.0, 1.0]) == [3.0, 1.0]


def test_a_free_placement_is_spelt_out(tmp_path):
    config = Config()
    assert strategy_of(config) == "topo"
    config.partition.weights, config.partition.optimizer = "pair", "world"
    assert strategy_of(config) == "weights pair, optimizer world"
    config.machine = str(tmp_path / "gone.yaml")
    assert levels_of(config) == ""


def test_no_two_runs_look_alike_and_slower_levels_are_darker():
    assert len({tuple(run_look(i).values()) for i in range(28)}) == 28
    for count in range(1, 30):
        colours = level_colours([f"level{i}" for i in range(count)]).values()
        light = [sum(colour[:3]) for colour in colours]
        assert light == sorted(set(light), reverse=True)


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999.9, "B", "1 kB"),
        (4.2e9, "B", "4.2 GB"),
        (0.0123, "s", "12.3 ms"),
        (0.9999, "s", "1 s"),
        (5e-5, "s", "50 µs"),
        (163_037_184, "", "163M"),
        (0.5, "", "0.5"),
    ],
)
def test_numbers_have_three_digits_and_a_prefix(number, unit, text):
    assert short(number, unit) == text
