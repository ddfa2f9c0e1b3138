"""Which nodes of a job train, whether its ranks start again, and local ranks that do."""

import json
import os
import signal
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from megafrontier.common.errors import BAD_NODE
from megafrontier.launch.relaunch import (
    LOSSES,
    choose,
    count_losses,
    find_unfit,
    pause_before,
    what_was_lost,
    why_too_late,
)
from megafrontier.parallel.env import Launch
from megafrontier.parallel.fault_injection import VARIABLE
from tests import processes, runs
from tests.processes import COMMAND

NODES = ["n1", "n2", "n3", "n4"]
STEPS = ("machine=laptop", "checkpoint.every=2")


def test_nodes_that_are_listed_removed_down_or_silent_are_unfit():
    states = {"n1": "mixed", "n2": "mixed", "n3": "mixed*", "n4": "draining"}
    assert find_unfit(NODES, NODES, states, set()) == {"n3": "mixed* in Slurm"}
    assert find_unfit(NODES, ["n1", "n3", "n4"], {}, {"n4"}, answering={"n1"}) == {
        "n2": "removed from the job by Slurm",
        "n3": "does not answer",
        "n4": "in bad-nodes.txt",
    }


@pytest.mark.parametrize(
    ("unfit", "last", "count", "chosen"),
    [
        ([], [], 3, ["n1", "n2", "n3"]),
        (["n2"], [], 3, ["n1", "n3", "n4"]),
        ([], ["n1"], 3, ["n2", "n3", "n4"]),
        (["n4"], ["n1"], 3, ["n1", "n2", "n3"]),
        (["n1", "n2"], [], 3, []),
    ],
)
def test_fit_nodes_are_chosen_in_slurms_order_and_worn_ones_only_if_needed(
    unfit, last, count, chosen
):
    assert choose(NODES, unfit, last, count) == chosen


START = {"reached": 4, "host": "n1"}
END = {
    "ended": 70,
    "reason": "rank 3 on n2: lost, no answer; rank 3 has ended",
    "lost": [[3, "n2"]],
}


@pytest.mark.parametrize(
    ("records", "unfit", "code", "line", "nodes"),
    [
        ([START, END], {}, 137, "rank 3 on n2: lost, no answer", ["n2"]),
        ([START], {}, 139, "rank 0 on n1 was lost: signal 11, Segmentation fault", ["n1"]),
        ([], {}, 1, "exit code 1 before all ranks had met", []),
        ([START, END], {"n2": "down* in Slurm"}, 70, "node n2 was lost: down* in Slurm", ["n2"]),
        ([START, END], {"n4": "down"}, 70, "rank 3 on n2: lost, no answer", ["n2"]),
    ],
)
def test_a_failure_names_the_node_or_the_process_that_was_lost(records, unfit, code, line, nodes):
    """n4 is a spare: its loss ends no rank."""
    assert what_was_lost(records, NODES[:3], unfit, code) == (line, nodes)


def test_a_start_must_fit_into_the_time_before_the_stop_signal():
    now = datetime(2026, 1, 1, 12)
    job = {"EndTime": (now + timedelta(seconds=400)).isoformat()}
    measured = [{"first_step": 1, "start_seconds": seconds} for seconds in (50.0, 90.0)]
    assert why_too_late(job, measured, now.timestamp()) is None
    late = why_too_late(job, measured, now.timestamp() + 20)
    assert late == "380 s are left, need 390 s for a start and the stop signal"
    assert why_too_late(job, [], now.timestamp()) is not None, "nothing is measured yet"
    assert why_too_late({"EndTime": "Unknown"}, [], now.timestamp()) is None


def test_starts_in_a_row_that_finish_no_step_wait_longer_and_longer():
    """Or `train.attempts` of them would fail within the minute for which a storage is away."""
    failure = [{"at": "2026-01-01", "reached": 4}, {"at": "2026-01-01", "failed": 70}]
    step = [failure[0], {"at": "2026-01-01", "first_step": 5}, failure[1]]
    for starts, pause in ((0, 0), (1, 60), (2, 120), (9, 240)):
        assert pause_before(step + starts * failure, 70) == pause
    assert pause_before(step + failure, BAD_NODE) == 0


def test_losses_of_a_node_are_counted_since_slurm_started_the_job():
    failed = [("7", 0, ["n1"]), ("7", 1, ["n2", "n3"]), ("7", 1, ["n2"]), ("8", 1, ["n2"])]
    records = [{"job": j, "restarts": [r, 0, 0], "nodes": nodes} for j, r, nodes in failed]
    assert count_losses(records, Launch("7", [1, 0, 2])) == {"n2": LOSSES, "n3": 1}


def fault(rank, step, restarts, do="kill"):
    return {"at": "step", "rank": rank, "step": step, "restarts": restarts, "do": do}


def local(monkeypatch, folder, name, restarts, faults, *overrides):
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    config, chosen = str(folder / "config.yaml"), f"run.directory={folder}/{name}"
    arguments = ["train", config, "--nproc", "2", "--restarts", str(restarts), chosen, *STEPS]
    return processes.run(COMMAND, [*arguments, *overrides])


def test_local_ranks_start_again_after_a_kill_with_the_losses_of_an_unbroken_run(
    folder, monkeypatch
):
    """Also where the run began by a request that a second start may not obey: `never`."""
    faults = [fault(1, 5, 0), fault(0, 5, 1)]
    done = local(monkeypatch, folder, "again", 3, faults, "checkpoint.resume=never")
    assert done.returncode == 0, done.stderr
    assert "exit code 137, restart 2 of 3" in done.stderr
    monkeypatch.delenv(VARIABLE)
    unbroken = runs.run(folder / "config.yaml", 2, f"run.directory={folder}/unbroken", *STEPS)
    assert runs.losses(runs.metrics(folder / "again")) == runs.losses(unbroken)
    lines = [line for line in done.stdout.splitlines() if line.startswith("restart: ")]
    assert len(lines) == 2
    assert "rank 1 on " in lines[0]
    assert "was lost: signal 9, Killed; back from step 5 to " in lines[0]
    text = (folder / "again" / "attempts.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    starts, resumed, first = (
        [record for record in records if key in record]
        for key in ("reached", "resumed", "first_step")
    )
    assert [start["restarts"][2] for start in starts] == [0, 1, 2]
    steps = zip(starts, resumed, strict=True)
    lost = [start["reached"] - end["resumed"] for start, end in steps]
    assert [record["lost_steps"] for record in first[1:]] == lost[1:]
    assert all(0 < record["start_seconds"] <= record["down_seconds"] for record in first[1:])


def test_local_ranks_start_again_at_most_so_often_and_never_after_bad_input_or_a_stop(
    folder, monkeypatch
):
    faults = [fault(1, 3, number) for number in range(3)]
    done = local(monkeypatch, folder, "bounded", 1, faults)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.count("restart ") == 1
    done = local(monkeypatch, folder, "wrong", 1, [], "train.stepz=1")
    assert (done.returncode, done.stderr.count("restart ")) == (2, 0)
    (folder / "refused" / "config.yaml").mkdir(parents=True)
    done = local(monkeypatch, folder, "refused", 1, [])
    assert (done.returncode, done.stderr.count("restart ")) == (2, 0)


def test_restarts_without_local_ranks_are_refused():
    done = processes.run(COMMAND, ["train", "gpt-125m", "--restarts", "2"])
    assert done.returncode == 2
    assert done.stderr.startswith("megafrontier: --restarts: 2, need 0, or a positive number and ")


@pytest.mark.exhaustive
def test_ranks_that_torchrun_starts_again_resume_with_the_losses_of_an_unbroken_run(folder):
    once = folder / "once"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--max-restarts=1", "--no-python", "bash", "-c", f"[ -e {once} ] && "
                 f"unset {VARIABLE}; touch {once}; exec \"$@\"", "sh"]  # fmt: skip
    train = [sys.executable, "-m", "megafrontier", "train", f"{folder}/config.yaml"]
    done = subprocess.run(
        [sys.executable, *torchrun, *train, f"run.directory={folder}/torch", *STEPS],
        env=os.environ | {VARIABLE: json.dumps([fault(1, 5, 0)])},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    unbroken = runs.run(folder / "config.yaml", 2, f"run.directory={folder}/whole", *STEPS)
    assert runs.losses(runs.metrics(folder / "torch")) == runs.losses(unbroken)
    assert "restart: rank 1 on " in done.stdout
