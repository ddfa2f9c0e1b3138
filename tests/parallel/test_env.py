"""A rank's identity comes from Slurm, torchrun or the local parent."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.parallel import env as identity
from megafrontier.parallel.env import Identity, identify, own_cores

SLURM = {
    "SLURM_PROCID": "11",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "3",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURMD_NODENAME": "frontier00002",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
LOCAL = {"MEGAFRONTIER_LOCAL": "2/4", "MEGAFRONTIER_PORT": "5000"}
HERE = socket.gethostname()


def without(environment, name):
    return {key: value for key, value in environment.items() if key != name}


def test_slurms_rank_size_local_rank_and_host_are_read():
    found = identify(SLURM)
    place = "tcp://10.0.0.1:3442", "frontier00002"
    assert found == Identity(11, 16, 3, "slurm", *place, "job 7.0, start 0")


def test_the_users_address_and_port_take_precedence_over_slurms():
    found = identify(SLURM | {"MASTER_ADDR": "n7", "MASTER_PORT": "555"})
    assert found.rendezvous == "tcp://n7:555"


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({}, "n01"),  # srun was called on a login node, or on a node of the job that has no task
        ({"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.5"}, "10.0.0.5"),  # on the first node itself
        ({"SLURM_STEP_NODELIST": "n0[2,4]"}, "10.0.0.1"),  # a name that cannot be looked up
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "10.0.0.1"),
        ({"SLURM_HET_SIZE": "2"}, "10.0.0.1"),
    ],
)
def test_ranks_meet_on_the_first_node_of_a_step(monkeypatch, changed, place):
    def look_up(host, port):
        if host != "n01":
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.5", 0))]

    monkeypatch.setattr(identity.socket, "getaddrinfo", look_up)
    environment = SLURM | {"SLURM_STEP_NODELIST": "n[01-02,5],m7"} | changed
    assert identify(environment).rendezvous == f"tcp://{place}:3442"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b[2-3]", "a1"), ("r[1-2]n[05,7]-x,b1", "r1n05-x"), ("", "")],
)
def test_the_first_node_of_a_slurm_list_is_found(nodes, first):
    assert identity._first_host(nodes) == first


def test_an_ipv6_address_is_bracketed():
    found = identify(SLURM | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "555"})
    assert found.rendezvous == "tcp://[fe80::1]:555"


def test_the_size_of_a_slurm_step_is_its_own_number_of_tasks():
    assert identify(SLURM | {"SLURM_STEP_NUM_TASKS": "12"}).world_size == 12


def test_torchruns_rank_size_and_local_rank_are_read():
    assert identify(TORCHRUN) == Identity(5, 8, 1, "torchrun", "tcp://node1:29500", HERE)


def test_other_launchers_set_the_variables_of_torchrun():
    """None of the ranks may take itself for a single process."""
    found = identify(without(TORCHRUN, "LOCAL_WORLD_SIZE"))
    assert (found.rank, found.world_size) == (5, 8)
    with pytest.raises(UserError, match="MASTER_ADDR: not set"):
        identify({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert identify({"WORLD_SIZE": "2"}).source == "alone"
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE: 2, of mpirun"):
        identify({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"})


def test_ranks_of_another_launcher_inside_a_slurm_shell_are_recognised():
    """`srun --pty bash`, and then mpirun or DeepSpeed's launcher."""
    shell = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert identify(shell).world_size == 1
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE: 2, of mpirun"):
        identify(shell | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"})
    found = identify(shell | without(TORCHRUN, "LOCAL_WORLD_SIZE"))
    assert (found.source, found.rank, found.world_size) == ("torchrun", 5, 8)


def test_each_start_of_a_slurm_step_has_its_own_name():
    changes = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    names = {identify(SLURM | {name: "8"}).start for name in changes}
    assert len({identify(SLURM).start, *names}) == 4
    parts = [{"SLURM_JOB_ID": job, "SLURM_HET_JOB_ID": "8"} for job in ("8", "9")]
    assert len({identify(SLURM | part).start for part in parts}) == 1


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_an_address_of_ipv6_may_stand_in_brackets(address):
    assert identify(SLURM | {"MASTER_ADDR": address}).rendezvous == "tcp://[::1]:3442"


def test_a_local_parents_rank_and_size_are_read():
    assert identify(LOCAL) == Identity(2, 4, 2, "local", "tcp://127.0.0.1:5000", HERE)


def test_a_process_without_launcher_is_alone():
    assert identify({}) == Identity(0, 1, 0, "alone", "", HERE)


def test_a_batch_script_is_not_a_slurm_task():
    assert identify(without(SLURM, "SLURM_STEP_ID")).source == "alone"


def test_a_local_parent_takes_precedence_over_torchrun_and_torchrun_over_slurm():
    assert identify(SLURM | TORCHRUN | LOCAL).source == "local"
    assert identify(SLURM | TORCHRUN).source == "torchrun"
    assert identify(SLURM | without(TORCHRUN, "LOCAL_WORLD_SIZE")).source == "slurm"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (without(SLURM, "SLURM_NTASKS"), "SLURM_NTASKS: '', need a whole number"),
        (SLURM | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID: 'x', need a whole number"),
        (SLURM | {"SLURM_PROCID": "-1"}, "SLURM_PROCID: '-1'"),
        (SLURM | {"SLURM_PROCID": "²"}, "SLURM_PROCID: '²'"),
        (SLURM | {"SLURM_PROCID": "16"}, "slurm: rank 16 of 16"),
        (SLURM | {"MASTER_PORT": "ssh"}, "MASTER_PORT: 'ssh'"),
        (SLURM | {"MASTER_PORT": "70000"}, "MASTER_PORT: 70000, need one from 1 to 65535"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT: 0, need one from 1 to 65535"),
        (without(SLURM, "SLURM_LAUNCH_NODE_IPADDR"), "MASTER_ADDR: not set"),
        (without(TORCHRUN, "RANK"), "RANK: ''"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR: not set"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT: ''"),
        (TORCHRUN | {"RANK": "8"}, "torchrun: rank 8 of 8"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "torchrun: rank 5 of 0"),
    ],
)
def test_missing_and_malformed_variables_are_named(environment, message):
    with pytest.raises(UserError, match=message):
        identify(environment)


def test_the_identity_does_not_depend_on_the_number_of_devices(monkeypatch):
    """With --gpus-per-task=1 every rank sees one device."""

    def refuse():
        raise AssertionError("the identity asked for the number of devices")

    monkeypatch.setattr(torch.cuda, "device_count", refuse)
    for environment in (SLURM, TORCHRUN, LOCAL, {}):
        identify(environment)


@pytest.mark.parametrize(
    ("size", "changed", "hosts"),
    [
        (4, {}, ["n1", "n1", "n2", "n2"]),
        (4, {"SLURM_DISTRIBUTION": "block:cyclic"}, ["n1", "n1", "n2", "n2"]),
        (4, {"SLURM_DISTRIBUTION": "cyclic"}, []),
        (4, {"SLURM_DISTRIBUTION": "plane=2"}, []),
        (5, {}, []),
        (4, {"SLURM_STEP_NODELIST": ""}, []),
    ],
)
def test_hosts_are_unknown_if_slurm_does_not_place_ranks_in_blocks(
    monkeypatch, size, changed, hosts
):
    """A guess could exclude a healthy node."""
    said = SimpleNamespace(stdout="n1\nn2\n")
    monkeypatch.setattr(identity.subprocess, "run", lambda *_, **__: said)
    environment = {"SLURM_STEP_NODELIST": "n[1-2]"} | changed
    assert identity.planned_hosts(environment, size) == hosts


def test_ranks_share_the_cores_of_a_host_unless_the_launcher_has_bound_them(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert own_cores({}) == 16
    assert own_cores({"LOCAL_WORLD_SIZE": "8"}) == 2
    assert own_cores({"MEGAFRONTIER_LOCAL": "3/4"}) == 4
    assert own_cores({"LOCAL_WORLD_SIZE": "64"}) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5, 6})
    assert own_cores({"LOCAL_WORLD_SIZE": "8"}) == 3
