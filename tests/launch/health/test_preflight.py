"""Before the first step every node is tried, and one that is not fit is named."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafrontier.cli import main
from megafrontier.common.errors import BAD_INPUT, BAD_NODE, FAILED, LOST, UserError
from megafrontier.config import DeviceConfig
from megafrontier.launch import main as launch
from megafrontier.launch.health import preflight, storage
from megafrontier.launch.health.preflight import check_device, check_present
from megafrontier.training.plan import resolve_plan
from tests import runs

pytestmark = pytest.mark.usefixtures("no_training")
SHORT = ("train.steps=2", "evaluate.batches=0")


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

        identify = launch.identify
        monkeypatch.setattr(launch, "identify", on_its_host)

    return spread


@pytest.fixture
def change(monkeypatch):
    """Change what ranks measure: `by(rank, level, rate)`."""

    def change_by(by):
        measure = preflight.measure

        def measured(hierarchy, level, size_bytes):
            return by(hierarchy.rank, level, measure(hierarchy, level, size_bytes))

        monkeypatch.setattr(preflight, "measure", measured)

    return change_by


def train(config_file, ranks, *overrides):
    return main(["train", str(config_file), "--nproc", str(ranks), *SHORT, *overrides])


def log(config_file) -> str:
    return runs.log(config_file.parent / "run")


def bad_nodes(config_file) -> list[str]:
    path = config_file.parent / "run" / "bad-nodes.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_healthy_ranks_pass_without_a_word(config_file, hosts, capfd):
    hosts("aabb")
    assert train(config_file, 4) == 0
    assert capfd.readouterr().err == ""
    assert "preflight" not in log(config_file)
    assert not list((config_file.parent / "run").glob(".preflight*"))
    assert bad_nodes(config_file) == []


def one_slow_host(rank, level, rate):
    """Host c (ranks 4 and 5) has a bad cable: everything beyond the pair crawls."""
    return 10.0 if level == 0 else 0.5 if rank in (4, 5) else 5.0


def test_a_slow_link_is_a_warning_that_names_host_ranks_and_rates(config_file, hosts, change):
    hosts("aabbccdd")
    change(one_slow_host)
    assert train(config_file, 8) == 0
    assert (
        "warning: preflight: c (ranks 4 to 5): link world 0.5 GB/s, need 1.25 "
        "(all ranks' median 5)\n" in log(config_file)
    )
    assert bad_nodes(config_file) == []


def test_a_slow_link_is_a_failure_where_that_is_asked_for(config_file, hosts, change, capfd):
    hosts("aabbccdd")
    change(one_slow_host)
    assert train(config_file, 8, "preflight.if_slow=fail") == BAD_NODE
    error = capfd.readouterr().err
    assert error.startswith("megafrontier: preflight: c (ranks 4 to 5): link world 0.5 GB/s, need")
    assert error.count("\n") == 1
    assert bad_nodes(config_file) == ["c"]


def test_a_link_that_was_only_disturbed_for_a_moment_is_not_slow(config_file, hosts, change):
    hosts("aabbccdd")
    seen = []

    def first_time_slow(rank, level, rate):
        seen.append(level)
        return one_slow_host(rank, level, rate) if seen.count(level) == 1 else 5.0

    change(first_time_slow)
    assert train(config_file, 8) == 0
    assert "link" not in log(config_file)


def test_a_stated_rate_is_what_links_are_measured_by(config_file, hosts, change):
    hosts("aabb")
    change(lambda rank, level, rate: 20.0 if level == 0 else 3.0)
    rates = "machine={levels: {pair: {size: 2, gigabytes_per_second: 100}, world: {}}}"
    assert train(config_file, 4, rates) == 0
    assert "a (ranks 0 to 1): link pair 20 GB/s, need 25 (stated 100)" in log(config_file)
    assert "b (ranks 2 to 3): link pair 20 GB/s, need 25 (stated 100)" in log(config_file)
    assert "link world" not in log(config_file)


def test_a_machine_of_accelerators_may_be_rehearsed_on_processors(config_file):
    assert train(config_file, 8, "machine=frontier") == 0
    assert "preflight" not in log(config_file)


def test_a_device_with_too_little_memory_fails_its_host_alone(
    config_file, hosts, monkeypatch, capfd
):
    hosts("aabbcc")
    monkeypatch.setattr(preflight, "check_device", lacking_on_rank_3)
    assert train(config_file, 6, "train.global_batch=12") == BAD_NODE
    assert capfd.readouterr().err == (
        "megafrontier: preflight: b (ranks 2 to 3): device 1: 10.0 GiB of memory, need 57.6 "
        "(machine.device.memory_gib)\n"
    )
    assert bad_nodes(config_file) == ["b"]


def lacking_on_rank_3(*_):
    text = "device 1: 10.0 GiB of memory, need 57.6 (machine.device.memory_gib)"
    return text if is_on_rank(3) else None


def test_what_most_hosts_fail_is_no_matter_of_nodes(config_file, hosts, capfd):
    hosts("aabb")
    assert train(config_file, 4, "machine.device.memory_gib=1e6") == FAILED
    error = capfd.readouterr().err
    assert error.startswith("megafrontier: preflight: 2 of 2 hosts fail: a (ranks 0 to 1): host: ")
    assert bad_nodes(config_file) == []


def test_the_hosts_own_memory_is_looked_at_where_it_is_stated(config_file):
    device = resolve_plan(runs.load(config_file, "machine=laptop"), 1).machine.device
    cpu = torch.device("cpu")
    assert check_device(device, cpu) is None
    assert check_device(replace(device, memory_gib=0.1), cpu) is None
    assert "GiB of memory, need 900000.0" in check_device(replace(device, memory_gib=1e6), cpu)
    assert check_device(replace(device, memory_gib=1e6, name="MI250X"), cpu) is None


def test_a_rank_without_the_accelerator_that_the_machine_has_cannot_start(config_file, monkeypatch):
    """It comes to the meeting to say so, as with any input it lacks: where most ranks say the same,
    an environment with a CPU's torch, no node is to blame."""
    device = resolve_plan(runs.load(config_file, "machine=frontier"), 8).machine.device
    identity = launch.Identity(3, 8, 3, "slurm", "tcp://x:1", "frontier00012")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="name: MI250X GCD, but torch finds no accelerator"):
        check_present(device, identity, False)
    assert bad_nodes(config_file) == []
    check_present(device, replace(identity, source="local"), False)
    check_present(replace(device, name="cpu"), identity, False)


def test_an_accelerator_whose_memory_another_process_has_is_found_before_the_ranks_take_any(
    config_file, monkeypatch
):
    """RCCL takes some for each communicator: then it would not be seen who has it."""
    device = resolve_plan(runs.load(config_file, "machine=frontier"), 8).machine.device
    identity = launch.Identity(3, 8, 3, "slurm", "tcp://x:1", "frontier00012")
    free = [62.0, 62.0, 62.0, 31.0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (free[d.index] * gib, 64 * gib))
    check_present(device, replace(identity, local_rank=2), True)
    with pytest.raises(UserError, match=r"device 3: 31\.0 GiB of memory, need 57\.6 .*memory_gib"):
        check_present(device, identity, True)
    check_present(device, identity, False)


@pytest.mark.parametrize("said", ["out of memory", "CUDA-capable device(s) is/are busy"])
def test_an_accelerator_that_does_not_even_answer_is_named(config_file, monkeypatch, said):
    """What asks for its free memory takes some itself: another process may have left none."""

    def answer(_device):
        raise torch.AcceleratorError(f"CUDA error: {said}\nCompile with `TORCH_USE_CUDA_DSA`.\n")

    device = resolve_plan(runs.load(config_file, "machine=frontier"), 8).machine.device
    identity = launch.Identity(3, 8, 3, "slurm", "tcp://x:1", "frontier00012")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer)
    with pytest.raises(UserError) as caught:
        check_present(device, identity, True)
    assert f"device 3: CUDA error: {said}, need 57.6 GiB of memory" in str(caught.value)


def test_ranks_that_would_share_an_accelerator_cannot_start(monkeypatch):
    """RCCL would refuse them later, as if a link were broken, and the job start again."""
    device = DeviceConfig(name="any")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for rank in range(8):
        identity = launch.Identity(rank, 8, rank, "torchrun", "tcp://x:1", "host")
        if rank < 4:
            check_present(device, identity, False)
            continue
        with pytest.raises(UserError, match=f"local rank {rank} on host sees 4 accelerators"):
            check_present(device, identity, False)
        check_present(replace(device, name="cpu"), identity, False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each is shown its own
    check_present(device, identity, False)


def test_who_forks_ranks_does_not_touch_their_devices(config_file, monkeypatch):
    """They could not use them any more; in a step of Slurm's, too, where --nproc forks them."""
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


def test_a_host_that_is_all_there_is_is_not_listed(config_file, capfd):
    folder = Path(runs.load(config_file).run.directory)
    assert train(config_file, 4, "machine.device.memory_gib=100000") == FAILED
    assert "preflight: 1 of 1 hosts fail: " in capfd.readouterr().err
    assert not (folder / "bad-nodes.txt").exists()


def test_a_host_that_cannot_write_to_the_storage_is_named(config_file, hosts, monkeypatch, capfd):
    hosts("aabbcc")
    whole = Path.open

    def open_mounted(path, *mode, **options):
        if path.name == ".preflight-2":
            raise OSError(30, "Read-only file system")
        return whole(path, *mode, **options)

    monkeypatch.setattr(Path, "open", open_mounted)
    assert train(config_file, 6, "train.global_batch=12") == BAD_NODE
    assert "b (ranks 2 to 3): run.directory: " in capfd.readouterr().err
    assert bad_nodes(config_file) == ["b"]


@pytest.mark.parametrize("function", ["open", "stat"])
def test_a_storage_that_fails_most_hosts_is_no_nodes_fault(
    config_file, hosts, monkeypatch, capfd, function
):
    """Whether they write there or look for what another one wrote: a server is away, and nodes that
    are listed would be gone for good. One host alone has lost its mount."""
    hosts("aabbcc")
    whole = getattr(Path, function)

    def away(path, *mode, **options):
        if path.name.startswith(".preflight-") and any(map(is_on_rank, away.ranks)):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return whole(path, *mode, **options)

    monkeypatch.setattr(Path, function, away)
    away.ranks = (2, 4)
    assert train(config_file, 6, "train.global_batch=12") == LOST
    said = capfd.readouterr().err
    assert said.startswith("megafrontier: preflight: 2 of 3 hosts fail: b (ranks 2 to 3): run.dir")
    assert "Stale file handle" in said
    assert bad_nodes(config_file) == []
    away.ranks = (2,)
    assert train(config_file, 6, "train.global_batch=12") == BAD_NODE
    assert bad_nodes(config_file) == ["b"]


def test_many_hosts_that_are_not_most_are_listed_all_and_named_in_part(
    config_file, hosts, monkeypatch, capfd
):
    hosts("abcdefgh")
    monkeypatch.setattr(preflight, "NAMED", 2)
    monkeypatch.setattr(preflight, "check_device", lacking_on_ranks_1_to_3)
    assert train(config_file, 8) == BAD_NODE
    said = capfd.readouterr().err
    assert "c (rank 2): lacks" in said
    assert said.endswith("; and 1 more hosts\n")
    assert bad_nodes(config_file) == ["b", "c", "d"]


def lacking_on_ranks_1_to_3(*_):
    return "lacks" if any(is_on_rank(rank) for rank in (1, 2, 3)) else None


def is_on_rank(rank):
    return os.environ.get("MEGAFRONTIER_LOCAL", "").startswith(f"{rank}/")


def test_unfit_hosts_that_cannot_be_listed_are_the_storages_matter(
    config_file, hosts, monkeypatch, capfd
):
    """Another start would meet them again."""
    hosts("aabbcc")
    (config_file.parent / "run" / "bad-nodes.txt").mkdir(parents=True)
    monkeypatch.setattr(preflight, "check_device", lacking_on_rank_3)
    assert train(config_file, 6, "train.global_batch=12") == LOST
    said = capfd.readouterr().err
    assert said.startswith("megafrontier: preflight: b (ranks 2 to 3): device 1: ")
    assert said.endswith("bad-nodes.txt: Is a directory\n")


def test_a_clock_that_differs_is_a_warning(config_file, hosts, monkeypatch):
    hosts("aabbccdd")
    now = time.time

    def ahead():
        return now() + 100 * (os.environ.get("MEGAFRONTIER_LOCAL", "")[:1] in ("2", "3"))

    monkeypatch.setattr(preflight.time, "time", ahead)
    assert train(config_file, 8) == 0
    assert "warning: preflight: b (ranks 2 to 3): clock off by +" in log(config_file)
    assert log(config_file).count("clock") == 1


def test_it_can_be_switched_off(config_file, hosts, change):
    hosts("aabbccdd")
    change(one_slow_host)
    assert train(config_file, 8, "preflight.enabled=false") == 0
    assert "preflight" not in log(config_file)


def test_a_host_that_sees_another_run_directory_is_named(
    config_file, hosts, monkeypatch, tmp_path, capfd
):
    """A checkpoint would be written in pieces to disks of which none has them all."""
    hosts("aabbcc")
    check = preflight.check_shared

    def check_shared(directory, *rest):
        is_elsewhere = is_on_rank(2)  # the first of host b
        return check(tmp_path if is_elsewhere else directory, *rest)

    monkeypatch.setattr(preflight, "check_shared", check_shared)
    monkeypatch.setattr(storage, "SEEN_SECONDS", 0.2)
    assert train(config_file, 6, "train.global_batch=12") == BAD_NODE
    assert "preflight: b (ranks 2 to 3): run.directory: " in capfd.readouterr().err
    assert bad_nodes(config_file) == ["b"]
    assert not list((config_file.parent / "run").glob(".preflight*"))


def test_state_beyond_the_devices_memory_is_refused_with_what_it_needs(config_file, capfd):
    one_level = "machine={levels: {world: {}}, device: {name: Tiny, memory_gib: 0.0001}}"
    assert train(config_file, 2, one_level) == BAD_INPUT
    error = capfd.readouterr().err
    assert "machine.device.memory_gib: 0.0001, need at least 0.000372 on 2 ranks: state " in error
    assert error.count("\n") == 1
