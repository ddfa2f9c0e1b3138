"""A job of slurm/train.sbatch ends as it should, and its chain goes on, where nobody watches: by
Slurm's commands as a job sees them, in place of Slurm."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.slurm.cluster import ROOT
from tests.slurm.test_batch_files import SCONTROL, SINFO, job_process
from tests.tools import with_tools

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


def test_a_job_whose_ranks_srun_has_lost_sight_of_is_not_done(start):
    """Their step cancelled on a node that hangs, srun waits a moment and ends with 0."""
    note = "echo '{}' >>run/attempts.jsonl\n"
    begun = note.format('{"at": "now", "reached": 0}')
    done = start(begun)
    assert (done.code, done.requeued) == (143, True), done.out
    done = start(begun + note.format('{"at": "now", "ended": 0}'))
    assert (done.code, done.requeued) == (0, False), done.out
    assert "job 7: done\n" in done.out


def test_a_stop_that_comes_before_the_ranks_start_is_one():
    done = bash("is_asked_to_stop=1; run_with_signals echo started || echo $?")
    assert done.stdout == "75\n", done.stderr


def test_ranks_that_lose_the_stop_while_they_start_hear_of_it_again(tmp_path):
    """As srun does in its first moments."""
    ranks = (
        "import os, signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
        "os.kill(os.getppid(), signal.SIGUSR1); time.sleep(0.5); "
        "signal.signal(signal.SIGUSR1, lambda *_: os._exit(75)); time.sleep(30)"
    )
    path = with_tools(tmp_path, sleep=QUICK)
    done = bash(f"PATH={path}; run_with_signals {sys.executable} -c '{ranks}' || echo $?")
    assert done.stdout == "75\n", done.stderr


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


def test_a_node_to_which_the_archive_does_not_come_is_left_out(start, tmp_path):
    """sbcast waits for it, and does not say for which."""
    (tmp_path / "environment.tar.gz").touch()
    each = (
        'echo -; echo frontier00001; [ "$(echo "$*" | grep \' test -e \')" ] || echo frontier00002'
    )
    done = start(
        each, MEGAFRONTIER_ENV_TAR=str(tmp_path / "environment.tar.gz"),
        MEGAFRONTIER_UNPACK_SECONDS="1", tools={"sbcast": "#!/bin/sh\nexec /bin/sleep 60\n"},
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


def test_the_variables_of_the_job_that_submitted_this_one_are_not_its_own(start):
    """sbatch hands them on, to a job that Slurm starts for the first time, and that is no array."""
    own = "echo 'JobId=6 Restarts=9 X'; echo 'JobId=7 Restarts=0 JobState=RUNNING X' ;;"
    record = SCONTROL.replace("echo ' Restarts=0 JobState=RUNNING ' ;;", own)
    assert record != SCONTROL
    leaked = {"SLURM_RESTART_COUNT": "4", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "2"}
    leaked |= {"SLURM_HET_SIZE": "2"}
    ranks = 'echo "ranks of start $SLURM_RESTART_COUNT, array ${SLURM_ARRAY_JOB_ID-none}"; exit 75'
    done = start(ranks, scontrol=record, **leaked)
    assert "start 1 on" in done.out, done.err
    assert "ranks of start 0, array none\n" in done.out
    assert (done.code, done.requeued) == (75, True)
    done = start("", scontrol=record.replace("JobId=7", "JobId=7 ArrayTaskId=3"), **leaked)
    assert done.code == 2
    assert "--array: 3, need a job for each run" in done.err
    done = start("", scontrol=record.replace("JobId=7", "JobId=7 HetJobId=7"), **leaked)
    assert (done.code, done.requeued) == (2, False)
    assert "heterogeneous job" in done.err


@pytest.mark.parametrize(
    ("code", "is_requeued"), [(135, True), (137, True), (127, False), (1, False)]
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


def test_a_jobs_own_bad_node_is_left_out_though_sinfo_does_not_show_it(start, tmp_path):
    """In a partition that is hidden, or of another than SINFO_PARTITION's."""
    done = start(
        "echo frontier00002 >>run/bad-nodes.txt; exit 69",
        tools={"sinfo": "#!/bin/sh\n[ -z \"$SINFO_PARTITION\" ] && echo frontier00009\n"},
        SINFO_PARTITION="other",
    )  # fmt: skip
    assert "update JobId=7 ExcNodeList=frontier00002\n" in done.asked


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a full disk, needs root")
def test_starts_that_a_full_disk_does_not_let_be_counted_do_not_go_on_for_ever(start, tmp_path):
    mount = 'mount -t tmpfs -o size=4k none run; head -c 9999 /dev/zero >run/full; exec "$@"'
    done = start("exit 1", around=("unshare", "--mount", "sh", "-c", mount, "sh"))
    assert (done.code, done.requeued) == (3, False), done.err
    assert f"exit code 1 before all ranks had met, and {tmp_path}/run cannot be written" in done.out


def test_nodes_are_named_in_a_line_that_people_can_read():
    names = " ".join(f"n{number}" for number in range(20))
    done = bash(f"refuse_nodes tar {names} || true")
    assert done.returncode == 69
    (line,) = done.stderr.splitlines()
    assert line.endswith("tar fails on " + " ".join(f"n{n}" for n in range(16)) + " and 4 more")
    done = bash(f"SLURM_JOB_NUM_NODES=30; refuse_nodes tar {names}")
    assert done.returncode == 2
    assert "need a whole archive, and room and leave to write in /" in done.stderr


def test_what_an_earlier_start_has_joined_is_only_tidied_up(tmp_path):
    """A node may be lost while it deletes the parts: the corpus would seem not to be made."""

    def merge(**variables):
        job = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1", "MEGAFRONTIER_CLUSTER": "generic"}
        job |= {"PATH": with_tools(tmp_path / "tools", scontrol="#!/bin/sh\nexit 1\n")}
        return subprocess.run(
            ["bash", "slurm/prepare.sbatch", "texts", "--tokenizer", "bytes", "--out",
             str(tmp_path / "corpus")], cwd=ROOT, check=False, capture_output=True, text=True,
            env=os.environ | job | {"MEGAFRONTIER_PREFIX": sys.prefix} | variables,
        )  # fmt: skip

    (tmp_path / "tools").mkdir()
    left = [
        tmp_path / f"corpus.part-0000{n}-of-00002.{kind}" for n, kind in ((2, "idx"), (1, "bin"))
    ]
    corpus = [tmp_path / "corpus.bin", tmp_path / "corpus.idx"]
    again = {"SLURM_RESTART_COUNT": "1"}
    for path in [*corpus, *left]:
        path.touch()
    for number, path in enumerate([*corpus, *left]):  # another corpus was there before
        os.utime(path, (number, number))
    assert merge(**again).returncode == 2
    for path in corpus:
        path.touch()
    assert merge().returncode == 2, "no start before could have deleted a part"
    assert all(path.exists() for path in left)
    done = merge(**again)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("corpus*")) == ["corpus.bin", "corpus.idx"]
    assert merge(**again).returncode == 0
    assert merge().returncode == 2
    for path in (*left, tmp_path / "corpus.part-00001-of-00002.idx"):  # all are there: joined again
        path.touch()
        os.utime(path, (1, 1))
    assert "megafrontier merge" in merge(DRY_RUN="1", **again).stdout
