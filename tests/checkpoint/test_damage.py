"""Any damage to the files of a checkpoint is found, and the file is named."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import megafrontier.checkpoint
from megafrontier.checkpoint import shard_file
from megafrontier.checkpoint.commands import list_command, verify, verify_command
from megafrontier.checkpoint.format import (
    MANIFEST_PREFIX,
    CheckpointCorrupt,
    Manifest,
    add_checksum,
)
from megafrontier.checkpoint.load import Checkpoint, open_checkpoint, read_manifest
from megafrontier.checkpoint.save import save
from megafrontier.checkpoint.sets import shard_path
from megafrontier.common.checkpoints import MANIFEST
from megafrontier.common.errors import UserError
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Layout
from tests.checkpoint.helpers import BY_BLOCK, flip, load_all, own_shard, save_all


@pytest.fixture
def small(tmp_path):
    return save_small(tmp_path)


def save_small(root):
    """A checkpoint of one shard, of about a kilobyte."""
    layouts = [Layout.build("unit", [("a", (3, 7)), ("b", (5,))], 1)]
    own = [own_shard(layouts, {"weight": [torch.arange(layouts[0].numel).float()]})]
    return save(root, Manifest(7, 70, slice_elements=8), own, World.single())


@pytest.mark.parametrize("name", [MANIFEST, shard_path(0)])
def test_every_flipped_byte_of_every_file_is_found_and_its_file_named(small, name):
    path = small / name
    sound = path.read_bytes()
    assert verify(small).whole
    for at in range(len(sound)):
        flip(path, at, (0x01, 0x20, 0xFF)[at % 3])
        report = verify(small)
        assert not report.whole, f"byte {at}"
        assert report.problems[0].startswith(f"{path}: "), f"byte {at}"
        path.write_bytes(sound)
    assert verify(small).whole


@pytest.mark.parametrize("name", [MANIFEST, shard_path(0)])
def test_every_truncation_is_found(small, name):
    path = small / name
    sound = path.read_bytes()
    for size in range(len(sound)):
        path.write_bytes(sound[:size])
        with pytest.raises(CheckpointCorrupt, match=path.name):
            open_checkpoint(small)
        assert verify(small).problems[0].startswith(f"{path}: ")


@pytest.mark.parametrize("part", ["header", "payload"])
def test_a_flipped_byte_is_found_while_loading(tmp_path, part):
    path = save_all(tmp_path)
    file = path / shard_path(1)
    flip(file, 200 if part == "header" else file.stat().st_size - 5)
    with pytest.raises(CheckpointCorrupt, match=r"00000001\.safetensors"):
        load_all(open_checkpoint(path), 4, BY_BLOCK)


def test_a_missing_shard_file_is_refused_by_name(tmp_path):
    path = save_all(tmp_path)
    (path / shard_path(5)).unlink()
    with pytest.raises(CheckpointCorrupt, match=r"00000005\.safetensors: missing"):
        open_checkpoint(path)
    assert "00000005.safetensors: missing" in verify(path).problems[0]


def test_each_rank_checks_its_share_of_the_files_and_together_all(tmp_path):
    path = save_all(tmp_path)
    (path / shard_path(5)).unlink()
    for rank in (0, 2):
        open_checkpoint(path, rank, 3 if rank == 0 else 8)
    with pytest.raises(CheckpointCorrupt):
        open_checkpoint(path, 2, 3)


def test_a_half_written_folder_is_refused(tmp_path):
    path = save_all(tmp_path)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointCorrupt, match=r"step-00000100: no checkpoint\.json"):
        open_checkpoint(path)


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"what")
    with pytest.raises(CheckpointCorrupt, match="not a megafrontier checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / MANIFEST).write_text('{"step": 3}')
    with pytest.raises(CheckpointCorrupt, match=r"checkpoint\.json: not a megafrontier manifest"):
        open_checkpoint(tmp_path)


def _rewrite(path, **changes):
    """Change a manifest and its checksum."""
    text = (path / MANIFEST).read_text()
    values = json.loads(text) | changes
    lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in values.items())
    (path / MANIFEST).write_bytes(
        add_checksum(("{\n" + lines + "\n}\n").encode(), len(MANIFEST_PREFIX))
    )


def test_a_version_from_the_future_is_refused_as_such(small):
    _rewrite(small, version=3)
    with pytest.raises(UserError, match=r"version 3, .* reads versions 1 to 2") as caught:
        open_checkpoint(small)
    assert not isinstance(caught.value, CheckpointCorrupt)
    assert "version 3" in verify(small).problems[0]


def _only_unit(tensors, pieces=1):
    unit = {"name": "u", "numel": 128, "states": 0, "tensors": tensors}
    return {"sets": [{"name": "", "pieces": pieces, "units": [unit]}]}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"states": [{"weight": "F33"}]},
        {"states": []},
        _only_unit([["a", [3], 0], ["a", [3], 3]]),
        _only_unit([["a", [3, 2], 0, [[0, 3], [0, 1]]]]),
        _only_unit([["a", [3], 0]], pieces=3),
        {"sets": None},
        {"states": [["weight"]]},
        {"config": [1]},
        {"tokens": "many"},
        {"files": [["tokenizer", -1, "00000000"]]},
        {"slice_elements": 1.5},
        _only_unit([["a", [3.0], 0]]),
        _only_unit([["a", [-3], 0], ["b", [5], 0]]),
        _only_unit([["a", [3], 0], ["b", [5], 2]]),
        _only_unit([["a", [129], 0]]),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(small, changes):
    _rewrite(small, **changes)
    assert_refused(small, r"checkpoint\.json")


@pytest.mark.parametrize(
    ("tensors", "numel", "pieces", "slice_elements", "problem"),
    [
        ([["a", [10**15], 0]], 10**15, 1, 8, "slices in a shard file, need at most"),
        ([["a", [10**7], 0]], 10**7, 1, 1, "slices in a shard file, need at most"),
        ([["a", [10**15], 0]], 10**15, 10**12, 2**40, "shard files, need at most"),
        (
            [["a", [10**4], i, [[i, i + 1]]] for i in range(10**4)],
            10**4,
            1,
            8,
            "10000 boxes, need at most",
        ),
    ],
)
def test_a_manifest_that_would_take_for_ever_is_refused_at_once(
    small, tensors, numel, pieces, slice_elements, problem
):
    unit = {"name": "u", "numel": numel, "states": 0, "tensors": tensors}
    sets = [{"name": "", "pieces": pieces, "units": [unit]}]
    _rewrite(small, sets=sets, slice_elements=slice_elements)
    assert_refused(small, problem)


def test_a_manifest_that_is_no_json_or_too_large_is_refused(small):
    for text in (b"}", b"[" * 10**5):
        body = MANIFEST_PREFIX + b'00000000", "a": ' + text
        (small / MANIFEST).write_bytes(add_checksum(body, len(MANIFEST_PREFIX)))
        assert_refused(small, "not JSON")
    with open(small / MANIFEST, "wb") as file:
        file.truncate(2**40)
    assert_refused(small, r"1099511627776 bytes, need at most")


@pytest.fixture(params=["absolute", "..", "pipe", "device", "link"])
def outside(request, tmp_path):
    """The path in a manifest of what is no file of a checkpoint."""
    (tmp_path / "secret").write_bytes(b"")
    names = {"absolute": str(tmp_path / "secret"), "..": "../secret"}
    if request.param in names:
        return lambda root, _name: names[request.param]

    def replaced(root, name):
        (root / name).unlink(missing_ok=True)
        if request.param == "pipe":
            os.mkfifo(root / name)
        else:
            target = "/dev/zero" if request.param == "device" else tmp_path / "secret"
            (root / name).symlink_to(target)
        return name

    return replaced


def test_only_regular_files_inside_a_checkpoint_are_attached(small, outside):
    _rewrite(small, files=[[outside(small, "tokenizer.json"), 0, "00000000"]])
    assert_refused(small, "need a regular file inside the checkpoint")


@pytest.mark.parametrize("name", [MANIFEST, shard_path(0)])
def test_only_regular_files_inside_a_checkpoint_are_read(small, outside, name):
    if outside(small, name) == name:
        assert_refused(small, "need a regular file inside the checkpoint")


def test_a_set_of_files_outside_a_checkpoint_is_refused(small):
    values = json.loads((small / MANIFEST).read_text())["sets"]
    (small.parent / "elsewhere").mkdir()
    shutil.move(small / "pieces" / "00000", small.parent / "elsewhere")
    _rewrite(small, sets=[{**values[0], "name": "../../elsewhere"}])
    assert_refused(small, "need a regular file inside the checkpoint")


def test_what_opening_refuses_is_not_whole(small):
    """A header that is longer than what is written, for example."""
    file = small / shard_path(0)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = (length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8
    file.write_bytes(add_checksum(text, shard_file.CHECKSUM_OFFSET) + data[8 + length :])
    assert_refused(small, r"bytes, need \d+: cut short or grown")


def assert_refused(path, problem):
    """`open_checkpoint` and every command refuse the checkpoint in one line with exit code 2."""
    with pytest.raises(CheckpointCorrupt, match=problem) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert re.search(problem, verify(path).problems[0])
    assert verify_command(path, False) == list_command(path, False) == 2


def test_a_shard_of_another_checkpoint_or_index_is_refused(tmp_path):
    tensors = {}
    paths = [save_all(tmp_path / run, groups=BY_BLOCK, **tensors) for run in "ab"]
    shutil.copy(paths[0] / shard_path(1), paths[1] / shard_path(1))
    with pytest.raises(CheckpointCorrupt, match="is shard 1 of 8 of another checkpoint"):
        load_all(open_checkpoint(paths[1]), 1, BY_BLOCK)
    assert "of another checkpoint" in verify(paths[1]).problems[0]
    shutil.copy(paths[0] / shard_path(2), paths[0] / shard_path(1))
    assert any("is shard 2 of 8" in problem for problem in verify(paths[0]).problems)


def test_verify_lists_all_problems_and_not_only_the_first(tmp_path):
    path = save_all(tmp_path)
    (path / shard_path(0)).unlink()
    flip(path / shard_path(1), 100)
    flip(path / shard_path(2), (path / shard_path(2)).stat().st_size - 1)
    named = [problem.split(": ")[0] for problem in verify(path).problems]
    assert named == [str(path / shard_path(index)) for index in (0, 1, 2)]


def test_a_slice_that_a_file_lacks_is_found(tmp_path, monkeypatch):
    slices_of = shard_file.slices_of
    with monkeypatch.context() as patched:
        patched.setattr(shard_file, "slices_of", lambda *which: slices_of(*which)[1:])
        path = save_small(tmp_path)
    assert verify(path).problems == [f"{path / shard_path(0)}: weight/a/0: missing"]
    with pytest.raises(CheckpointCorrupt, match="8 elements of weight/a are in no file"):
        Checkpoint(path, read_manifest(path)).tensor("weight", "a")


def test_nothing_in_the_package_can_load_a_pickle():
    for path in Path(megafrontier.checkpoint.__path__[0]).glob("*.py"):
        text = path.read_text()
        for word in ("torch.load", "pickle", "eval(", "exec("):
            assert word not in text, f"{path.name}: {word}"
