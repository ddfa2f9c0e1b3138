"""If a rank is lost or the run hangs, all ranks end soon, and one line says why."""

import faulthandler
import json
import os
import queue
import signal
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch.distributed as dist

from megafrontier.common.errors import BAD_NODE, FAILED, LOST, RanksAbsent, RunFailed
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.liveness import Alarm, Answers, LivenessCheck
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.health.watchdog import Watchdog
from megafrontier.launch.rendezvous import ALL_PEERS
from megafrontier.parallel.env import Identity
from megafrontier.parallel.fault_injection import VARIABLE
from megafrontier.parallel.world import RankStatus
from tests import processes, runs
from tests.launch.test_launchers import slurm, start
from tests.processes import COMMAND
from tests.tools import with_tools

HOST = socket.gethostname()
ALONE = Identity(0, 1, 0, "alone")
ENDLESS = ("train.steps=100000",)
TWO_HOSTS = ("train.hang_seconds=3", "machine.device.ranks_per_host=1")


def fault(at, rank, do, **others):
    """An entry of MEGAFRONTIER_FAULTS: what `rank` does at a fault point."""
    return {"at": at, "rank": rank, "do": do, **others}


def fails(at, rank, error, message="", **others):
    return fault(at, rank, "raise", error=error, message=message, **others)


def environment(faults):
    return {VARIABLE: json.dumps(faults)}


def launched(folder, name, faults, *overrides, identity=slurm, count=2, script=COMMAND):
    """Run ranks without a parent. Returns (exit code, stderr) of those that end, by rank."""
    who = lambda rank: identity(rank) | environment(faults)  # noqa: E731
    ranks = start(script, folder, name, who, *ENDLESS, *overrides, ranks=count)
    frozen = sum(fault["do"] == "freeze" for fault in faults)
    ended = {}
    deadline = time.monotonic() + 120
    while len(ended) < count - frozen and time.monotonic() < deadline:
        ended = {i: rank.poll() for i, rank in enumerate(ranks) if rank.poll() is not None}
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
    errors = [rank.communicate()[1] for rank in ranks]
    return {i: (code, errors[i]) for i, code in ended.items()}


def local(monkeypatch, folder, name, ranks, faults, *overrides):
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    arguments = [
        "train", str(folder / "config.yaml"), "--nproc", str(ranks),
        "machine=laptop", f"run.directory={folder}/{name}", *ENDLESS, *overrides,
    ]  # fmt: skip
    return processes.run(COMMAND, arguments)


def attempts(folder, name):
    return (folder / name / "attempts.jsonl").read_text()


def test_local_ranks_end_at_once_when_one_is_killed(folder, monkeypatch):
    ended = local(monkeypatch, folder, "killed", 2, [fault("step", 1, "kill", step=5)])
    assert ended.returncode == 128 + signal.SIGKILL
    assert ended.stderr == f"megafrontier: rank 1 on {HOST} was lost: signal 9, Killed\n"
    assert len(runs.metrics(folder / "killed")) == 5


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_ranks_of_a_launcher_name_the_rank_that_was_killed(folder, victim):
    name = f"killed-{victim}"
    ended = launched(folder, name, [fault("step", victim, "kill", step=3)])
    code, reported = ended[1 - victim]
    assert code == LOST
    assert reported == f"megafrontier: rank {victim} on frontier00001: lost, no answer\n"
    if victim:
        assert f'"ended": {LOST}' in attempts(folder, name)


def test_a_killed_rank_is_noticed_though_no_collective_fails(folder):
    """As with NCCL, whose collectives wait for a lost rank for good."""
    faults = [fault("step", 0, "hang", step=3), fault("step", 1, "kill", step=3)]
    begin = time.monotonic()
    code, reported = launched(folder, "beside", faults)[0]
    assert time.monotonic() - begin < 100, "train.hang_seconds is 600"
    assert code == LOST
    lost = "megafrontier: rank 1 on frontier00001: lost, no answer; rank 1 has ended, stacks in "
    assert reported.startswith(lost)


@pytest.mark.parametrize(("hang_seconds", "seconds"), [(0, 604800), (1, 1800), (600, 3600)])
def test_collectives_time_out_later_than_the_watchdog(hang_seconds, seconds):
    assert Timeouts.of(2, hang_seconds).collective == seconds


def test_out_of_memory_ends_with_advice_and_no_traceback(folder):
    """Another start would run out of memory as well."""
    reported = "HIP out of memory. Tried 2 GiB.\nMore."
    faults = [fails("step", 1, "OutOfMemoryError", reported, step=2)]
    ended = launched(folder, "memory", faults)
    assert [ended[r][0] for r in (0, 1)] == [FAILED, FAILED]
    reported = ended[1][1]
    assert reported.startswith("megafrontier: rank 1 on frontier00001: HIP out of memory. Tried 2")
    assert "smaller train.micro_batch (2)" in reported
    assert reported.count("\n") == 1
    assert ended[0][1] == ""


def test_unfit_nodes_are_printed_by_rank_0_and_end_all_ranks_with_code_69(folder):
    error = {"error": "NodesUnfit", "message": "preflight: frontier00001 is slow"}
    faults = [fault("preflight", 0, "sleep", seconds=2)]
    faults += [fault("preflight", rank, "raise", **error) for rank in (0, 1)]
    ended = launched(folder, "unfit", faults)
    assert ended[0] == (BAD_NODE, "megafrontier: preflight: frontier00001 is slow\n")
    assert ended[1] == (BAD_NODE, "")


def on_two_hosts(rank):
    return slurm(rank) | {"SLURM_LOCALID": 0, "SLURMD_NODENAME": f"frontier{rank + 1:05d}"}


def test_a_host_that_does_not_answer_before_the_first_step_is_excluded(folder):
    faults = [fault("preflight", 1, "freeze")]
    code, reported = launched(folder, "silent", faults, *TWO_HOSTS, identity=on_two_hosts)[0]
    assert code == BAD_NODE
    lost = "megafrontier: rank 1 on frontier00002: lost, no answer; nothing finished for"
    assert reported.startswith(lost)
    assert reported.endswith(f"; listed in {folder}/silent/bad-nodes.txt: frontier00002\n")
    assert reported.count("\n") == 1
    assert (folder / "silent" / "bad-nodes.txt").read_text() == "frontier00002\n"


def on_four_hosts(rank):
    return on_two_hosts(rank) | {"SLURM_NTASKS": 4}


def test_a_host_that_blocks_the_others_before_the_first_step_is_excluded(folder):
    faults = [fault("run.directory", 2, "hang")]
    ended = launched(folder, "blocking", faults, *TWO_HOSTS, identity=on_four_hosts, count=4)
    assert [code for code, _ in ended.values()] == [BAD_NODE] * 4, ended
    (line,) = "".join(errors for _, errors in ended.values()).splitlines()
    stuck = "rank 2 on frontier00003: stuck at run.directory, though every rank answers"
    assert line.startswith(f"megafrontier: {stuck}")
    assert line.endswith(f"; listed in {folder}/blocking/bad-nodes.txt: frontier00003")


def test_hosts_that_cannot_reach_each_other_are_excluded(folder):
    """Neither rank is told when the other gives up, and no traceback is printed."""
    reported = "reset by peer\nat gloo"
    faults = [
        fails("link world", rank, "RuntimeError", reported, peer=peer)
        for rank, peer in ((1, 2), (2, 1))
    ]
    chosen = ("train.hang_seconds=60", "machine.device.ranks_per_host=1")
    ended = launched(folder, "reset", faults, *chosen, identity=on_four_hosts, count=4)
    assert [code for code, _ in ended.values()] == [BAD_NODE] * 4, ended
    (reported,) = "".join(errors for _, errors in ended.values()).splitlines()
    assert "rank 1 on frontier00002; rank 2 on frontier00003: stuck at link world, " in reported
    assert ": link world to rank " in reported
    assert "reset by peer, stacks in " in reported
    assert reported.endswith("bad-nodes.txt: frontier00002, frontier00003")


def test_a_rank_that_fails_while_ranks_connect_ends_all_at_once(folder):
    """The others wait for it in a collective. Its host is not excluded."""
    faults = [fails("check hosts", 1, "OverflowError", "a bug")]
    chosen = ("train.hang_seconds=600", "machine.device.ranks_per_host=1")
    ended = launched(folder, "early", faults, *chosen, identity=on_two_hosts)
    assert [code for code, _ in ended.values()] == [1, 1], ended
    assert "OverflowError: a bug" in ended[1][1]
    assert "Traceback" not in ended[0][1]
    assert not (folder / "early" / "bad-nodes.txt").exists()


@pytest.fixture
def laid_out(tmp_path, monkeypatch):
    """An `scontrol` that tells the hosts of a step."""
    scontrol = '#!/bin/sh\necho "$3" | tr , "\\n"\n'
    monkeypatch.setenv("PATH", with_tools(tmp_path, scontrol=scontrol))
    monkeypatch.setenv("SLURM_STEP_NODELIST", "frontier00001,frontier00002")


def frozen_before_meeting(folder, name, rank):
    faults = [fault("meet", rank, "freeze")]
    return launched(folder, name, faults, *TWO_HOSTS, identity=on_two_hosts)[1 - rank]


@pytest.mark.usefixtures("laid_out")
def test_the_host_of_a_rank_that_does_not_arrive_is_excluded(folder):
    code, reported = frozen_before_meeting(folder, "absent", rank=1)
    assert code == BAD_NODE
    assert reported.startswith(
        "megafrontier: rank 1 on frontier00002: did not come to tcp://127.0.0.1:"
    )
    assert reported.endswith(
        f" within 9 s; listed in {folder}/absent/bad-nodes.txt: frontier00002\n"
    )
    assert reported.count("\n") == 1
    assert (folder / "absent" / "bad-nodes.txt").read_text() == "frontier00002\n"


def test_no_host_is_excluded_if_most_ranks_are_absent_or_their_hosts_unknown(tmp_path):
    identity = Identity(0, 4, 0, "slurm")
    most = excluded_nodes.exclude_absent(RanksAbsent([1, 2, 3], "late"), tmp_path, identity, {})
    assert isinstance(most, RunFailed)
    assert str(most) == "ranks 1, 2, 3: late"
    unknown = excluded_nodes.exclude_absent(RanksAbsent([1], "late"), tmp_path, identity, {})
    assert unknown.code == LOST
    assert str(unknown) == "rank 1: late"


def test_another_rank_reports_that_rank_0_does_not_arrive(folder):
    code, reported = frozen_before_meeting(folder, "first", rank=0)
    assert code == LOST
    (line,) = [
        line for line in reported.splitlines() if "megafrontier: " in line
    ]  # c10d has its own
    assert line.startswith("megafrontier: rank 0: no answer at tcp://127.0.0.1:")


class FakeLiveness:
    """A liveness check in which another rank has raised an alarm, with these answers."""

    def __init__(self, alarm, answers):
        self.wait_for_alarm = lambda: alarm
        self.answer = lambda hang: answers
        self.clone = lambda: self
        self.status = RankStatus()


@pytest.fixture
def codes(monkeypatch):
    """The exit codes with which this process would have ended."""
    found = queue.Queue()

    def leave(code):
        found.put(code)
        threading.Event().wait()

    monkeypatch.setattr(os, "_exit", leave)
    yield found
    faulthandler.cancel_dump_traceback_later()  # the backstop of one that should have ended


def stuck_at(place, ranks, ranks_a_host):
    return [(rank, f"host{rank // ranks_a_host}", place) for rank in ranks]


@pytest.mark.parametrize(
    ("stuck", "hosts", "code"),
    [
        (stuck_at("link world", (2, 4), 2), 4, BAD_NODE),
        (stuck_at("run.directory", range(0, 32, 8), 8), 4, LOST),  # one rank of each host
        (stuck_at("run.directory", range(0, 16, 8), 8), 4, BAD_NODE),
        (stuck_at(ALL_PEERS, (2, 3, 4, 5), 2), 8, BAD_NODE),
        (stuck_at(ALL_PEERS, (2, 4, 6), 2), 8, LOST),  # who waits for the two, who is one of them?
    ],
)
def test_blocking_hosts_are_excluded_if_they_are_few_and_known(
    tmp_path, capsys, codes, stuck, hosts, code
):
    for rank in (1, 0):
        identity = Identity(rank, 64, rank, "slurm", host="host0")
        liveness = FakeLiveness(Alarm(5, "why", LOST, hang=True), Answers([], stuck, hosts))
        with closing(Watchdog(identity, tmp_path, Timeouts.of(64, 60))) as one:
            one.start(liveness)
            assert codes.get(timeout=60) == code
        assert (capsys.readouterr().err == "") == (rank > 0), "rank 0 speaks alone"
    listed = tmp_path / "bad-nodes.txt"
    named = sorted({host for _, host, _ in stuck})
    assert (listed.read_text().split() if listed.exists() else []) == named * (code == BAD_NODE)


@pytest.mark.parametrize(("answering", "listed"), [((1,), ["host2", "host3"]), ((), ["host0"])])
def test_if_most_ranks_do_not_answer_rank_0_excludes_its_host(tmp_path, codes, answering, listed):
    store, timeouts = dist.HashStore(), replace(Timeouts.of(4, 0.1), answer=0.5)
    first, *others = (
        LivenessCheck(store, Identity(r, 4, 0, "slurm", host=f"host{r}"), timeouts)
        for r in range(4)
    )
    for other in others:
        threading.Thread(target=other.meet, args=(60,)).start()
    assert first.meet(60) == []
    for rank in answering:
        threading.Thread(target=others[rank - 1].answer, args=(True,), daemon=True).start()
    with closing(Watchdog(first.identity, tmp_path, timeouts)) as one:
        one.start(first)
        assert codes.get(timeout=60) == BAD_NODE
    assert (tmp_path / "bad-nodes.txt").read_text().split() == listed


def test_a_frozen_rank_is_lost_and_the_others_write_their_stacks(folder):
    faults = [fault("step", 1, "freeze", step=3)]
    ended = launched(folder, "frozen", faults, "train.hang_seconds=8")
    code, reported = ended[0]
    assert code == LOST
    assert reported.startswith("megafrontier: rank 1 on frontier00001: lost, no answer; nothing")
    page = folder / "frozen" / "hang" / "step-00000003" / "frontier00001" / "rank-0.txt"
    assert str(page.parent.parent) in reported
    text = page.read_text()
    assert "last collective over world: " in text
    assert "in flight for" in text
    assert "in start_step" in text


def test_a_hang_in_a_pipeline_is_named_with_stage_and_action(folder):
    """Of the rank that hangs, and of the rank that waits for its message."""
    faults = [fault("stage 0, backward of micro-batch 1", 0, "hang")]
    chosen = ("parallel.pipeline=2", "train.hang_seconds=2", "train.micro_batch=4")
    reported = "".join(text for _, text in launched(folder, "stage", faults, *chosen).values())
    (line,) = reported.splitlines()
    stuck = "rank 0 on frontier00001: stuck at stage 0, backward of micro-batch 1, though every"
    assert line.startswith(f"megafrontier: {stuck}")
    assert "; rank 1 waits in stage 1, forward of micro-batch 3" in line
    page = folder / "stage" / "hang" / "step-00000000" / "frontier00001" / "rank-1.txt"
    waits = "stage 1, forward of micro-batch 3: waits for receive activation of micro-batch 3 at"
    assert waits in page.read_text()


def test_a_rank_ends_though_the_storage_hangs(tmp_path, monkeypatch, codes, capsys):
    """Neither its stacks nor its end can be written."""
    monkeypatch.setenv(VARIABLE, json.dumps([fault("report", 0, "hang")]))
    hanging = Watchdog(ALONE, tmp_path, replace(Timeouts.of(1, 0.1), storage=0.1))
    hanging.on_end = lambda *_: threading.Event().wait()
    hanging.start(None)
    with hanging.watching():
        assert codes.get(timeout=60) == LOST
    assert "the run hangs" in capsys.readouterr().err


def test_time_for_which_a_run_was_suspended_is_no_hang(tmp_path):
    """By Ctrl-Z or Slurm."""

    def body():
        suspended = os.getpid()
        one = Watchdog(ALONE, tmp_path, Timeouts.of(1, 1.0))
        if os.fork() == 0:
            time.sleep(2)
            os.kill(suspended, signal.SIGCONT)
            os._exit(0)
        one.start(None)
        with one.watching():
            one.beat(1)
            os.kill(suspended, signal.SIGSTOP)
            time.sleep(0.5)
        return True

    assert processes.in_child(body) == 0


def test_local_ranks_that_hang_write_their_stacks_and_end(folder, monkeypatch):
    """One rank does not enter the collective, but all are alive."""
    faults = [fault("step", 1, "hang", step=3)]
    ended = local(monkeypatch, folder, "asleep", 4, faults, "train.hang_seconds=8")
    assert ended.returncode == LOST
    assert ended.stderr.count("\n") == 1
    assert "the run hangs, though every rank answers; nothing finished for" in ended.stderr
    assert "after step 3 (train.hang_seconds 8)" in ended.stderr
    pages = folder / "asleep" / "hang" / "step-00000003" / HOST
    assert sorted(os.listdir(pages)) == [f"rank-{rank}.txt" for rank in range(4)]
    assert "in fault_point" in (pages / "rank-1.txt").read_text()
    assert "in start_step" in (pages / "rank-0.txt").read_text()
