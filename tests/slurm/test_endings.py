"""How a job of slurm/train.sbatch ends, and whether it is requeued: with scripts in place of
Slurm's commands."""

import os
import shutil
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from tests.slurm.cluster import ROOT
from tests.tools import with_tools

CONFIG = "configs/gpt-20b.yaml"
# Slurm as a job on frontier00001 and 2 sees it.
SCONTROL = """#!/bin/sh
case "$*" in
    *hostnames*) printf 'frontier00001\\nfrontier00002\\n' ;;
    *show*) echo ' Restarts=0 JobState=RUNNING ' ;;
    *) echo "scontrol $*" >&2 ;;
esac
"""
SINFO = "#!/bin/sh\nprintf 'frontier0000%s\\n' 1 2 3 3\n"
REQUEUED = "scontrol requeue 7\n"


@pytest.fixture
def start(tmp_path):
    """Run slurm/train.sbatch as Slurm does in `tmp_path`, the run directory, until it ends with a
    code. Returns what it says. `srun`: what ranks do; `around`: the command's first words."""

    def begin(srun, *chosen, code, scontrol=SCONTROL, around=(), output=None, tools=(), **given):
        scripts = {
            "scontrol": scontrol, "srun": "#!/bin/sh\necho ranks start >&2\n" + srun,
            "sinfo": SINFO, "sleep": "#!/bin/sh\n", **dict(tools),
        }  # fmt: skip
        environment = os.environ | {
            "PATH": with_tools(tmp_path, **scripts),
            "MEGAFRONTIER_CLUSTER": "generic", "MEGAFRONTIER_PREFIX": sys.prefix,
            "MEGAFRONTIER_HOME": str(ROOT), "MEGAFRONTIER_NODE_DISK": str(tmp_path / "disk"),
            "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "", "SLURM_JOB_NUM_NODES": "2", **given,
        }  # fmt: skip
        train = [ROOT / "slurm" / "train.sbatch", ROOT / CONFIG, f"run.directory={tmp_path}"]
        done = subprocess.run(
            [*around, *train, *chosen], cwd=tmp_path, env=environment, text=True, check=False,
            timeout=100, stdout=output or subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        said = (done.stdout or "") + done.stderr
        assert done.returncode == code, said
        return said

    return begin


ANSWERING = """case "$*" in
    *SLURMD_NODENAME*) scontrol show hostnames; exit ;;
esac
"""
"""The first lines of an srun whose nodes all start processes."""


def bash(script):
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; . slurm/lib.sh; {script}"], cwd=ROOT, timeout=60,
        env=os.environ | {"home": str(ROOT), "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "50"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def archive(tmp_path):
    """The variable of a packed environment."""
    (tmp_path / "environment.tar.gz").touch()
    return {"MEGAFRONTIER_ENV_TAR": str(tmp_path / "environment.tar.gz")}


@pytest.mark.parametrize(("unfit", "is_requeued"), [("frontier00002", True), ("frontier9", False)])
def test_a_run_with_bad_nodes_is_requeued_if_the_next_start_excludes_one(start, unfit, is_requeued):
    """Otherwise it would repeat forever."""
    said = start(f"echo {unfit} >>bad-nodes.txt\nexit 69\n", code=69)
    excluded = f"scontrol update JobId=7 ExcNodeList={unfit}\n"
    assert (REQUEUED in said, excluded in said) == (is_requeued,) * 2
    assert ("not requeued" in said) != is_requeued


def test_a_job_that_gets_a_listed_node_is_requeued_before_its_ranks_start(start, tmp_path):
    (tmp_path / "bad-nodes.txt").write_text("frontier00002\n")
    for own, excluded in (("(null)", ""), ("frontier0000[7-9]", ",frontier0000[7-9]")):
        show = f"JobState=RUNNING ExcNodeList={own} "
        said = start("", code=69, scontrol=SCONTROL.replace("JobState=RUNNING ", show))
        assert REQUEUED in said
        assert f"scontrol update JobId=7 ExcNodeList=frontier00002{excluded}\n" in said
        assert "ranks start" not in said


def test_a_job_to_which_slurm_does_not_answer_is_requeued(start, archive, tmp_path):
    """A controller that is busy names no node."""
    busy = "#!/bin/sh\necho 'error: slurmctld is busy' >&2\nexit 1\n"
    both = "printf 'frontier00001\\nfrontier00002\\n'\n"
    assert REQUEUED in start(both, code=70, tools={"sbcast": busy}, **archive)
    assert not (tmp_path / "bad-nodes.txt").exists()


def test_slurm_may_be_silent_for_a_while_at_the_end_of_a_job(start, tmp_path):
    """When its controller is restarted."""
    asked = tmp_path / "asked"
    silent = f"""for word in requeue show.job; do
        if echo "$*" | grep -q "$word"; then
            echo "$word" >>{asked}
            [ $(grep -c "$word" {asked}) -gt 1 ] || exit 1
        fi
    done
    """
    scontrol = SCONTROL.replace("#!/bin/sh\n", "#!/bin/sh\n" + silent)
    said = start("exit 75", code=75, scontrol=scontrol)
    assert "exit code 75, requeued\n" in said
    assert REQUEUED in said


@pytest.mark.parametrize(
    ("answer", "reported"),
    [
        ("echo ' Restarts=0 Requeue=0 JobState=RUNNING ' ;;", "not requeued (--no-requeue)"),
        ("echo ' Restarts=0 BatchFlag=0 JobState=RUNNING ' ;;", "not requeued (no batch job)"),
        ("echo ' Restarts=1 JobState=RUNNING ' ;;", "ended from outside"),
        ("echo ' Restarts=0 JobState=RUNNING ' ;;\n *requeue*) exit 1 ;;", "requeued\n"),
    ],
)
def test_a_job_that_cannot_be_requeued_says_so(start, answer, reported):
    scontrol = SCONTROL.replace("echo ' Restarts=0 JobState=RUNNING ' ;;", answer)
    said = start("exit 75", code=75, scontrol=scontrol)
    assert f"exit code 75, {reported}" in said
    assert "again to resume" in said
    assert REQUEUED not in said


def test_ranks_get_the_jobs_environment_however_it_was_submitted(start):
    """sbatch --export=NONE has srun hand on nothing; salloc says nothing of cores, and Slurm would
    tell the ranks of the login node, where none of them is."""
    ranks = 'echo "$* SLURM_EXPORT_ENV=$SLURM_EXPORT_ENV at $MASTER_ADDR."'
    said = start(ranks, code=0, SLURM_EXPORT_ENV="NONE")
    assert " SLURM_EXPORT_ENV= at frontier00001.\n" in said
    assert "--cpus-per-task" not in said
    on_a_node = {"SLURMD_NODENAME": "frontier00001", "MASTER_ADDR": ""}
    said = start(ranks, code=0, SLURM_CPUS_PER_TASK="7", **on_a_node)
    assert " --cpus-per-task=7 " in said
    assert " at .\n" in said


def test_a_run_whose_ranks_never_meet_is_given_up(start):
    """A node without rank 0's answer, a package that is not there: no rank records the start."""
    recording = "echo '{\"reached\": 0}' >>attempts.jsonl\nexit 70"
    for ranks in ("exit 70", "exit 70", recording, "exit 70"):
        assert REQUEUED in start(ranks, "train.attempts=3", code=70)
    # Also by the time limit.
    timely = SCONTROL.replace("JobState=RUNNING", "JobState=COMPLETING Reason=TimeLimit")
    slow = "kill -TERM $PPID; /bin/sleep 1; exit 143"
    assert REQUEUED in start(slow, "train.attempts=3", code=143, scontrol=timely)
    said = start("exit 1", "train.attempts=3", code=3)
    assert REQUEUED not in said
    assert "exit code 1 before all ranks had met, as in the last 3 starts" in said


@pytest.mark.parametrize("field", ["Requeue=1", "Requeue=0", "BatchFlag=0"])
def test_ranks_that_end_start_again_in_the_same_job(start, field):
    """Also where a job may not be requeued, as in debug queues, and in an allocation."""
    scontrol = SCONTROL.replace("Restarts=0", f"{field} Restarts=0")
    ranks = 'echo "restart $MEGAFRONTIER_RESTARTS: $*"\n[ -e again ] || { touch again; exit 137; }'
    said = start(ANSWERING + ranks, code=0, scontrol=scontrol)
    assert REQUEUED not in said
    assert "exit code 137, started again in this job: signal 9, Killed before all ranks" in said
    assert "restart 0: --kill-on-bad-exit=0" in said
    assert "restart 1: --overlap --kill-on-bad-exit=0" in said


def test_a_job_whose_nodes_are_bad_goes_on_on_its_spare_node_and_then_to_the_queue(start):
    """One of its two nodes trains."""
    ranks = 'echo "at $MASTER_ADDR: $*"\necho "$MASTER_ADDR" >>bad-nodes.txt\nexit 69\n'
    given = {"SLURM_NTASKS_PER_NODE": "4"}
    said = start(ANSWERING + ranks, "run.spare_nodes=1", code=69, **given)
    one = "--overlap --nodes=1 --ntasks=4"
    assert f"at frontier00001: {one} --exclude=frontier00002 " in said
    assert f"at frontier00002: {one} --exclude=frontier00001 " in said
    assert REQUEUED in said


def test_ranks_do_not_start_again_with_less_time_left_than_a_start_takes(start):
    ending = (datetime.now() + timedelta(seconds=500)).isoformat(timespec="seconds")
    scontrol = SCONTROL.replace("Restarts=0", f"EndTime={ending} Restarts=0")
    no_snapshots = "checkpoint.local.every=0"  # which a step removes at the end
    said = start(ANSWERING + "exit 70", no_snapshots, code=70, scontrol=scontrol)
    assert "s are left, need 600 s for a start and the stop signal), requeued\n" in said
    assert said.count("ranks start") == 1


def test_ranks_that_never_meet_start_again_in_one_job_as_often_as_train_attempts_says(start):
    said = start(ANSWERING + "exit 70", "train.attempts=3", code=3)
    assert said.count("started again in this job: ") == 1
    assert said.count("started again in this job in 60 s: ") == 1
    assert "exit code 70 before all ranks had met, as in the last 3 starts" in said
    assert REQUEUED not in said


@pytest.mark.parametrize("requeue", ["Requeue=1", "Requeue=0"])
def test_a_node_that_watches_sends_the_job_back_when_the_first_node_is_removed(
    start, tmp_path, requeue
):
    """Slurm would let the job go on without its batch script."""
    both = "printf 'frontier00001\\nfrontier00002\\n'"
    other = f"[ -e asked ] && echo frontier00002 || {{ touch asked; {both}; }}"
    file = f"StdOut={tmp_path}/out NodeList=f {requeue} Restarts=0"
    said = start(
        "exit 9", code=0, tools={"scancel": '#!/bin/sh\necho "scancel $*" >&2\n'},
        scontrol=SCONTROL.replace("Restarts=0", file).replace(both, other),
        MEGAFRONTIER_WATCHED="frontier00001", MEGAFRONTIER_WATCHED_RUN=str(tmp_path),
    )  # fmt: skip
    assert said == ""
    said = (tmp_path / "out").read_text()
    assert "node frontier00001 was lost, and with it the batch script" in said
    assert (REQUEUED in said) == (requeue == "Requeue=1")
    assert "ranks start" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a full disk, needs root")
def test_starts_that_a_full_disk_does_not_let_be_counted_do_not_go_on_for_ever(start, tmp_path):
    (tmp_path / "run").mkdir()
    mount = 'mount -t tmpfs -o size=4k none run; head -c 9999 /dev/zero >run/full; exec "$@"'
    around = ("unshare", "--mount", "sh", "-c", mount, "sh")
    said = start("exit 1", f"run.directory={tmp_path}/run", code=3, around=around)
    assert REQUEUED not in said
    assert f"exit code 1 before all ranks had met, and {tmp_path}/run cannot be written" in said


def test_a_job_whose_output_cannot_be_written_is_requeued(start):
    """Where a save found the disk full, the job's own output mostly lies on it, too."""
    with open("/dev/full", "w") as full:
        assert REQUEUED in start("exit 70", code=70, output=full)


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
    said = start("", code=code, MEGAFRONTIER_PREFIX=str(tmp_path / "prefix"))
    assert (REQUEUED in said) == is_requeued


def test_a_node_that_hangs_while_it_unpacks_is_excluded(start, archive, tmp_path):
    at_once = f'#!/bin/sh\nshift 3\nexec {shutil.which("timeout")} 1 "$@"\n'
    said = start(
        "printf -- '-\\nfrontier00001\\n'; exec /bin/sleep 60",
        code=69, tools={"timeout": at_once}, MEGAFRONTIER_UNPACK_SECONDS="1", **archive,
    )  # fmt: skip
    assert REQUEUED in said
    assert (tmp_path / "bad-nodes.txt").read_text() == "frontier00002\n"


def test_an_archive_that_most_nodes_cannot_unpack_excludes_no_node():
    done = bash("refuse_nodes unpacking n1 n2 || true")
    assert (done.returncode, done.stderr) == (
        69, "megafrontier: MEGAFRONTIER_ENV_TAR: unpacking fails on 2 nodes: n1 n2\n"
    )  # fmt: skip
    done = bash("SLURM_JOB_NUM_NODES=3; refuse_nodes unpacking n1 n2")
    assert done.returncode == 2
    assert "need a whole archive, and room and leave to write in /" in done.stderr


def test_the_stop_signal_does_not_end_a_process_without_a_handler():
    done = bash("\"${deaf[@]}\" sh -c 'kill -USR1 $$; echo lives'")
    assert done.stdout == "lives\n", done.stderr


def test_ctrl_c_in_an_allocation_asks_the_ranks_to_stop(start):
    """They run in the background, where bash keeps the keyboard's signal from them. By USR1, as at
    the time limit: at TERM srun kills them."""
    ranks = "trap 'echo asked to stop; exit 75' USR1; kill -INT $PPID; /bin/sleep 9 & wait"
    said = start(ranks, code=75, around=("env", "--default-signal=INT"))
    assert "asked to stop\n" in said
    assert REQUEUED in said


COMPILING = """case "$*" in
    *"megafrontier train"*)
        mkdir -p "$TRITON_CACHE_DIR"
        ls "$TRITON_CACHE_DIR"
        echo code >"$TRITON_CACHE_DIR/$KERNEL" ;;
    *) while [ "${1#-}" != "$1" ]; do shift; done; exec "$@" ;;
esac
"""
"""An srun whose rank compiles a kernel and says which ones it finds; other steps run here."""
SBCAST = """#!/bin/bash
exec cp "${@: -2}"
"""


def test_a_later_job_has_what_an_earlier_one_compiled_up_to_a_size(start, tmp_path):
    """A node's own disk is empty at the start of a job, and stays so after its end."""
    kept = tmp_path / "kept.tar"

    def compiled(kernel, **chosen):
        given = {"tools": {"sbcast": SBCAST}, "SLURMD_NODENAME": "frontier00001"}
        said = start(COMPILING, code=0, KERNEL=kernel, **given, **chosen)
        assert not (tmp_path / "disk" / "megafrontier-7" / "caches").exists()
        return said

    assert "first" not in compiled("first")
    shutil.copyfile(tmp_path / "compiled.tar", kept)
    said = compiled("second", MEGAFRONTIER_CACHE_MIB="0")
    assert "first\n" in said
    assert "MiB, more than MEGAFRONTIER_CACHE_MIB=0, and are not kept\n" in said
    assert not (tmp_path / "compiled.tar").exists()
    assert "first\n" in compiled("third", MEGAFRONTIER_CACHE_TAR=str(kept))


def test_compiled_kernels_that_cannot_be_unpacked_do_not_end_a_job(start, tmp_path):
    (tmp_path / "compiled.tar").write_text("torn")
    said = start(COMPILING, code=0, KERNEL="k", tools={"sbcast": "#!/bin/sh\nexit 1\n"})
    assert "warning: " in said
    assert "compiled.tar cannot be unpacked on all nodes, which compile again\n" in said


def test_an_environment_is_packed_and_unpacked_by_pigz_if_it_is_there(start, archive, tmp_path):
    pigz = f'#!/bin/sh\necho "called $*" >>{tmp_path}/calls\nexec gzip "$@"\n'
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "pyvenv.cfg").touch()
    path = with_tools(tmp_path, pigz=pigz)
    pack = [ROOT / "slurm/pack_env.sh", archive["MEGAFRONTIER_ENV_TAR"], tmp_path / "environment"]
    subprocess.run(pack, env=os.environ | {"PATH": path}, check=True, capture_output=True)
    nodes = COMPILING.replace('exec "$@"', '"$@" && echo frontier00002')
    here = {"SLURMD_NODENAME": "frontier00001"}
    start(nodes, code=0, KERNEL="k", tools={"sbcast": SBCAST}, **archive, **here)
    assert (tmp_path / "calls").read_text().splitlines() == ["called ", "called -d"]


def test_a_job_of_the_debug_queue_asks_slurm_not_to_requeue_it(start):
    """Slurm would after the loss of a node, although the job was submitted by hand."""
    frontier = {"MEGAFRONTIER_CLUSTER": "frontier", "BASH_FUNC_module%%": "() { :; }"}
    for qos, is_asked in (("debug", True), ("normal", False)):
        said = start("", code=0, SLURM_JOB_QOS=qos, **frontier)
        assert ("scontrol update JobId=7 Requeue=0\n" in said) == is_asked
