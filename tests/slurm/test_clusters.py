"""What the clusters' files set, and how they run Python in containers. Scripts stand in for the
clusters' commands."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.slurm.cluster import ROOT
from tests.slurm.test_submission import GENERIC, SMALL, TRAIN, call, dry_run
from tests.tools import with_tools

# OLCF's module of the network plugin sets variables itself.
MODULES = """module() {
    echo "module $*" >&2
    [[ $* != *rccl-net-plugin* ]] ||
        export NCCL_SOCKET_IFNAME=of-module FI_OF_MODULE=1 NCCL_CROSS_NIC=2
}
"""
SLINGSHOT = {
    "GLOO_SOCKET_IFNAME": "hsn0", "NCCL_NET_GDR_LEVEL": "PHB", "HSA_FORCE_FINE_GRAIN_PCIE": "1",
    "FI_CXI_DISABLE_HOST_REGISTER": "1", "FI_CXI_DEFAULT_CQ_SIZE": "131072", "MASTER_PORT": "3442",
}  # fmt: skip
ALL_NICS = "hsn0,hsn1,hsn2,hsn3"
NO_IMAGE = {"MEGAFRONTIER_IMAGE": ""}


def entered(cluster, nodes=2, **given):
    """The variables of a job that has entered a cluster's environment, and what it says."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NCCL"))}
    job = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes), "SLURMD_NODENAME": "node1",
        "MEGAFRONTIER_CLUSTER": cluster, "MEGAFRONTIER_PREFIX": sys.prefix, "home": str(ROOT),
    }  # fmt: skip
    script = f"set -euo pipefail; {MODULES}. slurm/lib.sh; enter_job; exec env -0"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment | NO_IMAGE | job | given, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pairs = [pair.partition("=") for pair in done.stdout.split("\0") if pair]
    return {name: value for name, _, value in pairs}, done.stderr


@pytest.mark.parametrize(
    ("cluster", "nodes", "expected"),
    [
        ("frontier", 2, SLINGSHOT | {
            "NCCL_SOCKET_IFNAME": "of-module", "FI_OF_MODULE": "1", "NCCL_CROSS_NIC": "2",
            "FI_MR_CACHE_MONITOR": "kdreg2", "FI_CXI_RDZV_PROTO": "alt_read", "NCCL_NET": None,
            "HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": f"/mnt/bb/{os.environ.get('USER', 'root')}"
            "/caches/triton"}),
        ("frontier", 1, SLINGSHOT | {
            "NCCL_SOCKET_IFNAME": ALL_NICS, "FI_OF_MODULE": None, "NCCL_CROSS_NIC": "1"}),
        ("lumi", 2, SLINGSHOT | {
            "NCCL_SOCKET_IFNAME": ALL_NICS, "FI_MR_CACHE_MONITOR": "userfaultfd",
            "NCCL_NET": "AWS Libfabric", "NCCL_CROSS_NIC": "1"}),
        ("lumi", 1, SLINGSHOT | {"NCCL_SOCKET_IFNAME": ALL_NICS, "NCCL_NET": None}),
        ("generic", 2, {"MASTER_PORT": "20007", "NCCL_SOCKET_IFNAME": None}),
        ("nvlink8", 2, {"MASTER_PORT": "20007", "NCCL_SOCKET_IFNAME": None}),
    ],
)  # fmt: skip
def test_a_job_gets_the_variables_of_its_cluster(cluster, nodes, expected):
    """A module's own win over ours. On one node no network plugin is named or loaded."""
    variables, _ = entered(cluster, nodes)
    assert {name: variables.get(name) for name in expected} == expected


OWN = {
    "NCCL_SOCKET_IFNAME": "hsn0", "GLOO_SOCKET_IFNAME": "hsn1", "NCCL_CROSS_NIC": "0",
    "FI_MR_CACHE_MONITOR": "memhooks", "NCCL_NET": "Socket", "MIOPEN_USER_DB_PATH": "/own",
    "TRITON_CACHE_DIR": "/own/triton", "MASTER_PORT": "4000",
}  # fmt: skip


@pytest.mark.parametrize("cluster", ["frontier", "lumi", "generic", "nvlink8"])
def test_a_users_own_variables_win_over_those_of_modules_and_of_the_cluster(cluster):
    variables, _ = entered(cluster, **OWN)
    assert {name: variables.get(name) for name in OWN} == OWN


@pytest.mark.parametrize("cluster", ["lumi", "generic", "nvlink8"])
def test_a_submission_hands_a_users_own_variables_on(cluster):
    """A site may export none by default."""
    said = dry_run("slurm/evaluate.sbatch", "-N2", "run", cluster=cluster, **NO_IMAGE, **OWN)[0]
    handed_on = {f"{name}={value}" for name, value in OWN.items() if name != "MASTER_PORT"}
    assert handed_on <= set(shlex.split(said))


def test_frontiers_libraries_are_those_of_the_loaded_programming_environment():
    cray = {"CRAY_LD_LIBRARY_PATH": "/opt/cray/new"}
    variables, said = entered("frontier", LD_LIBRARY_PATH="/own", **cray)
    assert variables["LD_LIBRARY_PATH"] == "/opt/cray/new:/own"
    assert said.index("rocm/7.1.1") < said.index("module load rccl-net-plugin")


def test_a_dry_run_knows_that_one_node_needs_no_network_plugin():
    for nodes, is_loaded in ((1, False), (2, True)):
        said = dry_run("slurm/evaluate.sbatch", f"-N{nodes}", "run")
        assert ("module load rccl-net-plugin " in said) == is_loaded


CONTAINER = """#!/bin/bash
echo "$(basename "$0") $*" >>{log}
while [[ $1 != *.sif && $1 != *.sqsh ]]; do shift; done
shift
exec "$@"
"""
"""Runs the command that follows the image, and records its own arguments."""
DESCRIBING = "#!/bin/sh\nprintf '%s\\n' run directory 3 0 none false\n"


@pytest.fixture
def container(tmp_path):
    """A PATH with runners of containers, and the file of their calls. There are images, too."""
    log = tmp_path / "log"
    names = ("apptainer", "singularity", "enroot")
    path = with_tools(tmp_path, **dict.fromkeys(names, CONTAINER.format(log=log)))
    for image in ("image.sif", "image.sqsh"):
        (tmp_path / image).touch()
    return path, log


@pytest.fixture
def prefix(tmp_path):
    """An environment whose Python describes any run at once."""
    folder = tmp_path / "environment" / "bin"
    folder.mkdir(parents=True)
    with_tools(folder, python=DESCRIBING)
    return str(folder.parent)


@pytest.mark.parametrize(
    ("cluster", "runner"),
    [
        ("frontier", "apptainer exec --rocm"),
        ("lumi", "singularity run"),
        ("generic", "apptainer exec"),
        ("nvlink8", "apptainer exec --nv"),
    ],
)
def test_a_submission_is_described_and_run_in_the_image(
    tmp_path, container, prefix, cluster, runner
):
    path, log = container
    image = tmp_path / "image.sif"
    given = {"PATH": path, "MEGAFRONTIER_IMAGE": str(image), "MEGAFRONTIER_PREFIX": prefix}
    *_, step = dry_run(TRAIN, "-N2", SMALL, cluster=cluster, **given)
    called = log.read_text()
    assert called.startswith(f"{runner} --bind {ROOT}:{ROOT},")
    python = f"{prefix}/bin/python"
    describing = f" {image} env PYTHONPATH={ROOT} {python} {ROOT}/slurm/describe.py --nodes=2 "
    assert describing in called
    binds = called.split()[called.split().index("--bind") + 1]
    assert f"{prefix}:{prefix}" in binds.split(",")
    words = shlex.split(step)
    assert words[0] == "srun"
    start = words.index(runner.split()[0])
    ran = [*runner.split(), "--bind", binds, str(image), python, "-m", "megafrontier", "train"]
    assert words[start:][: len(ran)] == ran
    assert words[start - 1] == "sh", "the stop signal is ignored in the container, too"


def test_an_evaluation_runs_in_the_image_with_the_images_own_python(tmp_path, container):
    given = {"PATH": container[0], "MEGAFRONTIER_IMAGE": str(tmp_path / "image.sif")}
    given["MEGAFRONTIER_PREFIX"] = ""
    *_, step = dry_run("slurm/evaluate.sbatch", "-N1", "run", cluster="lumi", **given)
    assert step.endswith(f" {tmp_path}/image.sif python3 -m megafrontier evaluate run ")


def test_an_environment_in_a_squashfs_file_lies_on_top_of_the_image(tmp_path, container):
    (tmp_path / "own.sqsh").touch()
    given = {"PATH": container[0], "MEGAFRONTIER_IMAGE": str(tmp_path / "image.sif")}
    given["MEGAFRONTIER_PREFIX"] = str(tmp_path / "own.sqsh")
    *_, step = dry_run("slurm/evaluate.sbatch", "-N1", "run", cluster="lumi", **given)
    assert f"{tmp_path}/own.sqsh:/environment:image-src=/ {tmp_path}/image.sif " in step
    assert step.endswith("/environment/bin/python -m megafrontier evaluate run ")


def test_pyxis_starts_the_image_of_a_step_and_enroot_that_of_a_description(
    tmp_path, container, prefix
):
    path, log = container
    image = tmp_path / "image.sqsh"
    given = {"PATH": path, "MEGAFRONTIER_IMAGE": str(image), "MEGAFRONTIER_PREFIX": prefix}
    *_, step = dry_run(TRAIN, "-N2", SMALL, cluster="nvlink8", **given)
    called = log.read_text()
    assert called.startswith(f"enroot start --mount={ROOT}:{ROOT} ")
    assert f" {image} env --chdir={ROOT} PYTHONPATH={ROOT} {prefix}/bin/python " in called
    words = shlex.split(step)
    assert {f"--container-image={image}", f"--container-workdir={ROOT}"} <= set(words)
    (mounts,) = [word for word in words if word.startswith("--container-mounts=")]
    assert f"{ROOT}:{ROOT}" in mounts.removeprefix("--container-mounts=").split(",")
    assert words.index("sh") > words.index(mounts), "srun's options come before the command"
    assert f" {prefix}/bin/python -m megafrontier train " in step


def test_parts_of_a_corpus_are_prepared_in_the_image(tmp_path, container):
    given = {
        "PATH": container[0],
        "MEGAFRONTIER_IMAGE": str(tmp_path / "image.sif"),
        "DRY_RUN": "1",
    }
    given |= {"SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0"}
    words = ("slurm/prepare.sbatch", "texts", "--tokenizer", "bytes", "--out", "corpus")
    done = call(*words, SLURM_ARRAY_TASK_COUNT="16", MEGAFRONTIER_CLUSTER="lumi", **given)
    assert done.stdout.startswith("singularity run --bind "), done.stderr
    assert done.stdout.endswith(
        "megafrontier prepare texts --tokenizer bytes --out corpus --part 4/16 \n"
    )


@pytest.mark.parametrize(
    ("image", "prefix", "said"),
    [
        ("none.sif", "", "MEGAFRONTIER_IMAGE: none.sif, need the file of a container image"),
        ("image.sif", "none", "MEGAFRONTIER_PREFIX: none, need an environment on top of image.sif"),
        ("image.sqsh", "image.sif", "MEGAFRONTIER_PREFIX: image.sif, need a folder, because "),
    ],
)
@pytest.mark.parametrize("file", ["train", "evaluate"])
def test_an_image_or_environment_that_is_not_there_is_refused(
    tmp_path, container, file, image, prefix, said
):
    given = GENERIC | {"PATH": container[0], "MEGAFRONTIER_IMAGE": image}
    given["MEGAFRONTIER_PREFIX"] = prefix
    done = call(f"{ROOT}/slurm/{file}.sbatch", f"{ROOT}/{SMALL}", folder=tmp_path, **given)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"megafrontier: {said}")


def test_a_job_in_the_debug_queue_is_never_requeued_and_waits_for_no_other(prefix):
    """OLCF prohibits both."""
    given = {"MEGAFRONTIER_PREFIX": prefix}
    for options, is_single in ((("-q", "debug"), True), (("--qos=normal",), False), ((), False)):
        said = dry_run(TRAIN, "-N2", *options, SMALL, **given)[0]
        assert ("--no-requeue" in said.split()) == is_single
    assert "--no-requeue" in dry_run(TRAIN, "-N2", SMALL, SBATCH_QOS="debug", **given)[0].split()
    words = ("-q", "debug", "--array=0-3", "texts", "--tokenizer", "bytes", "--out", "corpus")
    done = call("slurm/prepare.sbatch", "--dry-run", *words, MEGAFRONTIER_CLUSTER="frontier")
    assert done.returncode == 2
    assert done.stderr == (
        "megafrontier: --qos: debug, need a queue that allows jobs to wait for others\n"
    )


def test_a_merged_corpus_on_lustre_is_striped(tmp_path):
    for kind in ("idx", "bin"):
        (tmp_path / f"corpus.part-00001-of-00001.{kind}").touch()
    words = ("slurm/prepare.sbatch", "texts", "--tokenizer", "bytes", "--out", f"{tmp_path}/corpus")
    given = GENERIC | {"SLURM_JOB_ID": "1", "DRY_RUN": "1"}
    for works, is_striped in (("exit 0", True), ("exit 1", False)):
        path = with_tools(tmp_path, lfs=f"#!/bin/sh\n{works}\n")
        done = call(*words, PATH=path, **given)
        assert done.returncode == 0, done.stderr
        line = f"lfs setstripe --stripe-count 8 --stripe-size 16M {tmp_path}/corpus.bin.partial \n"
        assert (line in done.stdout) == is_striped
        assert "megafrontier merge" in done.stdout
