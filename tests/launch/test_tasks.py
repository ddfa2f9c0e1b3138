"""Tasks of a Slurm step, whose ranks start again in them."""

import json
import os
import socket
from dataclasses import replace

from megafrontier.launch import tasks
from megafrontier.parallel.env import RESTARTS, identify
from megafrontier.parallel.fault_injection import VARIABLE
from tests import processes, runs
from tests.launch.dying import MOMENTS

TASKS = 3
STEPS = (
    "machine=laptop", "train.global_batch=12", "checkpoint.every=2", "evaluate.batches=0",
    "preflight.enabled=false", "log.callbacks=[tests.launch.dying.Dying]",
)  # fmt: skip


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def environment(task, port, nodes):
    """Slurm's and slurm/train.sbatch's, of a step whose tasks stand on these nodes."""
    per_node = TASKS // len(set(nodes))
    return {
        **os.environ,
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(task),
        "SLURM_STEP_NUM_TASKS": str(TASKS), "SLURM_LOCALID": str(task % per_node),
        "SLURM_STEP_TASKS_PER_NODE": str(per_node), "SLURMD_NODENAME": nodes[task],
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), RESTARTS: "0",
    }  # fmt: skip


def step(folder, name, moments, *faults, nodes=("n1", "n2", "n3")):
    """A step that trains. Returns the tasks' exit codes and their errors. `moments`: of `Dying`, by
    start. `faults`: at which fault point which rank of which start is killed, too."""
    kills = [{"at": at, "rank": rank, "restarts": n, "do": "kill"} for at, rank, n in faults]
    arguments = ["train", f"{folder}/config.yaml", f"run.directory={folder}/{name}", *STEPS]
    ours = {VARIABLE: json.dumps(kills), MOMENTS: json.dumps(moments)}
    port = free_port()
    started = [
        processes.Forked(processes.COMMAND, arguments, environment(task, port, nodes) | ours)
        for task in range(TASKS)
    ]
    try:
        errors = [task.communicate()[1] for task in started]
    finally:
        for task in started:
            task.kill()
    return [task.returncode for task in started], errors


def processes_of(folder, start):
    return [(folder / f"pid-{start}-{rank}").read_text() for rank in range(TASKS)]


def test_a_killed_rank_starts_again_in_its_task_and_the_others_keep_their_process(folder):
    """Also rank 0, with the losses of an unbroken run."""
    nowhere = [0, -1, ""]
    codes, errors = step(folder, "again", [[1, 3, "forward"], [0, 5, "backward"], nowhere])
    assert codes == [0, 0, 0], errors
    assert "megafrontier: rank 1 on " in errors[1]
    first, second, third = (processes_of(folder / "again", start) for start in range(3))
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True], errors
    assert [a == b for a, b in zip(second, third, strict=True)] == [False, True, True], errors
    assert step(folder, "unbroken", [nowhere])[0] == [0, 0, 0]
    again, unbroken = (runs.losses(runs.metrics(folder / name)) for name in ("again", "unbroken"))
    assert again == unbroken
    log = [line for line in runs.log(folder / "again").splitlines() if "restart: " in line]
    assert ["signal 9, Killed; back from step 3 to 2; " in line for line in log] == [True, False]
    assert "signal 9, Killed; back from step 5 to 4; " in log[1]


def test_ranks_that_do_not_all_come_back_end_so_that_the_script_starts_others(folder, monkeypatch):
    """One is killed again before it meets the others."""
    monkeypatch.setattr("megafrontier.launch.rendezvous.RETURN_SECONDS", 1.0)
    moments = [[1, 3, "forward"], [0, -1, ""]]
    codes, errors = step(folder, "absent", moments, ("meet", 1, 1))
    assert codes == [70, 137, 70], errors
    text = (folder / "absent" / "attempts.jsonl").read_text()
    assert '"ended": 70' in text.splitlines()[-1]
    assert '"lost": [[1, ""]]' in text, "the script must not wait for it"


def test_no_rank_starts_again_on_a_node_that_the_run_excludes(folder):
    """All ranks end, and the script starts them on other nodes."""
    (folder / "listed").mkdir()
    (folder / "listed" / "bad-nodes.txt").write_text("n2\n")
    codes, errors = step(folder, "listed", [[1, 3, "forward"]])
    assert codes == [69, 69, 69], errors
    assert "rank 1 on n2: n2 is in " in errors[0]


def test_only_tasks_of_the_batch_script_start_again(monkeypatch):
    """Nothing else starts the ranks again if the tasks cannot."""
    identity = identify(environment(0, 1, ("n1", "n2", "n3")))
    monkeypatch.delenv(RESTARTS, raising=False)
    assert not tasks.may_start_again(identity)
    monkeypatch.setenv(RESTARTS, "0")
    assert tasks.may_start_again(identity)
    assert not tasks.may_start_again(replace(identity, source="torchrun"))
