"""Whole runs on GPUs, with NCCL or RCCL, by the command itself.

If there are fewer GPUs than ranks, ranks share them.
"""

import pytest

from megafrontier.common.errors import FAILED, LOST
from tests import processes, runs
from tests.launch.health.test_watchdog import fault, launched
from tests.launch.test_launchers import start, torchrun, wait_for
from tests.processes import COMMAND
from tests.ranks import share_devices

pytestmark = pytest.mark.usefixtures("unused_gpus")

# Large enough that a kernel takes longer than its launch, so that a use before its end shows.
LARGER = (
    "model.layers=4", "model.hidden=1024", "model.heads=8", "model.ffn_hidden=2048",
    "model.sequence_length=64", "train.precision=bf16", "optimizer.lr=1.0e-3",
)  # fmt: skip


def on_gpus(ranks):
    """The environment of a rank, as torchrun sets it."""
    return lambda rank: torchrun(rank, ranks) | share_devices(rank, ranks)


def machine(ranks):
    """An override: pairs at the lowest level."""
    levels = "pair: {size: 2}, world: {}" if ranks > 1 else "world: {}"
    return f"machine={{levels: {{{levels}}}}}"


def train(folder, name, ranks, *overrides):
    """The metrics of a run that succeeds."""
    chosen = machine(ranks), *LARGER, *overrides
    started = start(COMMAND, folder, name, on_gpus(ranks), *chosen, ranks=ranks)
    ended = wait_for(started)
    assert [process.returncode for process in started] == [0] * ranks, ended
    return runs.metrics(folder / name)


def lose(folder, name, rank, act, *overrides):
    """Let one of four ranks `act` in step 3. Returns the exit codes of the others that end in time,
    and stderr of the first of them."""
    chosen = machine(4), *LARGER, *overrides
    faults = [fault("step", rank, act, step=3)]
    ended = launched(folder, name, faults, *chosen, identity=on_gpus(4), count=4)
    others = [ended[number] for number in sorted(ended) if number != rank]
    return [code for code, _ in others], others[0][1] if others else ""


def test_a_local_rank_computes_on_a_gpu_as_a_launchers_does(folder):
    arguments = [
        "train", str(folder / "config.yaml"), "--nproc", "1", "machine=laptop",
        f"run.directory={folder}/local", *LARGER, "train.deterministic=true",
    ]  # fmt: skip
    ended = processes.run(COMMAND, arguments)
    assert ended.returncode == 0, ended.stderr
    assert "; on CPU" not in runs.log(folder / "local")
    others = train(folder, "launched", 1, "train.deterministic=true")
    assert runs.losses(runs.metrics(folder / "local")) == runs.losses(others)


def test_the_last_step_takes_as_long_as_the_others(folder):
    """By the host's clock it would end as soon as it is handed over."""
    lines = train(folder, "timed", 1, "train.steps=20")
    *others, last = [line["step_seconds"] for line in lines if "loss" in line][5:]
    assert last > 0.3 * min(others)


@pytest.mark.parametrize("wires", ["low", "exact"])
def test_all_policies_give_the_same_losses_to_the_bit(folder, wires):
    chosen = (f"partition.wires={wires}", "train.deterministic=true")
    none, safe, full = (
        runs.losses(train(folder, f"{wires}-{o}", 4, *chosen, f"partition.overlap={o}"))
        for o in ("none", "safe", "full")
    )
    assert len(none) == 8
    assert none[-1] < 0.9 * none[0], "it learns"
    assert none == safe
    assert none == full
    log = runs.log(folder / f"{wires}-full")
    assert "encoded by plain torch" not in log


@pytest.mark.parametrize("ranks", [1, 4])
def test_states_in_host_memory_change_losses_by_rounding_alone(folder, ranks):
    usual, offloaded = (
        runs.losses(
            train(folder, f"{ranks}-{where}", ranks, f"partition.offload.optimizer={where}")
        )
        for where in ("none", "cpu")
    )
    assert len(usual) == 8
    assert offloaded == pytest.approx(usual, rel=2e-3)


def test_a_run_resumes_from_its_checkpoint_to_the_bit(folder):
    # A save folds the errors, so both runs save at the same step.
    chosen = (
        "partition.wires=low", "train.deterministic=true", "partition.overlap=full",
        "checkpoint.every=4",
    )  # fmt: skip
    unbroken = runs.losses(train(folder, "unbroken", 4, *chosen))
    train(folder, "halves", 4, *chosen, "train.stop_at=4")
    assert runs.losses(train(folder, "halves", 4, *chosen)) == unbroken
    train(folder, "fewer", 4, *chosen, "train.stop_at=4")
    assert runs.losses(train(folder, "fewer", 2, *chosen)) == pytest.approx(unbroken, rel=2e-2)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_others_soon_and_is_named(folder, rank):
    codes, error = lose(folder, f"killed-{rank}", rank, "kill")
    assert codes == [LOST] * 3, f"within 2 minutes, though train.hang_seconds is 600: {error}"
    assert f"rank {rank}" in error
    assert "Traceback" not in error


def test_a_frozen_rank_is_named(folder):
    codes, error = lose(folder, "frozen", 2, "freeze", "train.hang_seconds=10")
    assert codes == [LOST] * 3, error
    assert "rank 2" in error
    assert "Traceback" not in error


def test_an_error_of_all_ranks_ends_each_with_its_exit_code(folder):
    """And not with an error of communicators that other ranks have destroyed while the next step
    was in progress."""
    chosen = machine(4), *LARGER, "optimizer.lr=1.0e+30", "train.nonfinite_limit=2"
    started = start(COMMAND, folder, "diverged", on_gpus(4), *chosen, ranks=4)
    ended = wait_for(started)
    assert [process.returncode for process in started] == [FAILED] * 4, ended


def test_updates_under_the_forward_and_cuda_graphs_give_the_same_losses(folder):
    compiled = ("train.compile=true", "data.document_mask=false")
    for mode in ("none", "selective"):
        always = (*compiled, f"train.activation_checkpointing={mode}")
        expected, *others = (
            runs.losses(train(folder, f"{mode}-{number}", 1, *always, *chosen))
            for number, chosen in enumerate(
                [(), ("partition.overlap_update=true",), ("train.cuda_graphs=true",)]
            )
        )
        for losses in others:
            assert losses == pytest.approx(expected, rel=1e-3)


def test_every_checkpointing_gives_the_same_losses_compiled_or_not(folder):
    modes = ("none", "selective", "block", "offload")
    for compiled in ("false", "true"):
        expected, *others = (
            runs.losses(
                train(
                    folder, f"{mode}-{compiled}", 1, f"train.activation_checkpointing={mode}",
                    f"train.compile={compiled}", "data.document_mask=true",
                )
            )
            for mode in modes
        )  # fmt: skip
        for losses in others:
            assert losses == pytest.approx(expected, rel=1e-3)
        log = runs.log(folder / f"offload-{compiled}")
        assert "attention: varlen flash" in log
