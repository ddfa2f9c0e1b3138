"""A kill at any moment of a snapshot's writer leaves a whole snapshot."""

import os
import shutil
import signal
from pathlib import Path

from megafrontier.checkpoint.local import pending
from tests.checkpoint.helpers import assert_same, make_tensors
from tests.checkpoint.local.helpers import Nodes
from tests.checkpoint.test_save import kill_at
from tests.processes import in_child

CALLS = [
    (Path, "unlink"),
    (os, "open"),
    (os, "posix_fallocate"),
    (pending, "slice_of"),
    (pending, "crc32_hex"),
    (Path, "write_bytes"),
    (os, "rename"),
]


def test_a_kill_at_every_second_call_of_the_writer_leaves_a_whole_snapshot(tmp_path):
    name = "embedding.weight"
    nodes = Nodes(tmp_path, ("a",), [("all", [name])])
    nodes.take(10)
    shutil.copytree(nodes.memory, tmp_path / "before")

    def killed(at: int) -> int:
        def body(rank):
            assert rank.load(0)[0].manifest.step == 10
            counter = [0]
            for owner, name in CALLS:
                kill_at(owner, name, counter, at)
            rank.take(20)
            rank.take(30)

        return in_child(lambda: nodes.start(body) == [None])

    at, code, outcomes = 1, -signal.SIGKILL, []
    while code == -signal.SIGKILL:
        shutil.rmtree(nodes.memory)
        shutil.copytree(tmp_path / "before", nodes.memory)
        code = killed(at)
        step, tensors, _ = nodes.load()
        assert_same(tensors, {s: {name: t[name]} for s, t in make_tensors(step).items()})
        outcomes.append(step)
        at += 2
    assert code == 0
    assert outcomes == sorted(outcomes)
    assert {10, 20, 30} == set(outcomes)
    assert nodes.log == []
