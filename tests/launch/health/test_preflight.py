"""Before the first step, every node is tried, and a node that is not fit is named."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megafrontier.cli import main
from megafrontier.common.errors import BAD_INPUT, BAD_NODE, FAILED, LOST, UserError
from megafrontier.config import DeviceConfig
from megafrontier.launch import context
from megafrontier.launch.health import preflight
from megafrontier.launch.health.preflight import check_device, check_rank
from megafrontier.parallel.env import Identity, identify
from megafrontier.parallel.mesh import Mesh
from megafrontier.plan.resolve import resolve_plan
from megafrontier.training.callbacks.save import checkpoint_bytes, start_saving
from megafrontier.training.trainer import build_trainer
from tests import runs

pytestmark = pytest.mark.usefixtures("no_training")
SHORT = ("train.steps=2", "evaluate.batches=0")
GIB = 2**30


@pytest.fixture
def config_file(tmp_path):
    path = runs.make_config_file(tmp_path)
    path.write_text(path.read_text().replace("node: {size: 2}, ", ""))
    return path


@pytest.fixture
def hosts(monkeypatch):
    """Spread the ranks over hosts, given as one letter each."""

    def spread(letters):
        def on_its_host(environment):
            found = identify(environment)
            if found.source == "alone":
                return found
            first = letters.index(letters[found.rank])
            return replace(found, host=letters[found.rank], local_rank=found.rank - first)

        monkeypatch.setattr(context, "identify", on_its_host)

    return spread


@pytest.fixture
def change(monkeypatch):
    """Change what ranks measure: `by(rank, level, rate)`."""

    def change_by(by):
        measure = preflight.measure

        def measured(hierarchy, level, size_bytes):
            return by(hierarchy.world.rank, level, measure(hierarchy, level, size_bytes))

        monkeypatch.setattr(preflight, "measure", measured)

    return change_by


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that there are GPUs, with so many free GiB each, or that raise this."""

    def have(*free):
        def mem_get_info(device):
            if isinstance(free[device.index], str):
                raise torch.AcceleratorError(free[device.index])
            return free[device.index] * GIB, 64 * GIB

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(free))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)

    return have


def train(config_file, ranks, *overrides):
    return main(["train", str(config_file), "--nproc", str(ranks), *SHORT, *overrides])


def log(config_file) -> str:
    return runs.log(config_file.parent / "run")


def bad_nodes(config_file) -> list[str]:
    path = config_file.parent / "run" / "bad-nodes.txt"
    return path.read_text().splitlines() if path.exists() else []


def is_on_rank(*ranks):
    local = os.environ.get("MEGAFRONTIER_LOCAL", "")
    return any(local.startswith(f"{rank}/") for rank in ranks)


def test_healthy_ranks_pass_without_a_word(config_file, hosts, change, capfd):
    hosts("aabb")
    seen = []

    def disturbed_for_a_moment(rank, level, rate):
        seen.append(level)
        return one_slow_host(rank + 4, level, rate) if seen.count(level) == 1 else 5.0

    change(disturbed_for_a_moment)
    assert train(config_file, 4) == 0
    assert capfd.readouterr().err == ""
    assert "preflight" not in log(config_file)
    assert not list((config_file.parent / "run").glob(".preflight*"))
    assert bad_nodes(config_file) == []


def test_the_links_of_a_tensor_split_are_timed_by_themselves(
    config_file, hosts, monkeypatch, capfd
):
    """Those to ranks with other samples are fast."""
    hosts("abcd")

    def measured(hierarchy, level, _):
        is_bad = hierarchy.size == 2 and hierarchy.rank == 1 and hierarchy.world.rank == 3
        return float("inf") if hierarchy.groups[level] is None else 0.5 if is_bad else 5.0

    monkeypatch.setattr(preflight, "measure", measured)
    assert train(config_file, 4, "parallel.tensor=2", "preflight.if_slow=fail") != 0
    assert "d: link pair 0.5 GB/s, need" in capfd.readouterr().err


def one_slow_host(rank, level, rate):
    """Host c (ranks 4 and 5) has a bad cable: everything beyond the pair is slow."""
    return 10.0 if level == 0 else 0.5 if rank in (4, 5) else 5.0


def test_slow_links_and_wrong_clocks_are_warnings_that_name_hosts_and_ranks(
    config_file, hosts, change, monkeypatch
):
    hosts("aabbccdd")
    change(one_slow_host)
    now = time.time
    monkeypatch.setattr(preflight.time, "time", lambda: now() + 100 * is_on_rank(2, 3))
    assert train(config_file, 8) == 0
    assert "warning: preflight: b: clock off by +" in log(config_file)
    assert log(config_file).count("clock") == 1
    assert "warning: preflight: c: link world 0.5 GB/s, need 1.25 (all ranks' median 5)\n" in log(
        config_file
    )
    assert bad_nodes(config_file) == []


def test_a_slow_link_is_a_failure_only_if_asked_for(config_file, hosts, change, capfd):
    hosts("aabbccdd")
    change(one_slow_host)
    assert train(config_file, 8, "preflight.if_slow=fail") == BAD_NODE
    error = capfd.readouterr().err
    assert error.startswith("megafrontier: preflight: c: link world 0.5 GB/s, need")
    assert error.count("\n") == 1
    assert bad_nodes(config_file) == ["c"]


def test_links_are_compared_with_the_stated_rate(config_file, hosts, change):
    hosts("aabb")
    change(lambda rank, level, rate: 20.0 if level == 0 else 3.0)
    rates = "machine={levels: {pair: {size: 2, gigabytes_per_second: 100}, world: {}}}"
    assert train(config_file, 4, rates) == 0
    assert "a: link pair 20 GB/s, need 25 (stated 100)" in log(config_file)
    assert "b: link pair 20 GB/s, need 25 (stated 100)" in log(config_file)
    assert "link world" not in log(config_file)


# Devices


def test_what_most_hosts_fail_is_not_blamed_on_nodes(config_file, hosts, capfd):
    hosts("aabb")
    assert train(config_file, 4, "machine.device.memory_gib=1e6") == FAILED
    assert capfd.readouterr().err.startswith("megafrontier: preflight: 2 of 2 hosts fail: a: host")
    assert bad_nodes(config_file) == []


def test_the_memory_of_a_host_is_checked_if_it_is_stated():
    cpu = torch.device("cpu")
    for device in (
        DeviceConfig(name="cpu"),
        DeviceConfig(name="cpu", memory_gib=0.1),
        DeviceConfig(name="MI250X", memory_gib=1e6),
    ):
        assert check_device(device, cpu) is None
    problem = check_device(DeviceConfig(name="cpu", memory_gib=1e6), cpu)
    assert "GiB of memory, need 900000.0" in str(problem)


FRONTIER = DeviceConfig(name="MI250X GCD", memory_gib=64)
ON_SLURM = Identity(3, 8, 3, "slurm", "tcp://x:1", "frontier00012")


def test_a_rank_without_the_accelerator_that_the_machine_has_cannot_start(gpus):
    """It is refused when ranks meet, like other bad input: if most ranks say the same, an
    environment with a torch for CPUs, no node is to blame."""
    gpus()
    with pytest.raises(UserError, match="name: MI250X GCD, but torch finds no accelerator"):
        check_rank(FRONTIER, ON_SLURM, False)
    check_rank(FRONTIER, replace(ON_SLURM, source="local"), False)
    check_rank(replace(FRONTIER, name="cpu"), ON_SLURM, False)


def test_memory_that_another_process_uses_is_found_before_the_ranks_take_any(gpus):
    """RCCL takes some for each communicator, and then nobody sees which process has it. To ask for
    the free memory takes some, too, of which another process may have left none."""
    gpus(62.0, 62.0, "CUDA error: out of memory\nMore.", 31.0)
    check_rank(FRONTIER, replace(ON_SLURM, local_rank=1), True)
    with pytest.raises(UserError, match=r"device 3: 31\.0 GiB of memory, need 60\.4 .*memory_gib"):
        check_rank(FRONTIER, ON_SLURM, True)
    with pytest.raises(UserError, match=r"device 2: CUDA error: out of memory, need 60\.4 GiB"):
        check_rank(FRONTIER, replace(ON_SLURM, local_rank=2), True)
    check_rank(FRONTIER, ON_SLURM, False)


def test_ranks_that_would_share_an_accelerator_cannot_start(gpus):
    """RCCL would refuse them later, as if a link were broken, and the job would start again."""
    device = DeviceConfig(name="any")
    identity = replace(ON_SLURM, source="torchrun", host="host")
    gpus(62.0, 62.0, 62.0, 62.0)
    check_rank(device, identity, False)
    with pytest.raises(UserError, match="local rank 4 on host sees 4 accelerators"):
        check_rank(device, replace(identity, local_rank=4), False)
    check_rank(replace(device, name="cpu"), replace(identity, local_rank=4), False)
    gpus(62.0)  # a launcher that shows each rank its own
    check_rank(device, replace(identity, local_rank=4), False)


@pytest.mark.parametrize(
    ("rank", "local_rank", "expected"),
    [(9, 9, 8), (8, 0, 16), (1, 0, 8)],
    ids=["too many on a host", "too few on a host", "cyclic distribution"],
)
def test_another_number_or_order_of_ranks_on_a_host_is_refused(rank, local_rank, expected):
    device = DeviceConfig(name="cpu", ranks_per_host=expected)
    identity = Identity(rank, 32, local_rank, "slurm", host="n1")
    said = f"ranks_per_host: rank {rank} is local rank {local_rank} on n1, need {expected}"
    with pytest.raises(UserError, match=said):
        check_rank(device, identity, False)
    for number in range(2 * expected):
        check_rank(device, replace(identity, rank=number, local_rank=number % expected), False)
    check_rank(device, replace(identity, source="local"), False)


def test_a_parent_that_forks_ranks_does_not_touch_their_devices(config_file, monkeypatch):
    """They could not use them any more. The same in a step of Slurm's, where --nproc forks them."""
    for name in ("PROCID", "STEP_ID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    parent = os.getpid()

    def is_available():
        assert os.getpid() != parent
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(is_available()))
    assert main(["train", str(config_file), "--nproc", "2", "machine=laptop", *SHORT]) == 0


# Storage


def test_storage_that_fails_most_hosts_is_not_blamed_on_nodes(
    config_file, hosts, monkeypatch, capfd
):
    """A server is away, and listed nodes would be gone for good. A single host has lost its
    mount."""
    hosts("aabbcc")
    whole = Path.open

    def away(path, *mode, **options):
        if path.name.startswith(".preflight-") and is_on_rank(*away.ranks):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return whole(path, *mode, **options)

    monkeypatch.setattr(Path, "open", away)
    away.ranks = (2, 4)
    assert train(config_file, 6, "train.global_batch=12") == LOST
    error = capfd.readouterr().err
    assert error.startswith("megafrontier: preflight: 2 of 3 hosts fail: b: run.directory: ")
    assert "Stale file handle" in error
    assert bad_nodes(config_file) == []
    away.ranks = (2,)
    assert train(config_file, 6, "train.global_batch=12") == BAD_NODE
    assert bad_nodes(config_file) == ["b"]


def test_a_host_that_sees_another_run_directory_is_named(
    config_file, hosts, monkeypatch, tmp_path, capfd
):
    """A checkpoint would be spread over disks, none of which has all of it."""
    hosts("aabbcc")
    check = preflight.check_storage

    def check_storage(directory, *rest):
        return check(tmp_path if is_on_rank(2) else directory, *rest)

    monkeypatch.setattr(preflight, "check_storage", check_storage)
    monkeypatch.setattr(preflight, "SEEN_SECONDS", 0.2)
    assert train(config_file, 6, "train.global_batch=12") == BAD_NODE
    assert "preflight: b: run.directory: " in capfd.readouterr().err
    assert bad_nodes(config_file) == ["b"]
    assert not list((config_file.parent / "run").glob(".preflight*"))


@pytest.fixture
def free(monkeypatch):
    """Set the free bytes of the storage: `by(path)`."""

    def set_free(by):
        found = lambda path: SimpleNamespace(free=by(path))  # noqa: E731
        monkeypatch.setattr(preflight.shutil, "disk_usage", found)

    return set_free


def test_storage_without_room_is_refused_with_what_is_needed(config_file, free, capfd):
    config = runs.load(config_file)
    size = checkpoint_bytes(config, resolve_plan(config, 4))
    free(lambda _: 2.5 * size)
    often = ("train.steps=8", "checkpoint.every=3")
    assert train(config_file, 4, *often) == BAD_INPUT
    error = capfd.readouterr().err
    said = f"{2.5 * size / GIB:.3g} GiB free, need {3 * size / GIB:.3g} for 3 checkpoints"
    assert f"run.directory: {config.run.directory}: {said}" in error
    assert train(config_file, 4, *often, "checkpoint.keep=1") == 0
    assert train(config_file, 4, *often, "checkpoint.keep=0") == 0
    assert train(config_file, 4, "run.name=at-the-end") == 0


def test_room_is_checked_behind_a_link_to_other_storage(config_file, tmp_path, free, capfd):
    root = Path(runs.load(config_file).run.directory) / "checkpoints"
    (tmp_path / "elsewhere").mkdir()
    root.parent.mkdir(parents=True)
    root.symlink_to(tmp_path / "elsewhere")
    free(lambda path: (0 if path == root else 1000) * GIB)
    assert train(config_file, 4) == BAD_INPUT
    assert f"run.directory: {root}: 0 GiB free" in capfd.readouterr().err


def test_what_a_killed_save_left_is_deleted_to_make_room(config_file, free):
    config = runs.load(config_file)
    size = checkpoint_bytes(config, resolve_plan(config, 4))
    torn = Path(config.run.directory) / "checkpoints" / ".step-00000003.partial"
    torn.mkdir(parents=True)
    free(lambda _: (0.5 if torn.exists() else 1.5) * size)
    assert train(config_file, 4) == 0


def test_a_checkpoint_is_as_large_as_estimated(config_file):
    config = runs.load(config_file, "machine=laptop")
    plan = resolve_plan(config, 1)
    trainer = build_trainer(config, plan, Mesh.single(plan.levels, torch.device("cpu")))
    folder = start_saving(trainer).finish()
    trainer.close()
    found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert found == pytest.approx(checkpoint_bytes(config, plan), rel=0.25)
