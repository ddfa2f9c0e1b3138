"""Long work says how far it is."""

import io
import re
import sys

import pytest

from megafrontier.common import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def take(items):
    with progress.track("verify", items, len(items), "files") as shown:
        return list(shown)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass at each look."""
    now = iter(range(0, 10_000, 6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))


def open_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


LINES = ["verify: 1 of 4 files, 0:00:36 left", "verify: 3 of 4 files, 0:00:08 left"]


def test_elsewhere_it_is_a_line_every_few_seconds_with_the_time_left(clock, capsys):
    assert take("abcd") == [*"abcd"]
    assert capsys.readouterr().err.splitlines() == LINES


def test_on_a_terminal_it_is_one_bar_that_is_deleted_at_the_end(clock, monkeypatch):
    terminal = open_terminal(monkeypatch)
    pytest.importorskip("rich")
    assert take("ab") == [*"ab"]
    shown, _, left = terminal.getvalue().rpartition("\n")
    text = re.sub(r"\x1b\[[\d;?]*\w", "", shown)
    assert re.search(r"verify [━╸╺ ]+ 0 of 2 files", text)
    assert re.search(r"verify [━╸╺ ]+ 1 of 2 files, \d:\d\d:\d\d left", text)
    assert "\n" not in text
    assert left.endswith("\x1b[2K")  # the cursor's line is empty


def test_a_line_that_stays_is_above_the_bar(clock, monkeypatch):
    terminal = open_terminal(monkeypatch)
    pytest.importorskip("rich")
    with progress.Progress("prepare") as show:
        show("1 of 2 MB read", 0.5)
        show.note("skipped [a.txt]: no text")
        show("2 of 2 MB read", 1)
    assert "skipped [a.txt]: no text\n" in terminal.getvalue()


@pytest.mark.parametrize("lack", ["rich", "cursor"])
def test_a_terminal_without_a_bar_gets_the_lines(clock, lack, monkeypatch):
    terminal = open_terminal(monkeypatch)
    if lack == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        monkeypatch.setenv("TERM", "dumb")
    assert take("abcd") == [*"abcd"]
    assert terminal.getvalue().splitlines() == LINES


def test_work_goes_on_without_its_terminal(clock, monkeypatch):
    terminal = open_terminal(monkeypatch)
    terminal.close()
    monkeypatch.setattr(Terminal, "isatty", lambda _: True)
    assert take("ab") == [*"ab"]
