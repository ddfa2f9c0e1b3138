"""Files and folders are as they were or as they are to be, whoever is killed or comes second."""

import os
import signal
import socket
import time

from megafrontier.common.files import work_folder, write_atomically
from tests.processes import in_child

NOBODY = 2**30
"""No process has such a number."""


def test_what_is_written_through_a_link_goes_where_it_leads(tmp_path):
    kept, link = tmp_path / "kept" / "real.yaml", tmp_path / "link.yaml"
    kept.parent.mkdir()
    kept.write_text("old")
    link.symlink_to("kept/real.yaml")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert kept.read_text() == "new"
    assert os.listdir(kept.parent) == ["real.yaml"]
    assert sorted(os.listdir(tmp_path)) == ["kept", "link.yaml"]


def test_a_folder_in_work_is_empty_and_is_gone_afterwards(tmp_path):
    with work_folder(tmp_path / "new" / "out") as folder:
        assert folder.parent == tmp_path / "new"
        assert os.listdir(folder) == []
        (folder / "x").touch()
    assert os.listdir(tmp_path / "new") == []


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "x").touch()

    def work_and_die():
        with work_folder(tmp_path / "out") as folder:
            (folder / "file").touch()
            (folder / "deep" / "deeper").mkdir(parents=True)
            (folder / "link").symlink_to(precious)
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work_and_die) == -signal.SIGKILL
    (left,) = tmp_path.glob(".out.*.partial")
    assert sorted(os.listdir(left)) == ["deep", "file", "link"]
    with work_folder(tmp_path / "out") as folder:
        assert os.listdir(folder) == []
    assert os.listdir(tmp_path) == ["precious"]
    assert os.listdir(precious) == ["x"]


def test_a_second_process_works_in_a_folder_of_its_own(tmp_path):
    """No lock is one on every storage."""

    def work():
        with work_folder(tmp_path / "out") as folder:
            return os.listdir(folder) == []

    with work_folder(tmp_path / "out") as folder:
        (folder / "x").touch()
        assert in_child(work) == 0
        folder.rename(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["x"]


def test_what_another_hosts_process_left_goes_when_it_has_been_silent_for_a_day(tmp_path):
    living = f"x{socket.gethostname()}"  # which ends as this host's name does
    for name, age in ((living, 3600), ("dead.example.org", 100_000)):
        folder = tmp_path / f".out.{name}.{NOBODY}-0.partial"
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    (tmp_path / ".out.partial").mkdir()  # somebody's
    with work_folder(tmp_path / "out"):
        pass
    kept = {f".out.{living}.{NOBODY}-0.partial", ".out.partial"}
    assert set(os.listdir(tmp_path)) == kept
