"""The hard timeout ends a rank in which no Python thread can run."""

import ctypes
import time
from dataclasses import replace

from megafrontier.launch.health import watchdog
from megafrontier.launch.health.liveness import Alarm
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.health.watchdog import Watchdog
from megafrontier.parallel.env import Identity
from tests.processes import in_child

HANG_SECONDS = 0.4
LONG = 60


def hold_lock(seconds):
    """Hold the GIL, as a kernel launch may that waits for its device."""
    ctypes.PyDLL(None).sleep(seconds)


SOON = replace(Timeouts.of(1, HANG_SECONDS), storage=0.1, answer=0.2)


def started(folder):
    one = Watchdog(Identity(0, 1, 0, "alone"), folder, SOON)
    one.start(None)
    with one.checking_nodes():
        time.sleep(HANG_SECONDS / 2)  # it has looked once
    return one


def assert_ends_soon_with_stacks(body, capfd):
    begin = time.monotonic()
    assert in_child(body) == 1
    assert time.monotonic() - begin < LONG / 2
    reported = capfd.readouterr().err
    assert "Timeout (" in reported
    assert "in hold_lock" in reported


def test_a_rank_whose_gil_is_never_released_ends_and_shows_where(tmp_path, capfd):
    def body():
        started(tmp_path)
        hold_lock(LONG)

    assert_ends_soon_with_stacks(body, capfd)


def test_a_rank_ends_though_its_report_holds_the_gil(tmp_path, monkeypatch, capfd):
    """The report asks the device for the last collectives, which may not answer."""
    monkeypatch.setattr(watchdog, "write_stacks", lambda *_: hold_lock(LONG))

    def body():
        started(tmp_path)
        time.sleep(LONG)

    assert_ends_soon_with_stacks(body, capfd)


def test_a_rank_that_has_left_in_order_is_not_ended(tmp_path):
    def body():
        started(tmp_path).close()
        hold_lock(3)
        return True

    assert in_child(body) == 0


def test_a_rank_that_reports_its_own_error_is_not_ended(tmp_path):
    """Leaving the groups and closing the log may take minutes."""

    def body():
        one = started(tmp_path)
        one._raise_alarm(Alarm(0, "", 1))
        hold_lock(3)
        return True

    assert in_child(body) == 0
