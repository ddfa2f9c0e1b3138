"""Ranks that torchrun or Slurm starts train as local ranks do, and refuse bad input together."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist

from megafrontier.common.errors import BAD_INPUT, BAD_NODE, LOST
from megafrontier.parallel.fault_injection import VARIABLE
from scripts.benchmarks.shared.measuring import free_port
from tests import runs
from tests.processes import COMMAND, Forked

RANKS = 2
MACHINE = ("machine=laptop", "machine.device.ranks_per_host=2")


def torchrun(rank, ranks=RANKS):
    return {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}


def slurm(rank):
    return {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": RANKS,
        "SLURM_LOCALID": rank,
        "SLURM_STEP_ID": 0,
        "SLURMD_NODENAME": "frontier00001",
    }


def interpreter(script, arguments, environment):
    """A rank as a launcher starts it, in an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(folder, name, identity, *overrides, make=Forked):
    """Start the ranks as a launcher does. Returns (exit code, stdout, stderr) of each."""
    started = start(COMMAND, folder, name, identity, *overrides, make=make)
    ended = wait_for(started)
    return [(p.returncode, *texts) for p, texts in zip(started, ended, strict=True)]


def wait_for(started):
    """Wait for all processes and return (stdout, stderr) of each. Kills those that do not end."""
    try:
        return [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()


def start(script, folder, name, identity, *overrides, ranks=RANKS, make=Forked):
    """Start the processes of the ranks, each running `script` with the arguments of `train`."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    arguments = [
        "train", str(folder / "config.yaml"), f"run.directory={folder}/{name}", *MACHINE,
        *overrides,
    ]  # fmt: skip
    started = []
    for rank in range(ranks):
        own = {key: str(value) for key, value in (meeting | identity(rank)).items()}
        started.append(make(script, arguments, os.environ | own))
    return started


FEW_FILES = """import os, resource
if os.environ["RANK"] == "0":
    resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
"""


def test_all_ranks_are_refused_if_the_store_cannot_open_a_file_for_each_of_their_connections(
    folder,
):
    started = start(FEW_FILES.format(limit=260) + COMMAND, folder, "few-files", torchrun)
    ended = wait_for(started)
    assert [process.returncode for process in started] == [BAD_INPUT] * RANKS
    lines = [line for _, error in ended for line in error.splitlines()]
    assert len(lines) == 1
    assert "ulimit -Hn: 260 open files on " in lines[0]
    assert "need 3 for each rank, 262 for 2 ranks" in lines[0]


@pytest.fixture(scope="module")
def local(folder):
    return runs.run(folder / "config.yaml", RANKS, f"run.directory={folder}/local", *MACHINE)


@pytest.mark.parametrize(("identity", "make"), [(torchrun, interpreter), (slurm, Forked)])
def test_ranks_of_a_launcher_give_the_losses_of_local_ranks(folder, local, identity, make):
    ended = launch(folder, identity.__name__, identity, make=make)
    assert [code for code, _, _ in ended] == [0] * RANKS, ended
    found = runs.metrics(folder / identity.__name__)
    assert runs.losses(found) == runs.losses(local)
    assert runs.valid_losses(found) == runs.valid_losses(local)
    assert "step 8/8" in ended[0][1]
    assert ended[1][1] == "", "only the first rank speaks"


def test_ranks_that_torchrun_restarts_ignore_the_keys_of_the_start_before(folder):
    """With `--max-restarts`, the store keeps the refusals of ranks that could not start."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    who = lambda rank: torchrun(rank) | agent  # noqa: E731
    failed = launch(folder, "anew", who, "data.train=[{path: /nowhere}]")
    assert [code for code, _, _ in failed] == [2] * RANKS
    again = launch(folder, "anew", who, "train.steps=2")
    assert [code for code, _, _ in again] == [0] * RANKS, again


def test_another_number_of_ranks_a_host_than_in_the_machine_file_is_refused(folder):
    ended = launch(folder, "spread", slurm, "machine.device.ranks_per_host=1")
    assert [code for code, _, _ in ended] == [2] * RANKS, "the other rank must not wait"
    assert "ranks_per_host: rank 1 is local rank 1 on frontier00001, need 1" in ended[0][2]
    assert "Traceback" not in ended[0][2] + ended[1][2]


def test_bad_input_that_only_rank_0_meets_ends_all_ranks_with_code_2(folder):
    (folder / "refused" / "config.yaml").mkdir(parents=True)
    ended = launch(folder, "refused", slurm)
    assert [code for code, _, _ in ended] == [2] * RANKS
    reported = "Is a directory, need room to write\n"
    assert ended[0][2] == f"megafrontier: run.directory: {folder}/refused: {reported}"
    assert ended[1][2] == ""


def test_a_file_that_one_node_lacks_ends_all_ranks_with_one_line(folder):
    """Such as a corpus on the disk of another node. No rank waits for one that cannot start."""

    def lacking(rank):
        disk, node = folder / ("elsewhere" if rank else "here"), f"frontier0000{rank}"
        return slurm(rank) | {"SLURM_LOCALID": 0, "SLURMD_NODENAME": node, "NODE_DISK": disk}

    (folder / "here").mkdir(exist_ok=True)
    for source in folder.glob("corpus.*"):
        shutil.copy(source, folder / "here")
    corpus = "data.train=[{path: '${oc.env:NODE_DISK}/corpus'}]"
    ended = launch(folder, "lacking", lacking, corpus, "machine.device.ranks_per_host=1")
    assert [code for code, _, _ in ended] == [2] * RANKS, ended
    where = "rank 1 on frontier00001: "
    assert ended[0][2].startswith(f"megafrontier: {where}{folder}/elsewhere/corpus.idx: cannot")
    assert ended[0][2].count("\n") == 1
    assert ended[1][2] == ""


def test_a_check_of_one_rank_a_host_that_fails_on_all_hosts_excludes_no_node(folder):
    """Such as a misspelt checkpoint. The other ranks of a host do not check it."""

    def spread(rank):
        return slurm(rank) | {"SLURM_NTASKS": 3}

    chosen = ("checkpoint.resume=/nowhere", "train.global_batch=6")
    fits = ("machine.device.ranks_per_host=3",)
    name = "slip"
    started = start(COMMAND, folder, name, spread, *chosen, *fits, ranks=3)
    ended = wait_for(started)
    assert [process.returncode for process in started] == [BAD_INPUT] * len(started), ended
    assert "checkpoint.resume: /nowhere" in ended[0][1]
    assert not (folder / name / "bad-nodes.txt").exists()


def test_a_storage_that_fails_on_every_host_ends_all_ranks_with_code_70(folder):
    error = {"error": "StorageFailed", "message": "run.directory: Input/output error"}
    faults = json.dumps([{"at": "check", "do": "raise", **error}])
    ended = launch(folder, "away", lambda rank: slurm(rank) | {VARIABLE: faults})
    assert [code for code, _, _ in ended] == [LOST] * RANKS, ended
    assert "run.directory: Input/output error" in ended[0][2]
    assert ended[1][2] == ""


def test_a_bug_that_all_ranks_meet_leaves_one_traceback(folder):
    """Each rank hears of another one's error while it reports its own."""
    faults = json.dumps([{"at": "step", "do": "raise", "error": "KeyError", "message": "bug"}])
    ended = launch(folder, "bug", lambda rank: slurm(rank) | {VARIABLE: faults})
    assert [code for code, _, _ in ended] == [1] * RANKS, ended
    errors = "".join(errors for _, _, errors in ended)
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyError: 'bug'\n")


def test_a_config_that_one_node_cannot_read_ends_all_ranks(folder):
    """No rank waits for one that never arrives."""

    def lacking(rank):
        return slurm(rank) | {"STEPS": "3" if rank else "many"}

    ended = launch(folder, "half", lacking, "train.steps=${oc.decode:${oc.env:STEPS}}")
    assert [code for code, _, _ in ended] == [2] * RANKS
    reported = "".join(errors for _, _, errors in ended)
    assert reported.startswith("megafrontier: rank 0 on frontier00001: ")
    assert reported.count("\n") == 1


def test_a_node_that_cannot_start_while_most_can_is_excluded(folder):
    """Such as a node with a bad mount. The next start does without it."""

    def on_three_nodes(rank):
        disk = folder / ("gone" if rank == 2 else "here")
        node = {"SLURM_NTASKS": 3, "SLURM_LOCALID": 0, "SLURMD_NODENAME": f"frontier0000{rank}"}
        return slurm(rank) | node | {"NODE_DISK": disk}

    corpus = "data.train=[{path: '${oc.env:NODE_DISK}/corpus'}]"
    chosen = (
        corpus,
        "train.global_batch=3",
        "train.micro_batch=1",
        "machine.device.ranks_per_host=1",
    )
    started = start(COMMAND, folder, "gone", on_three_nodes, *chosen, ranks=3)
    ended = wait_for(started)
    assert [process.returncode for process in started] == [BAD_NODE] * 3, ended
    listed = folder / "gone" / "bad-nodes.txt"
    assert ended[0][1].startswith(f"megafrontier: rank 2 on frontier00002: {folder}/gone/corpus")
    assert ended[0][1].endswith(f"; listed in {listed}: frontier00002\n")
    assert [error for _, error in ended[1:]] == ["", ""]
    assert listed.read_text() == "frontier00002\n"
