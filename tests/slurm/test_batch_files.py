"""What the batch files of slurm/ do in a job, besides training."""

import json
import os
import shlex
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
# A child of a shell in the background, as in scripts/test.sh, ignores it, which bash cannot undo.
HEARS_INT = ("env", "--default-signal=INT")


@pytest.mark.parametrize("signal", ["USR1", "TERM", "INT"])
def test_a_signal_after_the_step_does_not_end_the_batch_script(signal):
    """It has a job to requeue yet."""
    script = f"set -eu; . slurm/lib.sh; run_with_signals true; kill -{signal} $$; echo requeued"
    done = subprocess.run(
        [*HEARS_INT, "bash", "-c", script], cwd=ROOT,
        env=os.environ | {"home": str(ROOT), "SLURM_JOB_ID": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("requeued\n"), done.stderr


def test_ctrl_c_in_an_allocation_asks_the_ranks_to_stop():
    """They run in the background, where bash keeps the keyboard's signal from them. By USR1, as at
    the time limit: at TERM srun kills them."""
    waiting = "exec >/dev/null 2>&1 sleep 30"
    ranks = (
        f"trap 'echo asked to stop; exit 75' USR1; sleep 0.5; kill -INT $PPID; ({waiting}) & wait"
    )
    script = f"set -eu; . slurm/lib.sh; run_with_signals bash -c {shlex.quote(ranks)}"
    done = subprocess.run(
        [*HEARS_INT, "bash", "-c", script], cwd=ROOT,
        env=os.environ | {"home": str(ROOT), "SLURM_JOB_ID": "1"},
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.stdout == "asked to stop\n", done.stderr
    assert done.returncode == 75


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"COUNT": 2, "MIN": 0, "MAX": 15}, "--array: 2 tasks from 0 to 15, need all of them"),
        (
            {"COUNT": 1, "MIN": 7, "MAX": 7},
            "--array: 1 tasks, but {out}.part-00003-of-00016.idx is",
        ),
    ],
)
def test_one_part_of_a_corpus_is_not_made_again_as_all_of_it(tmp_path, tasks, said):
    """`--array=7`, to have the seventh again, would tokenise the whole corpus on one node."""
    out = tmp_path / "corpus"
    (tmp_path / "corpus.part-00003-of-00016.idx").touch()
    job = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in tasks.items()}
    job |= {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1", "SLURM_ARRAY_TASK_ID": str(tasks["MIN"])}
    job |= {"MEGAFRONTIER_CLUSTER": "generic", "MEGAFRONTIER_PREFIX": sys.prefix}
    done = subprocess.run(
        ["bash", "slurm/prepare.sbatch", "texts", "--tokenizer", "bytes", "--out", str(out)],
        cwd=ROOT, env=os.environ | job | {"MEGAFRONTIER_HOME": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert said.format(out=out) in done.stderr


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


def test_a_batch_file_in_an_allocation_is_of_its_own_repository(tmp_path):
    """Where salloc was called says nothing; there may be another clone."""
    done = subprocess.run(
        [ROOT / "slurm" / "train.sbatch"], capture_output=True, text=True, check=False,
        env=os.environ | {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)},
    )  # fmt: skip
    assert "CONFIG: not given" in done.stderr


def test_a_module_command_that_looks_at_variables_that_are_not_set_does_not_end_a_job(tmp_path):
    """It is the site's, and few are written for a shell that takes that for an error."""
    job = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": ""}
    job |= {"MEGAFRONTIER_CLUSTER": "frontier", "MEGAFRONTIER_PREFIX": sys.prefix}
    job |= {"PATH": with_tools(tmp_path, srun="#!/bin/sh\necho ranks start\n")}
    for action, code in ((': "$NOT_SET"', 0), ("return 3", 3)):
        done = subprocess.run(
            ["slurm/evaluate.sbatch", "run"], cwd=ROOT, check=False,
            env=os.environ | job | {"BASH_FUNC_module%%": f"() {{ {action}; }}"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (code, "" if code else "ranks start\n"), (
            done.stderr
        )


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


@pytest.mark.parametrize(
    ("inside", "said"),
    [("conda-meta", "a conda environment, need conda-pack"), ("bin", "no venv and no conda")],
)
def test_an_environment_that_cannot_be_packed_is_refused_by_name(tmp_path, inside, said):
    prefix, archive = tmp_path / "environment", tmp_path / "environment.tar.gz"
    (prefix / inside).mkdir(parents=True)
    done = subprocess.run(
        [ROOT / "slurm/pack_env.sh", archive, prefix],
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{prefix}: {said}" in line
    assert not archive.exists()


def test_the_environment_that_is_packed_is_the_jobs_own(tmp_path):
    """Not .venv, which the quickstart has made for CPUs."""
    prefix, archive = tmp_path / "environment", tmp_path / "environment.tar.gz"
    prefix.mkdir()
    (prefix / "pyvenv.cfg").touch()
    done = subprocess.run(
        [ROOT / "slurm/pack_env.sh", archive], check=True, capture_output=True, text=True,
        env=os.environ | {"MEGAFRONTIER_PREFIX": str(prefix)},
    )  # fmt: skip
    assert done.stdout.endswith(f"from {prefix}\n")


def test_an_archive_that_cannot_be_written_is_named_before_tar_runs_in_one_line(tmp_path):
    (tmp_path / "pyvenv.cfg").touch()
    out = tmp_path / "none" / "env.tar.gz"
    done = subprocess.run(
        [ROOT / "slurm/pack_env.sh", out, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"megafrontier: OUT: {out}: cannot be written, need ")
    assert len(done.stderr.splitlines()) == 1


def test_an_environment_is_not_packed_into_a_folder_whose_name_is_given_as_the_archives(tmp_path):
    """It would lie in there by another name, and jobs would broadcast the folder."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "out").mkdir()
    command = [ROOT / "slurm/pack_env.sh", tmp_path / "out", tmp_path / "venv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"megafrontier: OUT: {tmp_path}/out is a folder, need a file's ")
    assert list((tmp_path / "out").iterdir()) == []
    done = subprocess.run(
        [ROOT / "slurm" / "evaluate.sbatch", "run"], capture_output=True, text=True, check=False,
        env=os.environ | {"MEGAFRONTIER_PREFIX": sys.prefix, "MEGAFRONTIER_ENV_TAR": str(tmp_path)},
    )  # fmt: skip
    assert done.stderr.startswith(f"megafrontier: MEGAFRONTIER_ENV_TAR: {tmp_path}, need what ")


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
    assert f"sbcast fails on {first}\n" in job.output
    assert f"mkdir fails on {second}\n" in job.output
    assert (training.directory / "bad-nodes.txt").read_text() == f"{first}\n{second}\n"
    assert training.losses == unbroken(training.config, 2, *chosen)


# Slurm as a job sees it.
SCONTROL = """#!/bin/sh
case "$*" in
    *hostnames*) printf 'frontier00001\\nfrontier00002\\n' ;;
    *show*) echo ' Restarts=0 JobState=RUNNING ' ;;
    *) echo "scontrol $*" ;;
esac
"""
SINFO = "#!/bin/sh\nprintf 'frontier0000%s\\n' 1 2 3 3\n"
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
    return done.stdout


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
    assert (tmp_path / "tries").read_text() == "tried\n" * 3
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
    said = run_job_on_frontier00001_and_2(tmp_path, ranks="exit 75", code=75, scontrol=scontrol)
    assert "exit code 75, requeued\n" in said
    assert "scontrol requeue 7\n" in said


def test_a_job_waits_for_a_storage_that_fails_at_its_start_and_is_requeued(tmp_path):
    """As it would be if the storage failed a moment later."""
    python = tmp_path / "prefix" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/asked\nexit 70\n")
    python.chmod(0o755)
    said = run_job_on_frontier00001_and_2(
        tmp_path, ranks="", code=70, tools={"sleep": "#!/bin/sh\n"},
        MEGAFRONTIER_PREFIX=str(tmp_path / "prefix"),
    )  # fmt: skip
    assert (tmp_path / "asked").read_text() == "asked\n" * 24
    assert "exit code 70, requeued\n" in said
    assert "scontrol requeue 7\n" in said


@pytest.mark.parametrize(("name", "is_renamed"), [("megafrontier", True), ("mine", False)])
def test_a_job_is_named_after_its_run_unless_the_user_has_named_it(tmp_path, name, is_renamed):
    said = run_job_on_frontier00001_and_2(tmp_path, ranks="", code=0, SLURM_JOB_NAME=name)
    assert ("scontrol update JobId=7 JobName=gpt-20b\n" in said) == is_renamed


def test_what_salloc_runs_is_not_said_to_be_requeued(tmp_path):
    scontrol = SCONTROL.replace("JobState=RUNNING ", "JobState=RUNNING BatchFlag=0 ")
    said = run_job_on_frontier00001_and_2(tmp_path, ranks="exit 75", code=75, scontrol=scontrol)
    assert "exit code 75, not requeued (no batch job): start again to resume\n" in said
    assert "scontrol requeue" not in said


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
    for _ in range(2):
        for _ in range(2):
            assert "requeue 7\n" in start_with_three_attempts(tmp_path, "exit 70", 70)
        said = start_with_three_attempts(tmp_path, "exit 1", 3)
        assert "scontrol requeue" not in said
        assert "exit code 1 before all ranks had met, as in the last 3 starts" in said
    # Started again it tries as often: that is what the second round shows.


def test_starts_that_rank_0_notes_are_its_own_to_count(tmp_path):
    noting = "echo '{\"reached\": 0}' >>attempts.jsonl\nexit 70"
    for ranks in ("exit 70", "exit 70", *[noting] * 4, "exit 70", "exit 70"):
        assert "requeue 7\n" in start_with_three_attempts(tmp_path, ranks, 70)


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
        ("echo ' Restarts=0 JobState=RUNNING ' ;;\n *requeue*) exit 1 ;;", "but could not be"),
    ],
)
def test_a_job_that_cannot_be_requeued_says_so(tmp_path, answer, said):
    scontrol = SCONTROL.replace("echo ' Restarts=0 JobState=RUNNING ' ;;", answer)
    tools = {"sleep": "#!/bin/sh\n"}  # of some minutes in which Slurm is asked again
    shown = run_job_on_frontier00001_and_2(
        tmp_path, ranks="exit 75", code=75, scontrol=scontrol, tools=tools
    )
    assert f"exit code 75, {said}" in shown
    assert "submit again to resume\n" in shown


def test_options_that_come_too_late_are_refused(tmp_path):
    """In an allocation they would do nothing."""
    for file in ("train", "evaluate", "prepare"):
        done = subprocess.run(
            [ROOT / "slurm" / f"{file}.sbatch", "--ntasks-per-node=8", CONFIG],
            env=os.environ | {"SLURM_JOB_ID": "7", "MEGAFRONTIER_CLUSTER": "generic"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "--ntasks-per-node=8: options of sbatch, but this runs in job 7" in line


def test_what_salloc_starts_on_a_login_node_sends_the_ranks_to_a_node_of_the_job(tmp_path):
    """Slurm would name the login node to them, where none of them is."""
    ranks = 'echo "at $MASTER_ADDR."'
    said = run_job_on_frontier00001_and_2(tmp_path, ranks=ranks, code=0)
    assert "at frontier00001.\n" in said
    on_a_node = {"SLURMD_NODENAME": "frontier00001", "MASTER_ADDR": ""}
    said = run_job_on_frontier00001_and_2(tmp_path, ranks=ranks, code=0, **on_a_node)
    assert "at .\n" in said
