"""A resumed run goes on as the unbroken one: to the bit on the same layout, else closely."""

import re
from functools import partial
from itertools import product

import pytest
import torch

from megafrontier.checkpoint.manifest import FILE_NAME
from megafrontier.checkpoint.read import Checkpoint, open_checkpoint, read_manifest
from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.data.loader import Loader
from megafrontier.errors import StorageFailed
from megafrontier.partition import STRATEGIES
from megafrontier.training.arrangement import arrange
from megafrontier.training.loop import train_step
from megafrontier.training.resuming import resume
from megafrontier.training.saving import checkpoint_root, save_trainer, shards
from megafrontier.training.trainer import build_trainer
from tests.ranks import run_ranks
from tests.training import runs


@pytest.fixture
def config_file(tmp_path):
    return runs.make_config_file(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "wires"),
    [(name, "exact") for name in ("topo", "hpz", "mics", "zero1")] + [("hpz", "zero++")],
)
def test_resume_on_the_same_layout_is_identical_to_the_last_bit(
    config_file, tmp_path, strategy, wires
):
    """With wires, too, that round the weights of every step and keep nothing of it."""
    chosen = (
        f"partition.strategy={strategy}", f"partition.wires={wires}", "model.dropout=0.1",
        "train.steps=6",
    )  # fmt: skip
    unbroken = runs.run(config_file, 8, *chosen, f"run.directory={tmp_path}/unbroken")
    runs.run(config_file, 8, *chosen, "train.stop_at=3")
    resumed = runs.run(config_file, 8, *chosen)
    assert runs.losses(resumed) == runs.losses(unbroken)
    assert runs.valid_losses(resumed)[-1] == runs.valid_losses(unbroken)[-1]
    assert [line["step"] for line in resumed if "loss" in line] == list(range(1, 7))
    assert [line["grad_norm"] for line in resumed if "loss" in line] == [
        line["grad_norm"] for line in unbroken if "loss" in line
    ]


def test_resume_with_low_bit_wires_and_their_error_feedback_is_identical_too(config_file, tmp_path):
    """Published weights and unsaid errors are state; saving folds the errors in either run."""
    chosen = ("partition.wires=low", "checkpoint.every=3")
    unbroken = runs.run(config_file, 8, *chosen, f"run.directory={tmp_path}/unbroken")
    runs.run(config_file, 8, *chosen, "train.stop_at=3")
    resumed = runs.run(config_file, 8, *chosen)
    assert runs.losses(resumed) == runs.losses(unbroken)
    manifest = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000008").manifest
    assert set(manifest.states) == {"weight", "exp_avg", "exp_avg_sq", "published", "error"}
    elsewhere = runs.run(
        config_file, 4, "partition.strategy=zero3", "train.steps=9",
        f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000008",
        f"run.directory={tmp_path}/elsewhere",
    )  # fmt: skip
    assert runs.losses(elsewhere)[-1] < runs.losses(unbroken)[0]


def test_what_gradients_left_unsaid_is_scaled_with_the_loss(config_file, tmp_path):
    """It is in units of the loss scale, which fp16 has and the precision after it has not."""

    def build(hierarchy, *chosen):
        chosen = ("partition.wires=low", "train.global_batch=8", "optimizer.lr=0", *chosen)
        config = runs.load(config_file, *chosen)
        return build_trainer(config, arrange(config, hierarchy.size), hierarchy)

    def body(hierarchy):
        first = build(hierarchy, "train.precision=fp16", "train.loss_scale=256")
        train_step(first)
        save_trainer(first)
        path = tmp_path / "run" / "checkpoints" / "step-00000001"
        second = build(hierarchy, "train.precision=bf16", f"checkpoint.resume={path}")
        resume(second, Quiet())
        said = [u.error for u in first.engine.units], [u.error for u in second.engine.units]
        first.close()
        second.close()
        return [(a.abs().sum().item(), b.abs().sum().item()) for a, b in zip(*said, strict=True)]

    found = run_ranks((2, 2, 2), body)
    assert all(scaled == saved / 256 for rank in found for saved, scaled in rank)
    assert any(saved for rank in found for saved, _ in rank)


def test_a_run_handed_over_strategies_and_rank_counts_keeps_the_losses(config_file, tmp_path):
    one_level = "machine=laptop"
    short = ("train.steps=10", "train.global_batch=8", "evaluate.batches=0")
    alone = runs.run(config_file, 1, one_level, *short, f"run.directory={tmp_path}/alone")
    relay = [
        (8, "topo"), (4, "zero3"), (1, "ddp"), (8, "hpz"), (4, "mics"),
        (1, "zero1"), (8, "zero2"), (4, "hpz"), (1, "topo"), (8, "ddp"),
    ]  # fmt: skip
    for step, (ranks, strategy) in enumerate(relay, start=1):
        machine = [one_level] if ranks == 1 else []
        handed = runs.run(
            config_file, ranks, *machine, *short, f"train.stop_at={step}",
            f"partition.strategy={strategy}",
        )  # fmt: skip
    assert runs.losses(handed) == pytest.approx(runs.losses(alone), rel=1e-5)
    assert len(runs.losses(handed)) == 10


class Quiet:
    def remark(self, line):
        assert "refused" not in line


def test_every_strategy_loads_every_other_strategys_checkpoint(config_file, tmp_path):
    """State by state and bit by bit, after two steps so that the moments hold something. Each has a
    seed of its own: what an earlier load left behind would be seen."""

    def build(hierarchy, strategy, seed):
        config = runs.load(
            config_file, f"partition.strategy={strategy}", f"run.directory={tmp_path}/{strategy}",
            f"run.seed={seed}", "train.global_batch=8",
        )  # fmt: skip
        return build_trainer(config, arrange(config, hierarchy.size), hierarchy)

    def body(hierarchy):
        trainers = [build(hierarchy, name, seed) for seed, name in enumerate(STRATEGIES)]
        for trainer in trainers:
            for _ in range(2):
                train_step(trainer)
            save_trainer(trainer)
        worst = 0
        for trainer, source in product(trainers, STRATEGIES):
            path = tmp_path / source / "checkpoints" / "step-00000002"
            trainer.step = 0
            trainer.config.checkpoint.resume = str(path)
            trainer.config.run.directory = f"{tmp_path}/none of its own"
            resume(trainer, Quiet())
            assert trainer.step == 2
            worst += differences(trainer, open_checkpoint(path))
        for trainer in trainers:
            trainer.close()
        return worst

    assert run_ranks((2, 2, 2), body) == [0] * 8


def differences(trainer, checkpoint):
    """Elements of this rank's shards that are not those of the global tensors."""
    different = 0
    for state, tensors in shards(trainer).items():
        for unit, shard in zip(trainer.engine.units, tensors, strict=True):
            start, stop = unit.range
            for entry, first, last, at in unit.layout.within(start, stop):
                expected = checkpoint.tensor(state, entry.name).flatten()[first:last]
                different += int((shard[at : at + last - first] != expected).sum())
    return different


@pytest.mark.parametrize("strategy", ["mics", "ddp"])
def test_replicas_have_their_state_from_the_first_one_and_not_from_the_files(
    config_file, tmp_path, strategy, monkeypatch
):
    """Of hundreds of replicas each would read all of the same few files."""
    chosen = (f"partition.strategy={strategy}", "train.steps=3", "train.global_batch=8")
    runs.run(config_file, 8, *chosen)
    path = tmp_path / "run" / "checkpoints" / "step-00000003"

    def body(hierarchy):
        read = []
        fill = Checkpoint.fill
        monkeypatch.setattr(Checkpoint, "fill", lambda *a: read.append(a) or fill(*a))
        config = runs.load(
            config_file, *chosen, "run.seed=1", f"checkpoint.resume={path}",
            f"run.directory={tmp_path}/other", "train.steps=4",
        )  # fmt: skip
        trainer = build_trainer(config, arrange(config, 8), hierarchy)
        resume(trainer, Quiet())
        different = differences(trainer, open_checkpoint(path))
        trainer.close()
        return different, len(read)

    found = run_ranks((2, 2, 2), body)
    assert [different for different, _ in found] == [0] * 8
    readers = 4 if strategy == "mics" else 1
    assert [reads for _, reads in found] == [1] * readers + [0] * (8 - readers)


def test_masters_are_not_overwritten_by_published_weights_where_both_are_one(config_file, tmp_path):
    """On one rank, in fp32, a model computes with the masters; delta wires left copies behind."""
    chosen = ("machine=laptop", "partition.strategy=zero1", "partition.wires=low", "train.steps=4")
    runs.run(config_file, 2, *chosen)
    path = tmp_path / "run" / "checkpoints" / "step-00000004"
    checkpoint = open_checkpoint(path)
    assert any(
        not torch.equal(checkpoint.tensor("weight", name), checkpoint.tensor("published", name))
        for name in checkpoint.shapes
    )

    def body(hierarchy):
        config = runs.load(
            config_file, *chosen, "train.steps=5", f"checkpoint.resume={path}",
            f"run.directory={tmp_path}/alone",
        )  # fmt: skip
        trainer = build_trainer(config, arrange(config, 1), hierarchy)
        resume(trainer, Quiet())
        different = differences(trainer, checkpoint)
        trainer.close()
        return different

    assert run_ranks((1,), body) == [0]


def test_nothing_is_left_of_a_checkpoint_that_proved_damaged_half_way(config_file, tmp_path):
    """One before it may lack states that it had."""
    runs.run(config_file, 8, "train.steps=2")
    path = tmp_path / "run" / "checkpoints" / "step-00000002"

    def body(hierarchy):
        config = runs.load(
            config_file, "partition.wires=low", f"checkpoint.resume={path}",
            f"run.directory={tmp_path}/other",
        )  # fmt: skip
        trainer = build_trainer(config, arrange(config, 8), hierarchy)
        errors = [error for unit in trainer.engine.units for error in unit.errors.values()]
        for left in errors:
            left.fill_(1.0)
        resume(trainer, Quiet())
        trainer.close()
        return len(errors) > 0, sum(error.abs().sum().item() for error in errors)

    assert run_ranks((2, 2, 2), body) == [(True, 0.0)] * 8


def test_auto_falls_back_to_the_newest_whole_checkpoint_with_a_warning(config_file, tmp_path):
    unbroken = runs.run(config_file, 2, "machine=laptop", f"run.directory={tmp_path}/unbroken")
    chosen = ("machine=laptop", "checkpoint.every=2", "checkpoint.keep=0")
    runs.run(config_file, 2, *chosen, "train.stop_at=6")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    damaged = next(newest.glob("pieces/*/00000001.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    resumed = runs.run(config_file, 2, *chosen)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "refused" in log
    assert damaged.name in log
    assert "resumed from" in log
    assert "step-00000004 at step 4" in log
    assert runs.losses(resumed) == runs.losses(unbroken)


def test_a_finished_run_that_is_started_again_changes_nothing(config_file):
    finished = runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    assert runs.run(config_file, 1, "machine=laptop", "train.steps=2") == finished


def test_a_run_killed_in_its_last_evaluation_makes_up_for_it(config_file, tmp_path):
    finished = runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    assert finished[-1].keys() == {"step", "valid_loss", "tokens"}
    assert finished[-1]["tokens"] == finished[-2]["tokens"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert runs.run(config_file, 1, "machine=laptop", "train.steps=2") == finished


def test_the_last_step_is_saved_before_it_is_evaluated(config_file, tmp_path):
    """A kill may cut the evaluation short."""
    chosen = ("machine=laptop", "train.steps=2", "checkpoint.every=0", "evaluate.every=2")
    runs.run(config_file, 1, *chosen)
    log = log_of(tmp_path / "run")
    assert log.index("checkpoint ") < log.index("valid loss")


def test_resume_never_refuses_a_directory_that_holds_another_runs_checkpoints(
    config_file, tmp_path, capfd
):
    runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    config = runs.load(config_file, "machine=laptop", "checkpoint.resume=never")
    assert runs.train(config, 1) == 2
    assert "checkpoint.resume: never, but" in capfd.readouterr().err
    assert checkpoint_root_exists(tmp_path)


def test_what_was_set_aside_is_no_runs_checkpoint(config_file, tmp_path):
    runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    old = tmp_path / "run" / "checkpoints" / "step-00000002"
    old.rename(old.with_name("step-00000002.superseded"))
    anew = runs.run(config_file, 1, "machine=laptop", "train.steps=2", "checkpoint.resume=never")
    assert [line["step"] for line in anew if "loss" in line] == [1, 2]


def log_of(directory):
    return (directory / "log.txt").read_text()


ONE = ("machine=laptop", "evaluate.batches=0")


@pytest.fixture
def imported(config_file, tmp_path):
    """A checkpoint of another run, from which this one is to begin."""
    runs.run(config_file, 1, *ONE, "train.stop_at=2", f"run.directory={tmp_path}/other")
    return f"checkpoint.resume={tmp_path}/other/checkpoints/step-00000002"


@pytest.mark.parametrize("folder", ["other", "other/checkpoints"])
def test_a_folder_of_checkpoints_stands_for_its_newest(config_file, tmp_path, imported, folder):
    expected = runs.run(config_file, 4, imported, f"run.directory={tmp_path}/expected")
    found = runs.run(config_file, 4, f"checkpoint.resume={tmp_path}/{folder}")
    assert runs.losses(found) == runs.losses(expected)
    assert found[0]["step"] == 3


def test_a_run_begins_at_a_named_checkpoint_and_goes_on_from_its_own(
    config_file, tmp_path, imported
):
    """The same command again, as a job in the queue gives it."""
    unbroken = runs.run(config_file, 1, *ONE, f"run.directory={tmp_path}/unbroken")
    for stop in (4, 6, 8):
        lines = runs.run(config_file, 1, *ONE, imported, f"train.stop_at={stop}")
    assert runs.losses(lines) == runs.losses(unbroken)[2:]
    log = log_of(tmp_path / "run")
    assert log.count("00000002: not used, the run has checkpoints of its own") == 2
    for step, folder in ((2, "other"), (4, "run"), (6, "run")):
        line = f"resumed from {tmp_path}/{folder}/checkpoints/step-{step:08d} at step {step}"
        assert line in log
    assert not list(tmp_path.glob("run/checkpoints/*.superseded"))


def test_a_requeued_job_goes_back_to_a_checkpoint_of_its_own_once(
    config_file, tmp_path, monkeypatch
):
    runs.run(config_file, 1, *ONE, "checkpoint.every=2", "checkpoint.keep=0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # an earlier start met a bad node, and no more
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000004"
    assert (
        runs.train(runs.load(config_file, *ONE, back, "checkpoint.keep=0", "train.stop_at=5"), 1)
        == 0
    )
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [
        "step-00000002", "step-00000004", "step-00000005", "step-00000006.superseded",
        "step-00000008.superseded",
    ]  # fmt: skip
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert (
        runs.train(runs.load(config_file, *ONE, back, "checkpoint.keep=0", "train.stop_at=6"), 1)
        == 0
    )
    assert "step-00000005 at step 5" in log_of(tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    for times in (2, 3):  # asked for twice in one allocation
        assert runs.train(runs.load(config_file, *ONE, back, "train.stop_at=5"), 1) == 0
        assert log_of(tmp_path / "run").count("step-00000004 at step 4") == times


def test_a_requeued_job_whose_notes_cannot_be_read_does_not_go_back_again(
    config_file, tmp_path, monkeypatch
):
    """It would give up for good what it has trained since."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    runs.run(config_file, 1, *ONE, "checkpoint.every=2", "checkpoint.keep=0")
    notes = tmp_path / "run" / "attempts.jsonl"
    notes.unlink()
    notes.mkdir()
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000004"
    with pytest.raises(StorageFailed, match=f"{notes}: Is a directory, need what earlier starts"):
        runs.train(runs.load(config_file, *ONE, back), 1)
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()


def test_a_run_that_goes_back_to_what_was_set_aside_goes_on_from_there(config_file, tmp_path):
    """And not, when it is started once more, with the line of training that it has left."""
    runs.run(config_file, 1, *ONE, "checkpoint.every=2", "checkpoint.keep=0", "train.stop_at=4")
    root = tmp_path / "run" / "checkpoints"
    first = (root / "step-00000004" / "checkpoint.json").read_text()
    back = f"checkpoint.resume={root}/step-00000002"
    runs.run(config_file, 1, *ONE, back, "run.seed=1", "train.stop_at=4")
    assert sorted(path.name for path in root.iterdir())[1:] == [
        "step-00000004", "step-00000004.superseded",
    ]  # fmt: skip
    again = f"checkpoint.resume={root}/step-00000004.superseded"
    runs.run(config_file, 1, *ONE, again, "train.stop_at=5")
    assert (root / "step-00000004" / "checkpoint.json").read_text() == first
    runs.run(config_file, 1, *ONE, "train.stop_at=6")
    assert "step-00000005 at step 5" in log_of(tmp_path / "run")


def test_a_requeued_job_that_was_to_begin_new_goes_on(config_file, tmp_path, monkeypatch):
    new = "checkpoint.resume=never"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    runs.run(config_file, 1, *ONE, new, "train.stop_at=3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    runs.run(config_file, 1, *ONE, new, "train.stop_at=4")
    assert "step-00000003 at step 3" in log_of(tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert runs.train(runs.load(config_file, *ONE, new), 1) == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("model.heads=4", "model.heads: 4, but "),
        ("model.vocab_size=258", "model.vocab_size: 258, but "),
        ("model.norm_eps=1e-3", "model.norm_eps: 0.001, but "),
        ("model.parallel_residual=true", "model.parallel_residual: True, but "),
        ("model.rotary_fraction=0.5", "model.rotary_fraction: 0.5, but "),
    ],
)
def test_weights_that_fit_a_model_of_another_function_are_refused(
    config_file, imported, capfd, changed, said
):
    assert runs.train(runs.load(config_file, *ONE, imported, changed), 1) == 2
    error = capfd.readouterr().err
    assert said in error
    assert "was trained with " in error
    assert error.count("\n") == 1


def test_a_run_cannot_begin_where_it_is_to_end(config_file, tmp_path, imported, capfd):
    assert runs.train(runs.load(config_file, *ONE, imported, "train.steps=2"), 1) == 2
    assert "train.steps: 2, need more than 2, the step of " in capfd.readouterr().err
    runs.run(config_file, 1, *ONE, imported)
    runs.run(config_file, 1, *ONE, imported)
    assert log_of(tmp_path / "run").count("train.steps: 8: reached, nothing left to do") == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("run.seed=8", "run.seed: 8, was 7"),
        ("data.split=[0.8, 0.2]", "data.split: [0.8, 0.2], was [0.9, 0.1]"),
        ("data.document_mask=true", "data.document_mask: True, was False"),
        ("model.sequence_length=8", "model.sequence_length: 8, was 16"),
    ],
)
def test_other_data_under_the_same_numbers_are_told(config_file, tmp_path, imported, changed, said):
    runs.run(config_file, 1, *ONE, imported, changed, "train.stop_at=3")
    warning = f"warning: {said}; samples are others from here on"
    assert log_of(tmp_path / "run").count("warning: ") == 1
    assert warning in log_of(tmp_path / "run")


def test_a_corpus_of_another_size_is_told(config_file, tmp_path, imported):
    """All of it is for training once validation has a corpus of its own; or it was made anew."""
    valid = f"data.valid=[{{path: {tmp_path}/corpus}}]"
    runs.run(config_file, 1, *ONE, imported, valid, "train.stop_at=3")
    warning = r"warning: data.train: (\d+) windows, was (\d+); samples are others from here on"
    found = re.search(warning, log_of(tmp_path / "run"))
    assert found is not None
    assert int(found[1]) * 0.9 == pytest.approx(int(found[2]), abs=1)


def test_another_rotary_base_may_be_meant_and_is_told(config_file, tmp_path, imported):
    runs.run(config_file, 1, *ONE, imported, "model.rotary_base=500000")
    warning = "warning: model.rotary_base: 500000.0, was 10000.0"
    assert warning in log_of(tmp_path / "run")


@pytest.mark.parametrize("keeps_position", [True, False])
def test_another_global_batch_neither_repeats_nor_skips_a_sample(
    config_file, tmp_path, monkeypatch, keeps_position
):
    """Also after a checkpoint from before they held the position."""
    whole = Loader.step

    def step(loader, number):
        batches = whole(loader, number)
        with (tmp_path / "read").open("a") as file:
            file.writelines(
                f"{b.first_sample + i}\n" for b in batches for i in range(len(b.tokens))
            )
        return batches

    monkeypatch.setattr(Loader, "step", step)
    batches = ((3, 16), (5, 8), (6, 32)) if keeps_position else ((3, 16), (6, 32))
    for stop, batch in batches:
        runs.run(config_file, 1, *ONE, f"train.stop_at={stop}", f"train.global_batch={batch}")
        if not keeps_position and stop == 3:
            forget_position(tmp_path / "run" / "checkpoints" / "step-00000003")
    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert read == list(range(3 * 16 + (2 * 8 + 32 if keeps_position else 3 * 32)))
    before, sample = (8, 64) if keeps_position else (16, 48)
    said = f"train.global_batch: 32, was {before}; the data go on at sample {sample}"
    assert said in log_of(tmp_path / "run")


def forget_position(path):
    manifest = read_manifest(path)
    del manifest.extra["data"]
    (path / FILE_NAME).write_bytes(manifest.encode())


def checkpoint_root_exists(tmp_path):
    return (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_one_rank_writes_and_reads_without_a_process_group(config_file):
    config = runs.load(config_file, "machine=laptop")
    arrangement = arrange(config, 1)
    hierarchy = Hierarchy(arrangement.levels, 0, (None,), torch.device("cpu"))
    trainer = build_trainer(config, arrangement, hierarchy)
    train_step(trainer)
    path = save_trainer(trainer)
    trainer.close()
    assert path.parent == checkpoint_root(trainer.config)
    again = build_trainer(config, arrangement, hierarchy)
    partial(resume, again)(Quiet())
    assert differences(again, open_checkpoint(path)) == 0
    again.close()
