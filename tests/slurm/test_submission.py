"""What the batch files of slurm/ submit, and what they refuse or warn of before a job waits."""

import os
import runpy
import shlex
import subprocess
import sys

import pytest
import torch

from tests.slurm.cluster import ROOT
from tests.slurm.test_batch_files import CONFIG, SINFO
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


def dry_run(*words: str, cluster: str = "frontier", folder=ROOT, **variables: str) -> list[str]:
    """The lines a batch file says, outside of a job and without any Slurm."""
    return dry_runs_words(*words, cluster=cluster, folder=folder, **variables)[0]


def dry_runs_words(*words: str, cluster: str, folder=ROOT, **variables: str):
    """What it prints, and what it says beside it, in lines."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | variables
    environment |= {"DRY_RUN": "1", "MEGAFRONTIER_CLUSTER": cluster}
    environment["MEGAFRONTIER_PREFIX"] = os.path.dirname(os.path.dirname(sys.executable))
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture(scope="module")
def described():
    """Both of a run on nodes of which something can be foreseen."""
    words = ("slurm/train.sbatch", "--nodes=48", CONFIG, "train.steps=100000")
    return dry_runs_words(*words, cluster="frontier")


def test_a_dry_run_shows_what_would_be_submitted_and_run(described):
    said, _ = described
    submitted, *_, step = [line.split() for line in said]
    assert submitted[0] == "sbatch"
    assert {"--nodes=48", "--job-name=gpt-20b"} <= set(submitted)
    assert submitted[-3].endswith("slurm/train.sbatch")
    assert submitted[-2:] == [CONFIG, "train.steps=100000"]
    assert {"srun", "--gpus-per-task=1", "--gpu-bind=closest"} <= set(step)
    assert step[-5:] == ["-m", "megafrontier", "train", CONFIG, "train.steps=100000"]
    assert 'export NCCL_SOCKET_IFNAME="hsn0,hsn1,hsn2,hsn3"' in said
    assert any(line.startswith("module load") for line in said)


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


def test_tasks_of_an_array_are_not_let_train_one_run_together():
    words = ["slurm/train.sbatch", "--dry-run", "-a", "0-3", CONFIG]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    for found in ({}, {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0-3"}):
        given = words if not found else ["slurm/train.sbatch", CONFIG]
        done = subprocess.run(
            given, cwd=ROOT, env=environment | found, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.startswith("megafrontier: --array: 0-3, need a job for each run")


@pytest.mark.parametrize("file", ["train", "evaluate", "prepare"])
def test_on_frontier_every_job_asks_for_the_disk_that_a_packed_environment_needs(file):
    lines = (ROOT / "slurm" / f"{file}.sbatch").read_text().splitlines()
    assert lines.index("#SBATCH --constraint=nvme") > lines.index("# Frontier:")


def test_a_job_of_another_cluster_has_the_functions_that_its_caller_exports(tmp_path):
    """`module` is one. Where sh is dash, what sbatch wraps does not hand them on."""
    job = "SLURM_JOB_ID=7 SLURMD_NODENAME=n SLURM_JOB_NODELIST="
    sbatch = f'#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\n{job} exec "$@"\n'
    path = with_tools(tmp_path, sbatch=sbatch, srun="#!/bin/sh\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environment |= {"MEGAFRONTIER_CLUSTER": "lumi", "MEGAFRONTIER_PREFIX": sys.prefix}
    environment["BASH_FUNC_module%%"] = '() { echo "the caller\'s module $1"; }'
    done = subprocess.run(
        ["slurm/evaluate.sbatch", "--nodes=1", "run"], cwd=ROOT, env=environment | {"PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "the caller's module load" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_a_run_whose_folder_cannot_be_written_is_not_submitted(tmp_path):
    """Slurm could not write the job's output, which would say so."""
    path = with_tools(tmp_path, sbatch=f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    (tmp_path / "file").touch()
    chosen = [f"run.directory={tmp_path}/file/run", f"data.train=[{{path: {tmp_path}/corpus}}]"]
    done = subprocess.run(
        ["slurm/train.sbatch", "configs/gpt-125m.yaml", *chosen], cwd=ROOT, check=False,
        env=os.environ | {"MEGAFRONTIER_PREFIX": sys.prefix, "PATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert "warning: --nodes: not given, so nothing is checked for them" in first
    said = f"run.directory: {tmp_path}/file/run: cannot be written, need a folder to write"
    assert last == f"megafrontier: {said}"
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


def submit(*options):
    """What slurm/train.sbatch says of gpt-125m with these options."""
    return subprocess.run(
        ["slurm/train.sbatch", "--dry-run", *options, "configs/gpt-125m.yaml"],
        cwd=ROOT, env=os.environ | {"MEGAFRONTIER_PREFIX": sys.prefix}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-n", "8"], "--ntasks: 8, need 16,"),
        (["--time", "60"], "CONFIG: 60, need the path of a .yaml; the values of"),
        ([":", "--nodes=1"], "heterogeneous job (`:` between options): ranks run on its first"),
    ],
)
def test_options_that_cannot_train_are_refused_before_the_job_waits(options, said):
    done = submit("--nodes=2", *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"megafrontier: {said}")
    assert done.stderr.count("\n") == 1


def test_a_job_without_training_data_is_not_submitted(tmp_path):
    path = with_tools(tmp_path, sbatch=f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    done = subprocess.run(
        ["slurm/train.sbatch", "--nodes=4", "configs/gpt-125m.yaml", f"run.directory={tmp_path}"],
        cwd=ROOT, env=os.environ | {"MEGAFRONTIER_PREFIX": sys.prefix, "PATH": path}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "megafrontier: data.train: empty, need at least one corpus, as {path: PREFIX}\n"
    )
    assert not (tmp_path / "submitted").exists()


def test_what_runs_on_the_nodes_is_told_before_the_job_waits(described):
    _, (first, wires) = described
    assert wires.startswith("wires: weights ")
    ranks = "pair 2 x node 4 x world 48 = 384 ranks"
    assert first.startswith(f"{ranks}; weights pair, gradients node, ")


def test_a_level_of_very_many_peers_is_warned_of_before_the_job_waits(describe):
    code, lines, _ = describe(
        "--nodes=1024", CONFIG, "train.global_batch=8192", "train.micro_batch=1"
    )
    assert code == 0
    (line,) = (line for line in lines if line.startswith("warning: "))
    assert line.startswith("warning: machine.levels.world: 1024 peers")
    assert "frontier-large" in line


def test_an_unknown_cluster_is_refused_in_one_line():
    done = subprocess.run(
        ["slurm/train.sbatch", CONFIG], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"MEGAFRONTIER_CLUSTER": "summit"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "megafrontier: MEGAFRONTIER_CLUSTER: summit, need the name of a file in slurm/env\n"
    )


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
def test_batch_files_without_arguments_say_what_they_need(file):
    done = subprocess.run(
        [ROOT / "slurm" / f"{file}.sbatch"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "not given, need" in line


@pytest.mark.parametrize("file", ["train", "evaluate", "prepare"])
def test_help_tells_what_stands_above_the_options(file):
    done = subprocess.run(
        [ROOT / "slurm" / f"{file}.sbatch", "--help"], capture_output=True, text=True, check=True
    )
    assert f"  slurm/{file}.sbatch --" in done.stdout
    assert "#SBATCH" not in done.stdout


@pytest.mark.parametrize(
    ("variable", "said"),
    [("MEGAFRONTIER_ENV_TAR", "need what slurm/pack_env.sh wrote"),
     ("MEGAFRONTIER_PREFIX", "has no bin/python, need a Python environment")],
)  # fmt: skip
def test_an_environment_that_is_not_there_is_told_before_a_job_waits(tmp_path, variable, said):
    path = with_tools(tmp_path, sbatch=f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environment |= {"MEGAFRONTIER_CLUSTER": "generic", "PATH": path, "DRY_RUN": "0"}
    environment |= {"MEGAFRONTIER_PREFIX": sys.prefix}
    command = [ROOT / "slurm" / "evaluate.sbatch", "run"]
    for given, is_submitted in (({variable: "/none"}, False), ({}, True)):
        done = subprocess.run(
            command, env=environment | given, cwd=tmp_path, check=False, capture_output=True,
            text=True,
        )  # fmt: skip
        assert (tmp_path / "submitted").exists() == is_submitted
        assert is_submitted or (done.returncode == 2 and f"{variable}: /none" in done.stderr)
        assert is_submitted or said in done.stderr
