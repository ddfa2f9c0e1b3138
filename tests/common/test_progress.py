"""Long work says how far it is."""

import io
import sys

import pytest

from megafrontier.common import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass at each look."""
    now = iter(range(0, 10_000, 6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))


def test_elsewhere_it_is_a_line_every_few_seconds_with_the_time_left(clock, capsys):
    assert list(progress.track("import", "abcd", 4, "parameters")) == [*"abcd"]
    assert capsys.readouterr().err.splitlines() == [
        "import: 1 of 4 parameters, 0:00:36 left",
        "import: 3 of 4 parameters, 0:00:08 left",
    ]


def test_on_a_terminal_it_is_one_line_that_is_deleted_at_the_end(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress.track("verify", "ab", 2, "files")) == [*"ab"]
    drawn = ["verify: 0 of 2 files", "verify: 1 of 2 files, 0:00:12 left", ""]
    assert sys.stderr.getvalue() == "".join(f"\r\033[K{line}\r" for line in drawn)


def test_work_goes_on_without_its_terminal(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    terminal.close()
    monkeypatch.setattr(Terminal, "isatty", lambda _: True)
    assert list(progress.track("verify", "ab", 2, "files")) == [*"ab"]
