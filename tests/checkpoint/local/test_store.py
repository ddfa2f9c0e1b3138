"""Snapshots are read to the bit from wherever they are, and nothing else is ever taken."""

import math
import os
import shutil

import pytest

from megafrontier.checkpoint.local import node_folder, slots
from megafrontier.common.errors import UserError
from tests.checkpoint.helpers import ALL_IN_ONE, assert_same, flip, make_tensors
from tests.checkpoint.local.helpers import Nodes

FOUR = ("a", "a", "b", "b")


def test_a_start_reads_the_newest_snapshot_from_the_memory_of_its_nodes(tmp_path):
    nodes = Nodes(tmp_path, FOUR)
    assert nodes.take(10, 20, 30) == [[(None, None)] * 3] * 4
    step, tensors, snapshots = nodes.load()
    assert step == 30
    assert_same(tensors, make_tensors(30))
    assert snapshots[0].manifest.tokens == 30000
    assert snapshots[0].manifest.extra == {"windows": [9], "data": [30, 0]}
    assert snapshots[0].manifest.rng == {"seed": 3}
    assert snapshots[0].local_bytes > 0
    assert snapshots[0].fetched_bytes == 0
    assert nodes.log == []
    assert nodes.load(stored_step=30)[0] == 30  # of the same step that the storage has
    assert nodes.load(stored_step=31)[0] is None


def test_each_shard_is_on_two_nodes_in_two_generations(tmp_path):
    nodes = Nodes(tmp_path, FOUR)
    nodes.take(10, 20, 30)
    for host in "ab":
        assert len(nodes.files("*.shard", host)) == len(nodes.files("*.entry", host)) == 2 * 4
    nodes.copies = 0
    nodes.is_new = True
    nodes.take(10, 20, 30)
    assert len(nodes.files("*.shard", "a")) == 2 * 2


def test_what_a_new_node_lacks_comes_from_its_partner(tmp_path):
    nodes = Nodes(tmp_path, FOUR)
    nodes.take(10, 20)
    shutil.rmtree(nodes.files(host="b")[0].parent)
    step, tensors, snapshots = nodes.load()
    assert step == 20
    assert_same(tensors, make_tensors(20))
    assert snapshots[0].fetched_bytes == pytest.approx(snapshots[0].local_bytes, rel=0.1)
    assert nodes.files("*.fetched") == []


def test_a_spare_node_in_another_place_reads_it_too(tmp_path):
    nodes = Nodes(tmp_path, FOUR)
    nodes.take(10)
    nodes.hosts = ("c", "c", "a", "a")
    step, tensors, _ = nodes.load()
    assert step == 10
    assert_same(tensors, make_tensors(10))


def test_without_copies_a_lost_node_means_the_storage(tmp_path):
    nodes = Nodes(tmp_path, FOUR, copies=0)
    nodes.take(10, 20)
    shutil.rmtree(nodes.files(host="b")[0].parent)
    assert nodes.load()[0] is None
    assert nodes.log == [
        f"snapshot of step {step} refused: 2 of its 4 shards are on no node" for step in (20, 10)
    ]


def test_any_layout_reads_it(tmp_path):
    nodes = Nodes(tmp_path, FOUR)
    nodes.take(10)
    nodes.hosts, nodes.groups = ("a", "b", "c"), ALL_IN_ONE
    step, tensors, _ = nodes.load()
    assert step == 10
    assert_same(tensors, make_tensors(10))

    def body(rank):
        rank.load(0)
        counts = []
        for step in (20, 30, 40):
            rank.take(step)
            counts.append(len(nodes.files("*.shard")))
            rank.world.barrier()
        return counts

    # The snapshot of step 10 has four shards on two nodes, the others three.
    assert nodes.start(body) == [[8 + 6, 12, 12]] * 3


def test_a_flipped_byte_is_named_and_read_from_the_other_node(tmp_path):
    nodes = Nodes(tmp_path)
    nodes.take(10, 20)
    path = _shard_of(nodes, 20, "a", 0)
    flip(path, path.stat().st_size - 3)
    step, tensors, _ = nodes.load()
    assert step == 20
    assert_same(tensors, make_tensors(20))
    (line,) = nodes.log
    assert line.startswith(f"warning: snapshot: {path}: checksum does not match")
    assert line.endswith("; read from another node")


def test_damage_on_all_nodes_means_the_snapshot_before_and_then_the_storage(tmp_path):
    nodes = Nodes(tmp_path)
    nodes.take(10, 20)
    for host in "ab":
        flip(_shard_of(nodes, 20, host, 0), 3000)
    step, tensors, _ = nodes.load()
    assert step == 10
    assert_same(tensors, make_tensors(10))
    assert nodes.log[0].startswith("snapshot of step 20 refused: snapshot of step 20: shard 0 of")
    for host in "ab":
        flip(_shard_of(nodes, 10, host, 1), 3000)
    assert nodes.load()[0] is None
    assert nodes.files("*.shard") == []


@pytest.mark.parametrize("suffix", [".entry", ".layout"])
def test_a_damaged_description_is_as_good_as_none(tmp_path, suffix):
    nodes = Nodes(tmp_path)
    nodes.take(10)
    for path in nodes.files(f"*{suffix}", "a"):
        flip(path, 40)
    step, tensors, snapshots = nodes.load()
    assert step == 10
    assert_same(tensors, make_tensors(10))
    assert snapshots[0].fetched_bytes > 0


def test_a_snapshot_with_a_value_that_is_not_finite_is_never_offered(tmp_path):
    nodes = Nodes(tmp_path)
    for bad in (math.nan, math.inf, -math.inf):

        def spoil(rank, shards, bad=bad):
            if rank == 1:
                shards["exp_avg"][2][1] = bad

        nodes.take(10)
        ((first, _),), ((second, _),) = nodes.take(20, change=spoil)
        assert first is None
        assert second.startswith("exp_avg/blocks.1.attention.weight is not finite")
        assert nodes.load()[0] == 10


def test_snapshots_of_another_run_job_or_directory_are_not_taken(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path)
    nodes.take(10)
    nodes.directory = "other"
    assert nodes.load()[0] is None
    nodes.directory = "run"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert nodes.load()[0] is None
    monkeypatch.delenv("SLURM_JOB_ID")
    nodes.take(10)
    nodes.is_new = True  # the run has gone back
    assert nodes.load()[0] is None
    nodes.is_new = False
    assert nodes.load()[0] is None


def test_a_run_directory_that_was_made_anew_is_another_run(tmp_path):
    nodes = Nodes(tmp_path)
    nodes.take(10)
    shutil.rmtree(tmp_path / "run")
    assert nodes.load()[0] is None


def test_the_folder_of_another_user_is_an_error(tmp_path):
    nodes = Nodes(tmp_path)
    nodes.take(10)
    (folder,) = nodes.memory.iterdir()
    folder.chmod(0o755)
    with pytest.raises(UserError, match=r"checkpoint.local.folder: .* mode 755, need a folder of"):
        nodes.load()
    folder.rename(tmp_path / "there")
    folder.symlink_to(tmp_path / "there")
    with pytest.raises(UserError, match=r"need a folder of user \d+ with mode 700"):
        nodes.load()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_that_belongs_to_another_user_is_gone_around(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path, folder="auto")
    shared, own = tmp_path / "shared", tmp_path / "own"
    for path in (shared, own, shared / f"megafrontier-{os.geteuid()}"):
        path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)
    monkeypatch.setattr(
        "megafrontier.checkpoint.local.store.base_folders", lambda *_: [shared, own]
    )
    nodes.take(10)
    assert nodes.load()[0] == 10
    assert f"{path}: of user 12345 with mode 700, need a folder of user" in nodes.log[0]


def test_a_chosen_folder_that_is_missing_is_an_error(tmp_path):
    nodes = Nodes(tmp_path, folder=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"checkpoint.local.folder: .*nowhere.*: No such file"):
        nodes.load()


def test_a_partner_that_is_gone_is_named_and_costs_no_snapshot(tmp_path):
    nodes = Nodes(tmp_path)

    def body(rank):
        if rank.world.rank == 1:
            rank.store._server.close()
        rank.world.barrier()
        return rank.take(10)

    first, second = nodes.start(body)
    assert first == (None, "rank 1 at 127.0.0.1: Connection refused")
    assert second == (None, None)
    assert nodes.load()[0] == 10


def test_a_full_node_is_named_and_the_snapshot_before_stays(tmp_path, monkeypatch):
    nodes, allocate = Nodes(tmp_path), os.posix_fallocate

    def full(file, offset, size):
        if is_full and f"/{where}/" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, os.strerror(28))
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    is_full, where = False, "b"

    def body(rank):
        nonlocal is_full
        found = [rank.take(10)]
        is_full = True
        return [*found, rank.take(20)]

    (_, first), (_, second) = nodes.start(body)
    assert first == (None, "rank 1 at 127.0.0.1: No space left on device")
    assert second[0].endswith("shard: No space left on device")
    assert nodes.load()[0] == 10


def test_without_room_a_run_goes_on_without_snapshots_and_says_so(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path)
    monkeypatch.setattr(node_folder, "MEMORY_SHARE", 0.0)
    monkeypatch.setattr(node_folder, "is_in_memory", lambda path: True)
    assert nodes.start(lambda rank: rank.store.folder) == [None, None]
    (line,) = nodes.log
    assert "warning: checkpoint.local: no snapshots, because there is no room: rank 0 on a" in line
    assert "in memory, where snapshots take at most 0% of the host's" in line


def test_folders_of_earlier_jobs_are_removed_unless_a_process_lives(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    nodes.take(10)
    nodes.directory = "other"
    nodes.take(10)
    assert len(nodes.files("*.shard")) == 8  # another run of the same job
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    living = nodes.files("*.shard")[0].parent.parent
    lock = node_folder._lock(living / "a" / "lock", node_folder.fcntl.LOCK_SH)
    nodes.load()
    assert {path.parent.parent for path in nodes.files("*.shard")} == {living}
    lock.close()
    at_look = []
    room = node_folder.room_problem

    def look(*given):
        at_look.extend(nodes.files("*.shard"))
        return room(*given)

    monkeypatch.setattr(node_folder, "room_problem", look)
    nodes.load()
    assert nodes.files("*.shard") == at_look == []  # it makes room


def _shard_of(nodes, step, host, number):
    """The file of a shard on a node."""
    for path in nodes.files(f"*.{number}.*.entry", host):
        entry, _ = node_folder.decode_entry(path.read_bytes(), path.with_suffix(".shard"))
        if entry.manifest.step == step:
            return entry.path
    raise AssertionError(f"no shard {number} of step {step} on {host}")


def test_the_memory_of_a_snapshot_is_written_again(tmp_path):
    one = slots.Slots(tmp_path, "x")
    memory = one.begin(100, "", (1, "a"))
    assert one.begin(100, "", (2, "b")).data_ptr() == memory.data_ptr()
    with pytest.raises(OSError, match="replaced or deleted while it was written"):
        one.publish((1, "a"), b"")
    next(tmp_path.glob("*.shard")).unlink()
    with pytest.raises(OSError, match="replaced or deleted while it was written"):
        one.publish((2, "b"), b"")
    one.begin(100, "", (2, "b"))
    one.publish((2, "b"), b"")
