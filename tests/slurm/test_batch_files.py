"""What the batch files of slurm/ do in a job, besides training."""

import json
import os
import shutil
import subprocess
import sys
from types import MappingProxyType

import pytest

from tests.data.corpora import read_corpus
from tests.slurm.cluster import ROOT
from tests.slurm.jobs import unbroken
from tests.tools import with_tools

CONFIG = "configs/gpt-20b.yaml"


def test_parts_that_no_array_has_made_are_not_joined(tmp_path):
    """--array forgotten with plain sbatch; a dry run in a job does nothing either."""
    job = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1", "MEGAFRONTIER_CLUSTER": "generic"}

    def prepare(**variables):
        return subprocess.run(
            ["bash", "slurm/prepare.sbatch", "texts", "--tokenizer", "bytes", "--out",
             str(tmp_path / "corpus")], cwd=ROOT, check=False, capture_output=True, text=True,
            env=os.environ | job | {"MEGAFRONTIER_PREFIX": sys.prefix} | variables,
        )  # fmt: skip

    done = prepare()
    assert done.returncode == 2
    assert done.stderr.endswith("corpus has no parts, need --array=0-15 or the like to make them\n")
    for kind in ("idx", "bin"):
        (tmp_path / f"corpus.part-00001-of-00001.{kind}").touch()
    assert "megafrontier merge" in prepare(DRY_RUN="1").stdout
    assert len(list(tmp_path.iterdir())) == 2


def test_a_corpus_tokenised_by_an_array_job_is_that_of_one_process(training, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(5):
        lines = [json.dumps({"text": f"text {number} {i} " * (i % 7)}) for i in range(50)]
        (texts / f"{number}.jsonl").write_text("\n".join(lines))
    words = [str(texts), "--tokenizer", "bytes", "--append-eod", "--workers", "1", "--out"]
    merge = training.call(
        "prepare.sbatch", "--array=0-2", "--ntasks-per-node=1", *words, str(tmp_path / "made")
    )
    assert merge.ended() == "COMPLETED", merge.output
    alone = [sys.executable, "-m", "megafrontier", "prepare", *words, str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True)
    assert read_corpus(tmp_path / "made") == read_corpus(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.glob("made*")) == ["made.bin", "made.idx"]


@pytest.fixture
def packed(training, tmp_path):
    """The variables of a job with a packed environment. A whole one has gigabytes; this one says
    where it is, and borrows the rest."""
    prefix = tmp_path / "small"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    site = next(prefix.glob("lib/python3*/site-packages"))
    (site / "borrowed.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p))
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        "print('python of', sys.prefix)\n"
        "leave = os._exit\n"  # as a launcher's ranks do
        "def say(code):\n"
        "    print('package of', sys.modules['megafrontier'].__file__, flush=True)\n"
        "    leave(code)\n"
        "os._exit = say\n"
    )
    archive = tmp_path / "environment.tar.gz"
    packed = subprocess.run([ROOT / "slurm/pack_env.sh", archive, prefix], capture_output=True)
    assert packed.returncode == 0, packed.stderr
    shutil.rmtree(site)
    disk = training.cluster.folder / "disk"
    return {"MEGAFRONTIER_ENV_TAR": str(archive), "MEGAFRONTIER_NODE_DISK": str(disk)}


def test_environment_and_package_are_taken_from_every_nodes_own_disk(training, tmp_path, packed):
    """The package, too, where the job is in the repository's folder, as it mostly is."""
    job = training.call(
        "evaluate.sbatch", "--nodes=2", "--ntasks-per-node=1", f"--chdir={ROOT}",
        f"--output={tmp_path / 'said'}", str(tmp_path / "no-such-run"), **packed,
    )  # fmt: skip
    disk = training.cluster.folder / "disk"
    assert job.ended() == "FAILED"
    place = f"{disk}/megafrontier-{job.number}/environment"
    assert job.output.count(f"python of {place}\n") == 2, job.output
    assert job.output.count(f"package of {place}/megafrontier/__init__.py\n") == 2, job.output
    assert "no-such-run" in job.output
    left = [*training.cluster.folder.glob("disks/*/megafrontier-*/*")]
    assert left == [], "the job has taken away what it brought"


def test_the_environment_that_is_packed_is_the_jobs_own_and_one(tmp_path):
    """Not .venv, which the quickstart has made for CPUs, nor a folder without an environment."""
    prefix, archive = tmp_path / "environment", tmp_path / "environment.tar.gz"
    prefix.mkdir()

    def pack():
        environment = {"PATH": "/usr/bin:/bin", "MEGAFRONTIER_PREFIX": str(prefix)}
        command = [ROOT / "slurm/pack_env.sh", archive]
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    done = pack()
    assert done.returncode == 2
    assert done.stderr.startswith(f"megafrontier: {prefix}: no venv and no conda")
    assert not archive.exists()
    (prefix / "pyvenv.cfg").touch()
    assert pack().stdout.endswith(f"from {prefix}\n")


def test_nodes_on_which_the_environment_cannot_be_unpacked_are_left_out(training, packed):
    """On one there is something else in the archive's place, on another in that of the folder for
    it; each is found out by one start, and the next trains without them."""
    chosen = ("train.steps=2", "machine=laptop")
    job = training.submit(*chosen, options=("--nodes=2", "--ntasks-per-node=1", "--hold"), **packed)
    first, second = sorted(training.cluster.nodes)[1:3]
    places = {
        node: training.cluster.folder / "disks" / node / f"megafrontier-{job.number}"
        for node in (first, second)
    }
    (places[first] / "environment.tar.gz").mkdir(parents=True)
    places[second].parent.mkdir(parents=True, exist_ok=True)
    places[second].write_text("no folder")
    training.cluster.run("scontrol", "release", job.number)
    assert job.ended() == "COMPLETED", job.output
    assert job.restarts == 2, job.output
    assert f"sbcast fails on 1 nodes: {first}\n" in job.output
    assert f"unpacking fails on 1 nodes: {second}\n" in job.output
    assert (training.directory / "bad-nodes.txt").read_text() == f"{first}\n{second}\n"
    assert training.losses == unbroken(training.config, 2, *chosen)


# Slurm as a job sees it.
SCONTROL = """#!/bin/sh
case "$*" in
    *hostnames*) printf 'frontier00001\\nfrontier00002\\n' ;;
    *show*) echo ' Restarts=0 JobState=RUNNING ' ;;
    *) echo "scontrol $*" >&2 ;;
esac
"""
SINFO = "#!/bin/sh\nprintf 'frontier0000%s\\n' 1 2 3 3\n"
NO_PAUSE = MappingProxyType({"sleep": "#!/bin/sh\n"})
"""Of the minutes in which Slurm is asked again."""
SRUN = "#!/bin/sh\necho ranks start\n"


def job_process(folder, directory, *chosen, scripts, around=(), stdout=None, **variables):
    """slurm/train.sbatch as Slurm runs it in `folder`, which ends; `scripts` by the names of the
    programs that they are in place of, `around` the command's first words."""
    environment = os.environ | {
        "PATH": with_tools(folder, **scripts),
        "MEGAFRONTIER_CLUSTER": "generic", "MEGAFRONTIER_PREFIX": sys.prefix,
        "MEGAFRONTIER_HOME": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "", **variables,
    }  # fmt: skip
    train = [ROOT / "slurm" / "train.sbatch", ROOT / CONFIG, f"run.directory={directory}", *chosen]
    return subprocess.run(
        [*around, *train], cwd=folder, env=environment, text=True, check=False, timeout=100,
        stdout=stdout or subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run_job_on_frontier00001_and_2(
    folder, *chosen, ranks, code, scontrol=SCONTROL, tools=MappingProxyType({}), **variables
):
    """The output of the batch file as Slurm runs it, which ends with a code; `ranks`: what srun
    does."""
    scripts = {"scontrol": scontrol, "srun": SRUN + ranks, "sinfo": SINFO, **tools}
    done = job_process(folder, folder, *chosen, scripts=scripts, **variables)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def finds_unfit(node):
    """Ranks that list a node."""
    return f"echo {node} >>bad-nodes.txt\nexit 69\n"


@pytest.mark.parametrize(("unfit", "is_requeued"), [("frontier00002", True), ("frontier9", False)])
def test_a_run_with_bad_nodes_is_requeued_if_another_start_leaves_one_out(
    tmp_path, unfit, is_requeued
):
    """Otherwise it would meet the same again, and that for ever."""
    said = run_job_on_frontier00001_and_2(tmp_path, ranks=finds_unfit(unfit), code=69)
    excluded = f"scontrol update JobId=7 ExcNodeList={unfit}\n"
    assert ("scontrol requeue 7\n" in said, excluded in said) == (is_requeued,) * 2
    assert ("not requeued" in said) != is_requeued
    assert "ranks start" in said


def test_a_job_to_which_slurm_does_not_answer_is_requeued_not_given_up(tmp_path):
    """Nobody watches over a chain of jobs; a controller that is busy names no node."""
    both = "printf 'frontier00001\\nfrontier00002\\n'\n"
    busy = (
        f"#!/bin/sh\necho tried >>{tmp_path}/tries\necho 'error: slurmctld is busy' >&2\nexit 1\n"
    )
    (tmp_path / "environment.tar.gz").touch()
    said = run_job_on_frontier00001_and_2(
        tmp_path, ranks=both, code=70, tools={"sbcast": busy, "sleep": "#!/bin/sh\n"},
        MEGAFRONTIER_ENV_TAR=str(tmp_path / "environment.tar.gz"), SLURM_JOB_NUM_NODES="2",
        MEGAFRONTIER_NODE_DISK=str(tmp_path),
    )  # fmt: skip
    assert (tmp_path / "tries").read_text() == "tried\n"
    assert "scontrol requeue 7\n" in said
    assert not (tmp_path / "bad-nodes.txt").exists()


def test_slurm_may_be_silent_for_a_while_at_the_end_of_a_job(tmp_path):
    """Its controller is started anew: neither is the job taken for cancelled, nor forgotten."""
    asked = tmp_path / "asked"
    silent = f"""for word in requeue show.job; do
        if echo "$*" | grep -q "$word"; then
            echo "$word" >>{asked}
            [ $(grep -c "$word" {asked}) -gt 1 ] || exit 1
        fi
    done
    """
    scontrol = SCONTROL.replace("#!/bin/sh\n", "#!/bin/sh\n" + silent)
    said = run_job_on_frontier00001_and_2(
        tmp_path, ranks="exit 75", code=75, scontrol=scontrol, tools=NO_PAUSE
    )
    assert "exit code 75, requeued\n" in said
    assert "scontrol requeue 7\n" in said


def test_ranks_get_the_jobs_environment_however_it_was_submitted(tmp_path):
    """sbatch --export=NONE has srun hand on nothing; salloc says nothing of cores."""
    ranks = 'echo "$* SLURM_EXPORT_ENV=$SLURM_EXPORT_ENV."'
    said = run_job_on_frontier00001_and_2(tmp_path, ranks=ranks, code=0, SLURM_EXPORT_ENV="NONE")
    assert " SLURM_EXPORT_ENV=.\n" in said
    assert "--cpus-per-task" not in said
    said = run_job_on_frontier00001_and_2(tmp_path, ranks=ranks, code=0, SLURM_CPUS_PER_TASK="7")
    assert " --cpus-per-task=7 " in said


def test_a_job_that_gets_a_listed_node_is_requeued_before_its_ranks_start(tmp_path):
    (tmp_path / "bad-nodes.txt").write_text("frontier00002\n")
    ranks = finds_unfit("frontier00001")
    said = run_job_on_frontier00001_and_2(tmp_path, ranks=ranks, code=69)
    assert "scontrol requeue 7\n" in said
    assert "scontrol update JobId=7 ExcNodeList=frontier00002\n" in said
    assert "ranks start" not in said


def start_with_three_attempts(folder, ranks, code):
    return run_job_on_frontier00001_and_2(folder, "train.attempts=3", ranks=ranks, code=code)


def test_a_run_whose_ranks_never_meet_is_given_up(tmp_path):
    """A node without rank 0's answer, a package that is not there: nobody notes the start."""
    noting = "echo '{\"reached\": 0}' >>attempts.jsonl\nexit 70"
    for ranks in ("exit 70", "exit 70", noting, "exit 70", "exit 70"):
        assert "requeue 7\n" in start_with_three_attempts(tmp_path, ranks, 70)
    said = start_with_three_attempts(tmp_path, "exit 1", 3)
    assert "scontrol requeue" not in said
    assert "exit code 1 before all ranks had met, as in the last 3 starts" in said


def test_a_requeue_goes_on_without_the_nodes_that_the_user_does_without(tmp_path):
    (tmp_path / "bad-nodes.txt").write_text("frontier00002\n")
    for own, left_out in (("(null)", ""), ("frontier0000[7-9]", ",frontier0000[7-9]")):
        show = f"JobState=RUNNING ExcNodeList={own} "
        scontrol = SCONTROL.replace("JobState=RUNNING ", show)
        said = run_job_on_frontier00001_and_2(tmp_path, ranks="", code=69, scontrol=scontrol)
        assert f"scontrol update JobId=7 ExcNodeList=frontier00002{left_out}\n" in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo ' Restarts=0 Requeue=0 JobState=RUNNING ' ;;", "not requeued (--no-requeue)"),
        ("echo ' Restarts=0 BatchFlag=0 JobState=RUNNING ' ;;", "not requeued (no batch job)"),
        ("echo ' Restarts=1 JobState=RUNNING ' ;;", "ended from outside"),
        ("echo ' Restarts=0 JobState=RUNNING ' ;;\n *requeue*) exit 1 ;;", "requeued\n"),
    ],
)
def test_a_job_that_cannot_be_requeued_says_so(tmp_path, answer, said):
    scontrol = SCONTROL.replace("echo ' Restarts=0 JobState=RUNNING ' ;;", answer)
    shown = run_job_on_frontier00001_and_2(
        tmp_path, ranks="exit 75", code=75, scontrol=scontrol, tools=NO_PAUSE
    )
    assert f"exit code 75, {said}" in shown
    assert "again to resume" in shown
    assert "scontrol requeue" not in shown


def test_what_salloc_starts_on_a_login_node_sends_the_ranks_to_a_node_of_the_job(tmp_path):
    """Slurm would name the login node to them, where none of them is."""
    ranks = 'echo "at $MASTER_ADDR."'
    said = run_job_on_frontier00001_and_2(tmp_path, ranks=ranks, code=0)
    assert "at frontier00001.\n" in said
    on_a_node = {"SLURMD_NODENAME": "frontier00001", "MASTER_ADDR": ""}
    said = run_job_on_frontier00001_and_2(tmp_path, ranks=ranks, code=0, **on_a_node)
    assert "at .\n" in said
