"""Which checkpoint a run goes on from, and what it does with the others."""

import json

import pytest
import torch

from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.common.errors import StorageFailed, UserError
from megafrontier.training.resume import resume as resuming
from tests import runs


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
    log = runs.log(tmp_path / "run")
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


def test_an_evaluation_that_a_kill_or_a_stop_cut_short_is_made_up_for(config_file, tmp_path):
    """Half-way too; and no step of another run's."""
    chosen = ("machine=laptop", "checkpoint.every=2", "evaluate.every=2")
    unbroken = runs.run(config_file, 1, *chosen, "train.stop_at=4")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    lines = runs.run(config_file, 1, *chosen, "train.stop_at=6")
    assert lines[: len(unbroken)] == unbroken
    steps = [line["step"] for line in lines if "valid_loss" in line]
    assert steps == [2, 4, 6]
    start = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000006"
    other = runs.run(config_file, 1, *chosen, start, f"run.directory={tmp_path}/other")
    assert [line["step"] for line in other if "valid_loss" in line] == [8]


def test_the_last_step_is_saved_before_it_is_evaluated(config_file, tmp_path):
    """A kill may cut the evaluation short."""
    chosen = ("machine=laptop", "train.steps=2", "checkpoint.every=0", "evaluate.every=2")
    runs.run(config_file, 1, *chosen)
    log = runs.log(tmp_path / "run")
    assert log.index("checkpoint ") < log.index("valid loss")


def test_resume_never_refuses_a_directory_that_holds_another_runs_checkpoints(
    config_file, tmp_path, capfd
):
    runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    config = runs.load(config_file, "machine=laptop", "checkpoint.resume=never")
    assert runs.train(config, 1) == 2
    assert "checkpoint.resume: never, but" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"checkpoint\.resume: never, but"):
        resuming.check_own(config)
    assert checkpoint_root_exists(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("model.layers=3", r"step-00000002: blocks\.2\..*: missing in the checkpoint"),
        ("model.heads=1", r"model\.heads: 1, but .*step-00000002 was trained with "),
        ("train.steps=9", None),
    ],
)
def test_a_checkpoint_of_another_model_is_noticed_before_a_job_waits(config_file, change, problem):
    runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    config = runs.load(config_file, "machine=laptop", change)
    if problem is None:
        resuming.check_own(config)
    else:
        with pytest.raises(UserError, match=problem):
            resuming.check_own(config)


def test_what_was_set_aside_is_no_runs_checkpoint(config_file, tmp_path):
    runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    old = tmp_path / "run" / "checkpoints" / "step-00000002"
    old.rename(old.with_name("step-00000002.superseded"))
    anew = runs.run(config_file, 1, "machine=laptop", "train.steps=2", "checkpoint.resume=never")
    assert [line["step"] for line in anew if "loss" in line] == [1, 2]


@pytest.mark.parametrize("folder", ["other", "other/checkpoints"])
def test_a_folder_of_checkpoints_stands_for_its_newest(config_file, tmp_path, imported, folder):
    expected = runs.run(config_file, 1, *runs.ONE, imported, f"run.directory={tmp_path}/expected")
    found = runs.run(config_file, 1, *runs.ONE, f"checkpoint.resume={tmp_path}/{folder}")
    assert runs.losses(found) == runs.losses(expected)
    assert found[0]["step"] == 3


def test_a_run_begins_at_a_named_checkpoint_and_goes_on_from_its_own(
    config_file, tmp_path, imported
):
    """The same command again, as a job in the queue gives it."""
    unbroken = runs.run(config_file, 1, *runs.ONE, f"run.directory={tmp_path}/unbroken")
    for stop in (4, 6, 8):
        lines = runs.run(config_file, 1, *runs.ONE, imported, f"train.stop_at={stop}")
    assert runs.losses(lines) == runs.losses(unbroken)[2:]
    log = runs.log(tmp_path / "run")
    assert log.count("00000002: not used, the run has checkpoints of its own") == 2
    for step, folder in ((2, "other"), (4, "run"), (6, "run")):
        line = f"resumed from {tmp_path}/{folder}/checkpoints/step-{step:08d} at step {step}"
        assert line in log
    assert not list(tmp_path.glob("run/checkpoints/*.superseded"))


def test_a_run_may_begin_at_step_0_with_the_weights_of_another(config_file, tmp_path, imported):
    """To fine-tune: optimizer, schedule and data are new; and the job in the queue goes on."""
    other = open_checkpoint(tmp_path / "other" / "checkpoints" / "step-00000002")
    new = (*runs.ONE, imported, "checkpoint.weights_only=true")
    still = ("optimizer.lr=0", f"run.directory={tmp_path}/still", "train.steps=1", "run.seed=9")
    (line,) = runs.run(config_file, 1, *new, *still, "schedule.warmup_steps=0")
    assert line["step"] == 1
    begun = open_checkpoint(tmp_path / "still" / "checkpoints" / "step-00000001")
    for name in other.shapes:
        assert torch.equal(begun.tensor("weight", name), other.tensor("weight", name))
        assert not torch.equal(begun.tensor("exp_avg", name), other.tensor("exp_avg", name))
    assert begun.manifest.extra["optimizer_steps"] == 1
    assert begun.manifest.extra["data"] == [1, 16]
    assert "weights of " in runs.log(tmp_path / "still")
    assert "warning" not in runs.log(tmp_path / "still"), "of another order of the data"
    for stop in (2, 4):
        lines = runs.run(config_file, 4, *new[len(runs.ONE) :], f"train.stop_at={stop}")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize("resume", ["auto", "never", "{run}/checkpoints/step-00000002"])
def test_the_weights_alone_are_another_runs(config_file, tmp_path, resume):
    wanted = f"checkpoint.resume={resume.format(run=tmp_path / 'run')}"
    config = runs.load(config_file, *runs.ONE, wanted, "checkpoint.weights_only=true")
    with pytest.raises(UserError, match="weights_only is true; need the path of another run's"):
        runs.train(config, 1)
    assert not (tmp_path / "run").exists(), "nothing is left of a run that is refused"


def test_a_run_whose_checkpoints_are_away_says_so_and_loses_no_history(config_file, tmp_path):
    """Lying elsewhere, on a scratch file system say, which is not there, or empty."""
    root, scratch = tmp_path / "run" / "checkpoints", tmp_path / "scratch"
    scratch.mkdir()
    root.parent.mkdir()
    root.symlink_to(scratch)
    runs.run(config_file, 1, *runs.ONE, "train.stop_at=3")
    scratch.rename(tmp_path / "away")
    assert runs.train(runs.load(config_file, *runs.ONE), 1) == StorageFailed.code
    scratch.mkdir()
    runs.run(config_file, 1, *runs.ONE, "train.stop_at=1")
    assert f"warning: {root}: no checkpoints, though metrics.jsonl has step 3" in runs.log(
        tmp_path / "run"
    )
    kept = (tmp_path / "run" / "metrics.superseded.jsonl").read_text()
    assert [json.loads(line)["step"] for line in kept.splitlines()] == [1, 2, 3]


def test_a_requeued_job_goes_back_to_a_checkpoint_of_its_own_once(
    config_file, tmp_path, monkeypatch
):
    runs.run(config_file, 1, *runs.ONE, "checkpoint.every=2", "checkpoint.keep=0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # an earlier start met a bad node, and no more
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000004"
    runs.run(config_file, 1, *runs.ONE, back, "checkpoint.keep=0", "train.stop_at=5")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [
        "step-00000002", "step-00000004", "step-00000005", "step-00000006.superseded",
        "step-00000008.superseded",
    ]  # fmt: skip
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    runs.run(config_file, 1, *runs.ONE, back, "checkpoint.keep=0", "train.stop_at=6")
    assert "step-00000005 at step 5" in runs.log(tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    for times in (2, 3):  # asked for twice in one allocation
        runs.run(config_file, 1, *runs.ONE, back, "train.stop_at=5")
        assert runs.log(tmp_path / "run").count("step-00000004 at step 4") == times


def test_a_requeued_job_whose_notes_cannot_be_read_does_not_go_back_again(
    config_file, tmp_path, monkeypatch
):
    """It would give up for good what it has trained since."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    runs.run(config_file, 1, *runs.ONE, "checkpoint.every=2", "checkpoint.keep=0")
    notes = tmp_path / "run" / "attempts.jsonl"
    notes.unlink()
    notes.mkdir()
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000004"
    with pytest.raises(StorageFailed, match=f"{notes}: Is a directory, need what earlier starts"):
        runs.train(runs.load(config_file, *runs.ONE, back), 1)
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()


def test_a_run_that_goes_back_to_what_was_set_aside_goes_on_from_there(config_file, tmp_path):
    """And not, when it is started once more, with the line of training that it has left."""
    runs.run(
        config_file, 1, *runs.ONE, "checkpoint.every=2", "checkpoint.keep=0", "train.stop_at=4"
    )
    root = tmp_path / "run" / "checkpoints"
    first = (root / "step-00000004" / "checkpoint.json").read_text()
    back = f"checkpoint.resume={root}/step-00000002"
    runs.run(config_file, 1, *runs.ONE, back, "run.seed=1", "train.stop_at=4")
    assert sorted(path.name for path in root.iterdir())[1:] == [
        "step-00000004", "step-00000004.superseded",
    ]  # fmt: skip
    again = f"checkpoint.resume={root}/step-00000004.superseded"
    runs.run(config_file, 1, *runs.ONE, again, "train.stop_at=5")
    assert (root / "step-00000004" / "checkpoint.json").read_text() == first
    runs.run(config_file, 1, *runs.ONE, "train.stop_at=6")
    assert "step-00000005 at step 5" in runs.log(tmp_path / "run")


def test_a_checkpoint_renamed_among_the_runs_own_is_refused_and_keeps_its_name(
    config_file, tmp_path
):
    """As `best`, to protect it: its name again, retention would delete it one day."""
    saved = ("checkpoint.every=2", "checkpoint.keep=0", "train.stop_at=4")
    runs.run(config_file, 1, *runs.ONE, *saved)
    best = tmp_path / "run" / "checkpoints" / "best"
    best.with_name("step-00000002").rename(best)
    with pytest.raises(UserError, match=r"best: another name among the run's own checkpoints"):
        runs.train(runs.load(config_file, *runs.ONE, f"checkpoint.resume={best}"), 1)
    assert sorted(path.name for path in best.parent.iterdir()) == ["best", "step-00000004"]


def test_a_run_goes_back_to_a_checkpoint_that_lies_elsewhere(config_file, tmp_path):
    """In its folder is a link to it, in permanent storage."""
    saved = ("checkpoint.every=2", "checkpoint.keep=0", "train.stop_at=4")
    runs.run(config_file, 1, *runs.ONE, *saved)
    link = tmp_path / "run" / "checkpoints" / "step-00000002"
    link.rename(tmp_path / "archived")
    link.symlink_to(tmp_path / "archived")
    runs.run(config_file, 1, *runs.ONE, f"checkpoint.resume={link}", "train.stop_at=3")
    named = link.with_name("step-00000003")
    (tmp_path / "good").symlink_to(named)
    assert resuming.goes_back(runs.load(config_file, f"checkpoint.resume={tmp_path}/good"))
    assert "step-00000002 at step 2" in runs.log(tmp_path / "run")
    assert link.with_name("step-00000004.superseded").is_dir()
    assert link.is_symlink()


NEW = "checkpoint.resume=never"


def start_twice(restarts, config_file, monkeypatch):
    """A run that is to begin new, to step 3, and by the same launcher, whose count of `restarts`
    this is, again to step 4."""
    runs.run(config_file, 1, *runs.ONE, NEW, "train.stop_at=3")
    monkeypatch.setenv(restarts, "1")
    runs.run(config_file, 1, *runs.ONE, NEW, "train.stop_at=4")


def test_a_requeued_job_that_was_to_begin_new_goes_on(config_file, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    start_twice("SLURM_RESTART_COUNT", config_file, monkeypatch)
    assert "step-00000003 at step 3" in runs.log(tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert runs.train(runs.load(config_file, *runs.ONE, NEW), 1) == 2


def test_ranks_that_torchrun_starts_again_go_back_to_a_checkpoint_once(
    config_file, tmp_path, monkeypatch
):
    runs.run(config_file, 1, *runs.ONE, "checkpoint.every=2", "checkpoint.keep=0")
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000004"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    runs.run(config_file, 1, *runs.ONE, back, "checkpoint.keep=0", "train.stop_at=5")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    runs.run(config_file, 1, *runs.ONE, back, "checkpoint.keep=0", "train.stop_at=6")
    assert "step-00000005 at step 5" in runs.log(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # by another torchrun
    runs.run(config_file, 1, *runs.ONE, back, "checkpoint.keep=0", "train.stop_at=5")
    assert runs.log(tmp_path / "run").count("step-00000004 at step 4") == 2


def test_ranks_that_torchrun_starts_again_go_on_with_a_run_that_was_to_begin_new(
    config_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    start_twice("TORCHELASTIC_RESTART_COUNT", config_file, monkeypatch)
    assert "step-00000003 at step 3" in runs.log(tmp_path / "run")
    assert not resuming.resumes_when_repeated(runs.load(config_file, NEW)), "with the same command"
    for restarts in ("0", "1"):  # of another torchrun, which starts again what was refused
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        assert runs.train(runs.load(config_file, *runs.ONE, NEW), 1) == 2


def test_a_run_cannot_begin_where_it_is_to_end(config_file, tmp_path, imported, capfd):
    assert runs.train(runs.load(config_file, *runs.ONE, imported, "train.steps=2"), 1) == 2
    error = capfd.readouterr().err
    assert "train.steps: 2, need more than 2, the step of " in error
    assert ", or checkpoint.weights_only=true\n" in error
    runs.run(config_file, 1, *runs.ONE, imported)
    runs.run(config_file, 1, *runs.ONE, imported)
    assert runs.log(tmp_path / "run").count("train.steps: 8: reached, nothing left to do") == 1


def checkpoint_root_exists(tmp_path):
    return (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
