"""What the batch files of slurm/ do in a job, besides training."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.data.corpora import read_corpus
from tests.slurm.cluster import ROOT
from tests.slurm.jobs import Job, unbroken
from tests.tools import with_tools


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


def test_a_users_own_variables_reach_the_ranks_on_frontier_and_a_modules_before_ours(
    training, tmp_path
):
    """With Frontier's own lines and file, and a module that sets variables itself."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    names = ("NCCL_SOCKET_IFNAME", "NCCL_CROSS_NIC", "GLOO_SOCKET_IFNAME")
    python.write_text(f"#!/bin/sh\necho {' '.join(f'${name}' for name in names)}\n")
    python.chmod(0o755)
    functions = tmp_path / "functions"  # the cluster's login shell is no bash
    functions.write_text("module() { export NCCL_SOCKET_IFNAME=of-module NCCL_CROSS_NIC=2; }\n")
    said = training.cluster.run(
        str(ROOT / "slurm" / "evaluate.sbatch"), "--nodes=2", "--ntasks-per-node=1",
        "--cpus-per-task=1", f"--output={tmp_path / 'said'}", "run",
        MEGAFRONTIER_CLUSTER="frontier", MEGAFRONTIER_PREFIX=str(tmp_path),
        NCCL_SOCKET_IFNAME="hsn0", BASH_ENV=str(functions),
    )  # fmt: skip
    job = Job(training.cluster, said.split()[-1])
    assert job.ended() == "COMPLETED", job.output
    assert job.output.splitlines() == ["hsn0 2 hsn0"] * 2


def test_a_job_in_a_container_has_what_an_earlier_one_compiled_on_its_first_and_last_node(
    training, tmp_path
):
    """Of the container and of the rank there is only a script, which says where it runs."""
    runner = '#!/bin/bash\nwhile [[ $1 != *.sif ]]; do shift; done\nexport IN=$1\nexec "${@:2}"\n'
    path = with_tools(tmp_path, apptainer=runner)
    python = f"""#!/bin/bash
    if [[ "$*" == *describe.py* ]]; then
        printf '%s\\n' run {tmp_path}/run 3 0 none false
        exit
    fi
    mkdir -p $TRITON_CACHE_DIR
    echo "runs in ${{IN##*/}} with $(ls $TRITON_CACHE_DIR | wc -l) kernels"
    touch $TRITON_CACHE_DIR/of-$SLURMD_NODENAME
    """
    (tmp_path / "bin").mkdir()
    with_tools(tmp_path / "bin", python=python)
    (tmp_path / "image.sif").touch()
    given = {"PATH": path, "MEGAFRONTIER_IMAGE": str(tmp_path / "image.sif")}
    given |= {"MEGAFRONTIER_PREFIX": str(tmp_path)}
    given |= {"MEGAFRONTIER_NODE_DISK": str(training.cluster.folder / "disk")}
    for kernels in (0, 2):
        job = training.submit(**given)
        assert job.ended() == "COMPLETED", job.output
        assert job.output.count(f"runs in image.sif with {kernels} kernels\n") == 2, job.output
    assert [*training.cluster.folder.glob("disks/*/megafrontier-*/*")] == []


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
