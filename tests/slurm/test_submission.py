"""What the batch files of slurm/ submit, and what they refuse or warn of before a job waits."""

import os
import runpy
import shlex
import subprocess
import sys

import pytest
import torch

from tests.slurm.cluster import ROOT
from tests.slurm.test_endings import CONFIG, SINFO
from tests.tools import with_tools

START = ROOT / "slurm" / "start.sh"
QUICK = "machine=laptop"
"""Of a machine without ranks_per_host nothing is foreseen, for which torch would be imported."""


@pytest.fixture
def describe(monkeypatch, capsys):
    """Runs slurm/describe.py here, where torch is imported already: exit code, lines, errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["describe.py", *words])
        code = 0
        try:
            runpy.run_path(str(ROOT / "slurm" / "describe.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err

    monkeypatch.chdir(ROOT)
    return run


TRAIN = "slurm/train.sbatch"
SMALL = "configs/gpt-125m.yaml"


def call(*words, folder=ROOT, **variables):
    """A batch file outside of a job, unless the variables say otherwise."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    # No container, which lumi.sh has by default.
    environment |= {"MEGAFRONTIER_PREFIX": sys.prefix, "MEGAFRONTIER_IMAGE": ""} | variables
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def dry_run(*words: str, cluster: str = "frontier", folder=ROOT, **variables: str) -> list[str]:
    """The lines a batch file says, without any Slurm."""
    done = call(*words, folder=folder, DRY_RUN="1", MEGAFRONTIER_CLUSTER=cluster, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_dry_run_shows_what_would_be_submitted_and_run():
    words = ("slurm/train.sbatch", "--nodes=48", CONFIG, "train.steps=100000")
    done = call(*words, DRY_RUN="1", MEGAFRONTIER_CLUSTER="frontier")
    said = done.stdout.splitlines()
    submitted, *_, step = [line.split() for line in said]
    assert submitted[0] == "sbatch"
    assert {"--nodes=48", "--job-name=gpt-20b"} <= set(submitted)
    assert submitted[-3].endswith("slurm/train.sbatch")
    assert submitted[-2:] == [CONFIG, "train.steps=100000"]
    assert {"srun", "--gpus-per-task=1", "--gpu-bind=closest"} <= set(step)
    assert step[-5:] == ["-m", "megafrontier", "train", CONFIG, "train.steps=100000"]
    assert 'export NCCL_SOCKET_IFNAME="hsn0,hsn1,hsn2,hsn3"' in said
    assert any(line.startswith("module load") for line in said)
    first, *lines = done.stderr.splitlines()
    assert first == "layout: pair 2 x node 4 x world 48 = 384 ranks, on MI250X GCD"
    assert "sharded: weights pair, gradients node, optimizer world" in lines


def test_certify_comes_before_the_submission_and_the_runs_certificate_is_named():
    words = (TRAIN, "--dry-run", "--certify", "--nodes=48", CONFIG, "train.steps=100000")
    done = call(*words, MEGAFRONTIER_CLUSTER="frontier")
    assert done.returncode == 0, done.stderr
    certify = f"-m megafrontier certify {CONFIG} --nodes 48 train.steps=100000"
    assert certify in done.stderr
    assert "\ncertificate: none" in done.stderr
    done = call(TRAIN, "--dry-run", "--certify", CONFIG, MEGAFRONTIER_CLUSTER="frontier")
    assert (done.returncode, "--nodes: not given" in done.stderr) == (2, True)


NEVER = ("machine=frontier", "checkpoint.every=0", "checkpoint.minutes=0")
"""Saves only at the end."""


def test_a_job_that_would_not_save_before_its_time_limit_is_warned_of():
    words = (TRAIN, "--dry-run", "--nodes=4", "-t45", "--signal=B:USR1@900", SMALL, *NEVER)
    done = call(*words, MEGAFRONTIER_CLUSTER="frontier", SBATCH_TIMELIMIT="90")
    assert done.returncode == 0, done.stderr
    assert "\ncheckpoints: only at the end, after 572204 steps\n" in done.stderr
    assert "asked to stop, after 30 minutes, and a failure " in done.stderr


@pytest.mark.parametrize(
    ("cluster", "options", "environment", "limit", "signal"),
    [
        ("frontier", (), {}, "02:00:00", "B:USR1@300"),
        ("frontier", (), {"SBATCH_TIMELIMIT": "90"}, "90", "B:USR1@300"),
        ("frontier", ("-t45", "--signal=B:USR1@900"), {"SBATCH_TIMELIMIT": "90"}, "45",
         "B:USR1@900"),
        # By its file, which gives options.
        ("lumi", (), {"SBATCH_TIMELIMIT": "90"}, "2-00:00:00", "B:USR1@300"),
    ],
)  # fmt: skip
def test_a_run_is_described_with_the_time_limit_that_sbatch_takes(
    tmp_path, cluster, options, environment, limit, signal
):
    """That of the command before the environment's, and this before that of the batch file."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nprintf '%s\\n' run directory 3 0 \"$@\"\n")
    python.chmod(0o755)
    given = {"MEGAFRONTIER_PREFIX": str(tmp_path), **environment}
    words = (TRAIN, "--dry-run", "--nodes=4", *options, SMALL)
    done = call(*words, MEGAFRONTIER_CLUSTER=cluster, **given)
    assert done.returncode == 0, done.stderr
    described = done.stderr.splitlines()
    assert f"--time={limit}" in described
    assert f"--signal={signal}" in described


@pytest.mark.parametrize(
    ("limit", "after"),
    [
        ("90", "1.48 hours"),
        ("30:30", "29.5 minutes"),
        ("01:30:00", "1.48 hours"),
        ("2-12", "2.5 days"),
        ("1-00:30", "1.02 days"),
        ("1-00:00:01", "24 hours"),
        ("UNLIMITED", None),
        ("0", None),
    ],
)
def test_sbatchs_time_limits_are_understood(describe, limit, after):
    code, lines, _ = describe("--nodes=4", f"--time={limit}", "--signal=B:USR1@60", SMALL, *NEVER)
    assert code == 0
    warned = [line for line in lines if "asked to stop" in line]
    assert len(warned) == (after is not None)
    assert all(f"asked to stop, after {after}, and a failure " in line for line in warned)


def test_a_submission_asks_for_the_spare_nodes_too_and_checks_those_that_train():
    words = (TRAIN, "--dry-run", "-N4", SMALL, "run.spare_nodes=2")
    done = call(*words, MEGAFRONTIER_CLUSTER="frontier")
    assert done.returncode == 0, done.stderr
    submitted, *_, step = done.stdout.splitlines()
    assert "-N4 --nodes=6 --no-kill " in submitted
    assert step.startswith("srun --overlap --nodes=4 --ntasks=TASKS --exclude=SPARES ")
    said = done.stderr.splitlines()
    assert said[0] == "4 nodes train, 2 more are spares (run.spare_nodes)"
    assert " = 32 ranks, " in said[1]


def test_spare_nodes_need_a_number_of_nodes_and_of_tasks_on_each():
    for options, said in (
        ((), "--nodes: not given, need the number of nodes that train, with "),
        (("-N2", "-n4"), "--ntasks: 4, need --ntasks-per-node with run.spare_nodes=1"),
    ):
        done = call(TRAIN, "--dry-run", *options, SMALL, QUICK, "run.spare_nodes=1")
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"megafrontier: {said}")


def test_short_options_of_sbatch_take_their_values_along():
    options = ("-N", "2", "-W", "-qdebug", "-t", "1:00:00")
    said = dry_run("slurm/train.sbatch", *options, CONFIG, QUICK)[0]
    assert "-N2 -W -qdebug -t1:00:00" in said
    assert said.split()[-2:] == [CONFIG, QUICK]


def test_a_job_for_another_folder_is_described_and_gets_its_outputs_folder_there(tmp_path):
    """A config's path is looked up where the job will be, and so is that of Slurm's output."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "own.yaml").write_text((ROOT / CONFIG).read_text())
    train = str(ROOT / "slurm" / "train.sbatch")
    said = dry_run(train, "-D", "there", "own.yaml", folder=tmp_path)[0]
    assert f"--chdir={tmp_path}/there" in said
    assert said.split()[-1] == "own.yaml"


def test_a_job_of_another_cluster_has_the_functions_that_its_caller_exports(tmp_path):
    """`module` is one. Where sh is dash, what sbatch wraps does not hand them on."""
    job = "SLURM_JOB_ID=7 SLURMD_NODENAME=n SLURM_JOB_NODELIST="
    sbatch = f'#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\n{job} exec "$@"\n'
    variables = {
        "PATH": with_tools(tmp_path, sbatch=sbatch, srun="#!/bin/sh\n"),
        "BASH_FUNC_module%%": '() { echo "the caller\'s module $1"; }',
    }
    words = ("slurm/evaluate.sbatch", "--nodes=1", "run")
    done = call(*words, MEGAFRONTIER_CLUSTER="lumi", **variables)
    assert "the caller's module load" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


GENERIC = {"MEGAFRONTIER_CLUSTER": "generic"}


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ([TRAIN], {}, "CONFIG: not given, need"),
        (["slurm/evaluate.sbatch"], {}, "TARGET: not given, need"),
        (["slurm/prepare.sbatch"], {}, "--out: not given, need"),
        ([TRAIN, "--dry-run", "-a", "0-3", CONFIG], {}, "--array: 0-3, need a job for each run"),
        ([TRAIN, CONFIG], {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0-3"}, "--array: 0-3, "),
        ([TRAIN, "--time", "60", SMALL], {}, "CONFIG: 60, need the path of a .yaml; the values"),
        ([TRAIN, "--nodes=2", ":", "--nodes=1", SMALL], {}, "heterogeneous job (`:` between"),
        ([TRAIN, "--nodes=4", SMALL], {}, "data.train: empty, need at least one corpus"),
        ([TRAIN, CONFIG], {"MEGAFRONTIER_CLUSTER": "summit"}, "MEGAFRONTIER_CLUSTER: summit, need"),
        (
            ["slurm/evaluate.sbatch", "run"],
            GENERIC | {"MEGAFRONTIER_ENV_TAR": "/none"},
            "MEGAFRONTIER_ENV_TAR: /none, need what slurm/pack_env.sh wrote",
        ),
        (
            ["slurm/evaluate.sbatch", "run"],
            GENERIC | {"MEGAFRONTIER_PREFIX": "/none"},
            "MEGAFRONTIER_PREFIX: /none has no bin/python, need a Python environment",
        ),
        # Slurm could not write the job's output, which would say so.
        (
            [TRAIN, "--nodes=1", SMALL, "machine=laptop", "run.directory=/proc/none",
             "data.train=[{path: /none}]"],
            {},
            "run.directory: /proc/none: cannot be written, need a folder to write",
        ),
        # In an allocation, options of sbatch would do nothing.
        (
            [TRAIN, "--ntasks-per-node=8", CONFIG],
            GENERIC | {"SLURM_JOB_ID": "7"},
            "--ntasks-per-node=8: options of sbatch, but this runs in job 7",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line_before_a_job_waits(
    tmp_path, words, variables, said
):
    path = with_tools(tmp_path, sbatch=f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    done = call(*words, PATH=path, **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"megafrontier: {said}")
    assert not (tmp_path / "submitted").exists()


def test_frontiers_own_lines_reach_no_other_cluster():
    for cluster, ranks in (("lumi", 8), ("generic", 4)):
        fits = f"machine.device.ranks_per_host={ranks}"
        said = dry_run("slurm/train.sbatch", CONFIG, fits, cluster=cluster)[0]
        assert "--signal=B:USR1@300" in said
        assert "--requeue" in said
        assert "ABC123" not in said
        assert "--network" not in said
        started = shlex.split(said)[shlex.split(said).index(str(START)) + 1 :]
        assert {f"MEGAFRONTIER_CLUSTER={cluster}", f"MEGAFRONTIER_HOME={ROOT}"} <= set(started)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([CONFIG, "machine=frontier-larg"], "machine: frontier-larg, need the path of a "),
        (["--nodes=4", "--ntasks-per-node=4", CONFIG], "--ntasks-per-node: 4, need 8, by machine."),
        (["--nodes=4", "--ntasks=4", CONFIG], "--ntasks: 4, need 32, by machine."),
        (["--nodes=3", "configs/gpt-125m.yaml"], "train.global_batch: 256, need a multiple of "),
    ],
)
def test_what_cannot_be_described_is_refused_before_the_job_waits_in_the_queue(
    describe, words, said
):
    code, _, errors = describe(*words)
    assert code == 2
    assert errors.startswith(f"megafrontier: {said}")
    assert errors.count("\n") == 1


def test_what_a_job_would_lack_is_warned_of_before_it_waits(tmp_path, describe):
    """A corpus, say, which may be on the nodes' own disks."""

    def warnings(*chosen):
        code, lines, errors = describe("--nodes=4", "configs/gpt-125m.yaml", *chosen)
        assert (code, errors) == (0, "")
        return [line for line in lines if line.startswith("warning: ")]

    assert warnings() == []
    corpus, *of_torch = warnings(f"data.train=[{{path: {tmp_path}/corpus}}]")
    assert corpus.startswith(
        f"warning: here {tmp_path}/corpus.idx: cannot read the corpus: No such file or directory"
    )
    is_for_cpus = torch.version.cuda is None and torch.version.hip is None
    assert len(of_torch) == is_for_cpus
    said = "warning: here torch is a build for CPUs, need one for MI250X GCD; "
    assert all(line.startswith(said) for line in of_torch)
    (line,) = warnings("machine=laptop")
    assert line.startswith("warning: machine: states no device.ranks_per_host, so nothing is ")


def test_a_submission_excludes_the_runs_bad_nodes_and_those_that_the_user_names(tmp_path):
    (tmp_path / "bad-nodes.txt").write_text("frontier00002 \r\nfrontier00001\nunknown\n\n")
    chosen, path = (f"run.directory={tmp_path}", QUICK), with_tools(tmp_path, sinfo=SINFO)
    for own in (["-x", "frontier0000[7-9]"], ["-N2"]):
        words = shlex.split(dry_run("slurm/train.sbatch", *own, CONFIG, *chosen, PATH=path)[0])
        excluded = [word for word in words if word.startswith("--exclude=")][-1]
        mine = "" if own[0] == "-N2" else ",frontier0000[7-9]"
        assert excluded == f"--exclude=frontier00001,frontier00002{mine}"


@pytest.mark.parametrize("file", ["train", "evaluate", "prepare"])
def test_help_tells_what_stands_above_the_options(file):
    done = call(f"slurm/{file}.sbatch", "--help")
    assert done.returncode == 0
    assert f"  slurm/{file}.sbatch --" in done.stdout
    assert "#SBATCH" not in done.stdout
