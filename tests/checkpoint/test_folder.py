"""Which checkpoints are there and which are kept."""

import os
import threading

import pytest

from megafrontier.checkpoint import folder
from megafrontier.checkpoint.folder import Deletions, clean_hidden, clean_partials, delete, prune
from megafrontier.common.checkpoints import (
    MANIFEST,
    candidates,
    list_checkpoints,
    of_newest,
    step_folder,
    step_of,
)
from megafrontier.common.errors import UserError


@pytest.fixture
def root(tmp_path):
    for step in (100, 200, 300, 400, 500, 100_000_000):
        step_folder(tmp_path, step).mkdir()
        (step_folder(tmp_path, step) / MANIFEST).touch()
    for name in ("step-00000600", "step-7", "other", ".step-00000700.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000800").touch()
    return tmp_path


def steps(paths):
    return [step_of(path) for path in paths]


def test_names_of_checkpoints_hold_the_step_and_other_names_do_not(tmp_path):
    assert step_folder(tmp_path, 100).name == "step-00000100"
    assert step_of(step_folder(tmp_path, 123_456_789)) == 123_456_789
    for name in ("step-7", ".step-00000100.partial", "step-00000100.superseded", "x"):
        assert step_of(tmp_path / name) is None


def test_only_published_checkpoints_are_listed_in_order_of_steps(root):
    assert steps(list_checkpoints(root)) == [100, 200, 300, 400, 500, 100_000_000]
    assert list_checkpoints(root / "nowhere") == []


def test_candidates_come_newest_first_and_include_the_half_written(root):
    assert steps(candidates(root)) == [100_000_000, 600, 500, 400, 300, 200, 100]


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (0, 0, [100, 200, 300, 400, 500, 100_000_000]),
        (1, 0, [100_000_000]),
        (2, 0, [500, 100_000_000]),
        (2, 200, [200, 400, 500, 100_000_000]),
        (9, 0, [100, 200, 300, 400, 500, 100_000_000]),
    ],
)
def test_the_newest_and_every_nth_are_kept(root, keep, keep_every, left):
    everything = steps(list_checkpoints(root))
    hidden = prune(root, keep, keep_every)
    assert steps(list_checkpoints(root)) == left
    gone = sorted(set(everything) - set(left))
    assert [path.name for path in hidden] == [f".step-{step:08d}.removed" for step in gone]
    delete(hidden)
    assert not any(path.exists() for path in hidden)
    others = {"step-00000600", "step-7", "other", ".step-00000700.partial", "step-00000800"}
    assert others <= {path.name for path in root.iterdir()}, "what is not ours is left alone"


def test_a_link_is_deleted_and_its_target_stays(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / MANIFEST).touch()
    (root / "step-00000050").symlink_to(elsewhere)
    hidden = prune(root, 5, 0)
    assert [path.name for path in hidden] == [".step-00000050.removed", ".step-00000100.removed"]
    delete(hidden)
    assert not any(os.path.lexists(path) for path in hidden)
    assert (elsewhere / MANIFEST).exists()


def read_while_pruned(path):
    """Read the checkpoint while a training that saves faster prunes it."""
    if step_of(path) != 100:
        delete([path])
    return (path / MANIFEST).read_bytes(), path


def test_if_a_checkpoint_is_pruned_while_it_is_read_the_newest_is_taken_again(root):
    prune(root, 3, 100)
    delete([step_folder(root, step) for step in (300, 400, 500)])
    assert of_newest(root, read_while_pruned) == (b"", step_folder(root, 100))
    with pytest.raises(UserError, match="step-00000200: no such folder"):
        of_newest(step_folder(root, 200), read_while_pruned)


def test_a_checkpoint_that_cannot_be_read_is_not_replaced_by_another(root):
    (step_folder(root, 600) / MANIFEST).mkdir()
    delete([step_folder(root, 100_000_000)])
    with pytest.raises(IsADirectoryError):
        of_newest(root, lambda path: (path / MANIFEST).read_bytes())


def test_leftovers_of_killed_saves_and_deletions_are_cleaned_and_nothing_else(root):
    (root / ".step-00000100.removed").mkdir()
    (root / ".step-mine.partial").mkdir()
    before = {path.name for path in root.iterdir()}
    clean_partials(root)  # in a save, which does not wait for deletions
    assert before - {path.name for path in root.iterdir()} == {".step-00000700.partial"}
    clean_hidden(root)
    gone = before - {path.name for path in root.iterdir()}
    assert gone == {".step-00000700.partial", ".step-00000100.removed"}


def test_deletions_follow_each_other_and_delete_what_a_kill_has_left(root, monkeypatch):
    (root / ".step-00000050.removed").mkdir()
    goes_on, deleted = threading.Event(), []

    def delete_later(paths):
        assert goes_on.wait(60)
        deleted.append([path.name for path in paths])
        delete(paths)

    monkeypatch.setattr(folder, "delete", delete_later)
    deletions = Deletions()
    deletions.start(root, 5, 0)
    deletions.start(root, 4, 0)  # neither waits
    first = [".step-00000050.removed", ".step-00000100.removed"]
    assert steps(list_checkpoints(root)) == [300, 400, 500, 100_000_000]
    goes_on.set()
    deletions.wait()
    assert deleted == [first, [*first, ".step-00000200.removed"]]
    assert not list(root.glob(".step-*.removed"))
    assert deletions.problems() == []


def test_a_deletion_that_fails_is_reported_once_and_tried_again(root, monkeypatch):
    def stuck(paths):
        raise OSError(16, "Device or resource busy")

    deletions = Deletions()
    with monkeypatch.context() as patch:
        patch.setattr(folder, "delete", stuck)
        deletions.start(root, 5, 0)
        deletions.wait()
    assert [error.errno for error in deletions.problems()] == [16]
    assert deletions.problems() == []
    deletions.start(root, 0, 0)  # also if it keeps all
    deletions.wait()
    assert not list(root.glob(".step-*.removed"))
