"""Runs go on from snapshots near the ranks, to the bit, and lose at most the steps between two."""

import json
import os
import re
import shutil
import zlib
from dataclasses import replace
from math import prod
from threading import Event

import pytest
import torch

from megafrontier.checkpoint.local.pending import PendingSnapshot
from megafrontier.parallel.env import identify
from megafrontier.parallel.fault_injection import VARIABLE
from megafrontier.plan.assemble import initial_values
from megafrontier.plan.resolve import resolve_plan
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.callbacks.save import Save, shards
from megafrontier.training.callbacks.snapshots import Snapshots, open_store
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.loop import run
from megafrontier.training.resume.resume import resume
from tests import runs
from tests.ranks import run_mesh

TWO = (*runs.ONE, "train.micro_batch=8", "train.steps=9")
SPLITS = (
    "parallel={tensor: pair, expert: 2, pipeline: 2}", "model.moe={experts: 4, active: 2}",
    "model.vocab_multiple=8",
)  # fmt: skip
MUON = (
    "optimizer.groups=[{match: 'matrix:blocks.*', name: muon}]", "optimizer.ema=0.9",
    "partition.wires=low",
)  # fmt: skip
OFFLOAD = ("partition.offload.optimizer=cpu", "partition.wires=low")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The option of snapshots every second step, in a folder of the test."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return f"checkpoint.local={{every: 2, folder: {tmp_path}/memory}}"


@pytest.fixture
def fault(monkeypatch):
    def choose(**what):
        monkeypatch.setenv(VARIABLE, json.dumps([{"do": "kill", "rank": 1, **what}]))

    return choose


def resumed(folder):
    """What the starts of a run went on from, and at which step."""
    found = re.findall(r"resumed from (.*) at step (\d+)", runs.log(folder / "run"))
    return [(what.partition(" (")[0], int(step)) for what, step in found]


def test_a_run_goes_on_from_the_newest_snapshot_with_the_losses_of_the_unbroken_run(
    config_file, tmp_path, memory, monkeypatch, fault
):
    unbroken = runs.run(config_file, 2, *TWO, f"run.directory={tmp_path}/unbroken")
    runs.run(config_file, 2, *TWO, memory, "train.stop_at=1")
    fault(at="step", step=8)
    assert runs.train(runs.load(config_file, *TWO, memory), 2) != 0
    monkeypatch.delenv(VARIABLE)
    lines = runs.run(config_file, 2, *TWO, memory)
    assert runs.losses(lines) == runs.losses(unbroken)
    _, (what, step) = resumed(tmp_path)
    assert what == f"snapshot of step {step}"
    assert step in (4, 6)  # that of step 6 may not have been whole
    assert list((tmp_path / "memory").glob("*/*")) == []  # the run is done


def test_a_newer_checkpoint_in_the_storage_counts(
    config_file, tmp_path, memory, monkeypatch, fault
):
    chosen = (*TWO, memory, "checkpoint.every=7", "checkpoint.asynchronous=false")
    fault(at="step", step=8)
    assert runs.train(runs.load(config_file, *chosen), 2) != 0
    monkeypatch.delenv(VARIABLE)
    runs.run(config_file, 2, *chosen)
    assert resumed(tmp_path) == [(f"{tmp_path}/run/checkpoints/step-00000007", 7)]


def test_a_late_snapshot_is_not_waited_for_and_a_failed_one_is_named(
    config_file, tmp_path, memory, fault
):
    late = "snapshot of step 4 left out, because that of step 2 is still being written; so may"
    where = {"at": "snapshot", "step": 2, "at_slice": 0}
    fault(do="wait", path=str(tmp_path / "run" / "log.txt"), message=late, **where)
    runs.run(config_file, 2, *TWO, memory)
    assert runs.log(tmp_path / "run").count(late) == 1
    fault(do="raise", error="ValueError", message="weight/x is not finite", **where)
    runs.run(config_file, 2, *TWO, memory, f"run.directory={tmp_path}/failed")
    log = runs.log(tmp_path / "failed")
    assert log.count("warning: snapshot of step 2 dropped: rank 1: weight/x is not finite\n") == 1
    assert "dropped" not in log.partition("dropped")[2]


@pytest.fixture
def copies_late(monkeypatch):
    """Copy shards only when the next step's backward is over."""
    asked, copy, wait = Event(), PendingSnapshot._copy, PendingSnapshot.wait_copied

    def copy_late(self, part):
        assert asked.wait(60)
        return copy(self, part)

    monkeypatch.setattr(PendingSnapshot, "_copy", copy_late)
    monkeypatch.setattr(PendingSnapshot, "wait_copied", lambda self: (asked.set(), wait(self))[1])


class Losses(Callback):
    def __init__(self):
        self.found = {}

    def after_step(self, trainer, result):
        self.found[result.step] = result.loss


@pytest.mark.usefixtures("copies_late")
@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [((2, 2, 2), SPLITS), ((1, 2, 2), MUON), ((1, 2, 2), OFFLOAD)],
    ids=["splits", "muon, average and errors", "offload"],
)
def test_all_states_of_all_ranks_come_back_to_the_bit_without_one_of_the_nodes(
    config_file, tmp_path, memory, sizes, chosen
):
    """Then without the other one, before a snapshot is due: a start makes new copies at once."""
    pair = f"machine.levels.pair.size={sizes[0]}"
    options = ("train.steps=5", "train.micro_batch=1", "evaluate.batches=0", pair, *chosen)
    config = runs.load(config_file, *options, memory.replace("every: 2", "every: 3"))
    (tmp_path / "run").mkdir()

    def train(mesh):
        identity = replace(identify(os.environ), host=f"node{2 * mesh.rank // mesh.world.size}")
        losses, quiet = Losses(), RunLogger(None)
        with runs.open_trainer(config, mesh) as trainer:
            store = open_store(trainer, identity, lambda: False)
            found = resume(trainer, quiet, store)
            if found is None:
                trainer.engine.initialise(initial_values(config))
            run(trainer, [losses, Snapshots(store, Save(quiet, 0))])
            trainer.engine.finish_publishing()  # offloaded masters are updated before that
            last = {s: [_crc(t) for t in tensors] for s, tensors in shards(trainer).items()}
        return losses.found, last, found and (found.local_bytes, found.fetched_bytes)

    def train_without(mesh, node):
        if mesh.rank == 0:
            (lost,) = (tmp_path / "memory").glob(f"*/*/{node}")
            shutil.rmtree(lost)
        mesh.world.barrier()
        return train(mesh)

    def body(mesh):
        return train(mesh), train_without(mesh, "node1"), train_without(mesh, "node0")

    plan = resolve_plan(config, prod(sizes))
    assert plan.default.error_feedback is ("partition.wires=low" in chosen)
    splits = plan.shape.splits
    for (unbroken, kept, _), *later in run_mesh(sizes, body, splits=splits):
        for losses, again, counts in later:
            assert losses == {step: unbroken[step] for step in (4, 5)}
            assert again == kept
            assert min(counts) > 0


def test_a_partner_that_does_not_answer_is_named_once(config_file, tmp_path, memory):
    config = runs.load(config_file, "train.steps=6", "train.micro_batch=8", *runs.ONE, memory)
    (tmp_path / "run").mkdir()
    lines = []

    class Logger(RunLogger):
        def info(self, line):
            lines.append(line)

    def body(mesh):
        identity, logger = replace(identify(os.environ), host=f"node{mesh.rank}"), Logger(None)
        with runs.open_trainer(config, mesh) as trainer:
            trainer.run_logger = logger
            trainer.engine.initialise(initial_values(config))
            store = open_store(trainer, identity, lambda: False)
            if mesh.rank == 1:
                store._server.close()
            run(trainer, [Snapshots(store, Save(logger, 0))])
        return lines, len(list((tmp_path / "memory").glob(f"*/*/node{mesh.rank}/*.entry")))

    (said, own), (_, copied) = run_mesh((2,), body)
    why = "rank 0: rank 1 at 127.0.0.1: Connection refused"
    assert said == [f"warning: snapshot of step 2: no copy on another node: {why}"]
    assert (own, copied) == (4, 2)


def _crc(tensor):
    return tensor is not None and zlib.crc32(tensor.view(torch.uint8).numpy().data)
