"""A job of slurm/train.sbatch ends as it should, and its chain goes on, where nobody watches: by
Slurm's commands as a job sees them, in place of Slurm."""

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from tests.slurm.cluster import ROOT
from tests.slurm.test_batch_files import SCONTROL, SINFO, job_process

NODES = "frontier00001\nfrontier00002\n"
QUICK = "#!/bin/sh\nexec /bin/sleep 0.1\n"


@pytest.fixture
def start(tmp_path):
    """Start a job in `tmp_path`: `srun` is what ranks do, and each node."""

    def begin(srun, *chosen, scontrol=SCONTROL, around=(), tools=None, output=None, **variables):
        scripts = {
            "scontrol": scontrol.replace('*) echo "', f'*) echo "$*" >>{tmp_path}/asked; echo "'),
            "srun": "#!/bin/sh\n" + srun, "sinfo": SINFO, "sleep": QUICK, **(tools or {}),
        }  # fmt: skip
        disk = {"MEGAFRONTIER_NODE_DISK": str(tmp_path / "disk"), "SLURM_JOB_NUM_NODES": "2"}
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "asked").write_text("")
        done = job_process(
            tmp_path, tmp_path / "run", *chosen, scripts=scripts, around=around, stdout=output,
            **disk | variables,
        )  # fmt: skip
        asked = (tmp_path / "asked").read_text()
        is_requeued = "requeue 7\n" in asked
        return SimpleNamespace(
            code=done.returncode,
            out=done.stdout,
            err=done.stderr,
            asked=asked,
            requeued=is_requeued,
        )

    return begin


def listed(tmp_path):
    path = tmp_path / "run" / "bad-nodes.txt"
    return path.read_text() if path.exists() else ""


def bash(script):
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; . slurm/lib.sh; {script}"], cwd=ROOT, timeout=60,
        env=os.environ | {"home": str(ROOT), "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "50"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_job_whose_output_cannot_be_written_is_requeued(start):
    """Where a save found the disk full, the job's own output mostly lies on it, too."""
    with open("/dev/full", "w") as full:
        done = start("exit 70", output=full)
    assert (done.code, done.requeued) == (70, True)


def test_the_stop_does_not_end_what_has_no_handler_yet():
    done = bash("\"${deaf[@]}\" sh -c 'kill -USR1 $$; echo lives'")
    assert done.stdout == "lives\n", done.stderr


def test_a_node_that_hangs_while_it_unpacks_is_left_out(start, tmp_path):
    """Not found by its failing, and the time limit would come to the next job, too."""
    (tmp_path / "environment.tar.gz").touch()
    done = start(
        "printf -- '-\\nfrontier00001\\n'; exec /bin/sleep 60",
        MEGAFRONTIER_ENV_TAR=str(tmp_path / "environment.tar.gz"), MEGAFRONTIER_UNPACK_SECONDS="1",
        tools={"timeout": '#!/bin/sh\nshift 3\nexec timeout 1 "$@"\n'.replace(
            "exec timeout", f"exec {shutil.which('timeout')}")},
    )  # fmt: skip
    assert (done.code, done.requeued) == (69, True), done.err
    assert listed(tmp_path) == "frontier00002\n"


def test_starts_that_the_time_limit_ends_before_ranks_meet_are_counted(start):
    timely = SCONTROL.replace("JobState=RUNNING", "JobState=COMPLETING Reason=TimeLimit")
    for number in range(1, 4):
        done = start(
            "kill -TERM $PPID; /bin/sleep 1; exit 143", "train.attempts=3", scontrol=timely
        )
        assert done.requeued == (number < 3), done.out
    assert done.code == 3
    said = "by the time limit before all ranks had met, as in the last 3 starts (train.attempts)"
    assert said in done.out


@pytest.mark.parametrize(
    ("code", "is_requeued"), [(70, True), (135, True), (127, False), (1, False)]
)
def test_a_job_that_cannot_look_at_its_run_is_requeued_unless_that_is_a_bug(
    start, tmp_path, code, is_requeued
):
    """Python may die of a storage from which it is loaded."""
    python = tmp_path / "prefix" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    done = start("", MEGAFRONTIER_PREFIX=str(tmp_path / "prefix"))
    assert (done.code, done.requeued) == (code, is_requeued)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a full disk, needs root")
def test_starts_that_a_full_disk_does_not_let_be_counted_do_not_go_on_for_ever(start, tmp_path):
    mount = 'mount -t tmpfs -o size=4k none run; head -c 9999 /dev/zero >run/full; exec "$@"'
    done = start("exit 1", around=("unshare", "--mount", "sh", "-c", mount, "sh"))
    assert (done.code, done.requeued) == (3, False), done.err
    assert f"exit code 1 before all ranks had met, and {tmp_path}/run cannot be written" in done.out


def test_ctrl_c_in_an_allocation_asks_the_ranks_to_stop(start):
    """They run in the background, where bash keeps the keyboard's signal from them. By USR1, as at
    the time limit: at TERM srun kills them."""
    ranks = "trap 'echo asked to stop; exit 75' USR1; kill -INT $PPID; /bin/sleep 9 & wait"
    done = start(ranks, around=("env", "--default-signal=INT"))
    assert "asked to stop\n" in done.out
    assert (done.code, done.requeued) == (75, True)


def test_an_archive_that_most_nodes_cannot_unpack_is_no_nodes_fault():
    done = bash("refuse_nodes unpacking n1 n2 || true")
    assert (done.returncode, done.stderr) == (
        69, "megafrontier: MEGAFRONTIER_ENV_TAR: unpacking fails on 2 nodes: n1 n2\n"
    )  # fmt: skip
    done = bash("SLURM_JOB_NUM_NODES=3; refuse_nodes unpacking n1 n2")
    assert done.returncode == 2
    assert "need a whole archive, and room and leave to write in /" in done.stderr
