"""Which checkpoint a run resumes from, and what it does with the others."""

import pytest
import torch

from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.common.errors import StorageFailed, UserError
from megafrontier.training.resume import resume as resuming
from tests import runs

KEEP_ALL = ("checkpoint.every=2", "checkpoint.keep=0")
NEVER = "checkpoint.resume=never"
ONE = (*runs.ONE, "train.micro_batch=16")


@pytest.fixture
def train_alone(config_file):
    """Train on one rank; returns the lines of metrics.jsonl."""
    return lambda *overrides: runs.run(config_file, 1, *ONE, *overrides)


@pytest.fixture
def exit_code(config_file):
    return lambda *overrides: runs.train(runs.load(config_file, *runs.ONE, *overrides), 1)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


def names(root):
    return sorted(path.name for path in root.iterdir())


def losses_at(lines):
    return [line["step"] for line in lines if "loss" in line]


def test_auto_falls_back_to_the_newest_whole_checkpoint_with_a_warning(config_file, tmp_path, root):
    two = ("machine=laptop", "train.micro_batch=8")
    unbroken = runs.run(config_file, 2, *two, f"run.directory={tmp_path}/unbroken")
    runs.run(config_file, 2, *two, *KEEP_ALL, "train.stop_at=6")
    damaged = next((root / "step-00000006").glob("pieces/*/00000001.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    resumed = runs.run(config_file, 2, *two, *KEEP_ALL)
    log = runs.log(tmp_path / "run")
    assert "refused" in log
    assert damaged.name in log
    assert "resumed from" in log
    assert "step-00000004 at step 4" in log
    assert runs.losses(resumed) == runs.losses(unbroken)


def test_a_finished_run_that_is_started_again_changes_nothing(train_alone):
    finished = train_alone("train.steps=2", "evaluate.batches=1")
    assert train_alone("train.steps=2", "evaluate.batches=1") == finished


def test_the_last_step_is_saved_before_it_is_evaluated(train_alone, tmp_path):
    """A kill may cut the evaluation short."""
    train_alone("train.steps=2", "evaluate.batches=1", "evaluate.every=2")
    log = runs.log(tmp_path / "run")
    assert log.index("checkpoint ") < log.index("valid loss")


def test_never_refuses_a_directory_that_holds_another_runs_checkpoints(
    config_file, train_alone, exit_code, root, capfd
):
    train_alone("train.steps=2")
    assert exit_code(NEVER) == 2
    assert "checkpoint.resume: never, but" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"checkpoint\.resume: never, but"):
        resuming.check_own(runs.load(config_file, *runs.ONE, NEVER))
    assert names(root) == ["step-00000002"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("model.layers=3", r"model\.layers: 3, but .* with 2; need the same, or model=from_chec"),
        ("model.heads=1", r"model\.heads: 1, but .*step-00000002 was trained with "),
        ("train.steps=9", None),
    ],
)
def test_a_checkpoint_of_another_model_is_noticed_before_a_job_is_queued(
    config_file, train_alone, change, problem
):
    train_alone("train.steps=2")
    config = runs.load(config_file, *runs.ONE, change)
    if problem is None:
        resuming.check_own(config)
    else:
        with pytest.raises(UserError, match=problem):
            resuming.check_own(config)


def test_a_run_begins_at_a_named_checkpoint_and_goes_on_from_its_own(
    train_alone, tmp_path, root, imported
):
    """The command stays the same, as that of a job in the queue."""
    unbroken = train_alone(f"run.directory={tmp_path}/unbroken")
    newest = f"checkpoint.resume={tmp_path}/other"  # stands for its newest checkpoint
    for stop, start in ((4, newest), (6, imported), (8, imported)):
        lines = train_alone(start, f"train.stop_at={stop}")
    assert runs.losses(lines) == runs.losses(unbroken)[2:]
    log = runs.log(tmp_path / "run")
    assert log.count("00000002: not used, the run has checkpoints of its own") == 2
    for step, folder in ((2, "other"), (4, "run"), (6, "run")):
        line = f"resumed from {tmp_path}/{folder}/checkpoints/step-{step:08d} at step {step}"
        assert line in log
    assert not list(root.glob("*.superseded"))


def test_a_run_may_begin_at_step_0_with_the_weights_of_another(
    config_file, train_alone, tmp_path, imported
):
    """To fine-tune: optimizer, schedule and data are new. A job in the queue then goes on."""
    other = open_checkpoint(tmp_path / "other" / "checkpoints" / "step-00000002")
    new = (imported, "checkpoint.weights_only=true")
    still = ("optimizer.lr=0", f"run.directory={tmp_path}/still", "train.steps=1", "run.seed=9")
    (line,) = train_alone(*new, *still, "schedule.warmup_steps=0")
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
        lines = runs.run(config_file, 4, "evaluate.batches=0", *new, f"train.stop_at={stop}")
    assert losses_at(lines) == [1, 2, 3, 4]


def test_weights_only_needs_another_runs_checkpoint(config_file, tmp_path):
    wanted = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000002"
    config = runs.load(config_file, *runs.ONE, wanted, "checkpoint.weights_only=true")
    with pytest.raises(UserError, match="weights_only is true; need the path of another run's"):
        runs.train(config, 1)
    assert not (tmp_path / "run").exists(), "nothing is left of a run that is refused"


def test_a_run_whose_checkpoints_are_away_does_not_begin_anew(
    train_alone, exit_code, tmp_path, root
):
    """Its checkpoints folder is a link to a scratch file system, which is missing."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    root.parent.mkdir()
    root.symlink_to(scratch)
    train_alone("train.stop_at=3")
    scratch.rename(tmp_path / "away")
    assert exit_code() == StorageFailed.code


def test_a_requeued_job_goes_back_to_a_checkpoint_of_its_own_once(
    train_alone, tmp_path, root, monkeypatch
):
    train_alone(*KEEP_ALL)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # an earlier start met only a bad node
    back = (f"checkpoint.resume={root}/step-00000004", "checkpoint.keep=0")
    train_alone(*back, "train.stop_at=5")
    assert names(root) == [
        "step-00000002", "step-00000004", "step-00000005", "step-00000006.superseded",
        "step-00000008.superseded",
    ]  # fmt: skip
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    train_alone(*back, "train.stop_at=6")
    assert "step-00000005 at step 5" in runs.log(tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    for times in (2, 3):  # asked for twice in one allocation
        train_alone(*back, "train.stop_at=5")
        assert runs.log(tmp_path / "run").count("step-00000004 at step 4") == times


def test_a_run_that_goes_back_to_what_was_set_aside_goes_on_from_there(train_alone, tmp_path, root):
    """Not, when it is started once more, with the line of training that it has left."""
    train_alone(*KEEP_ALL, "train.stop_at=4")
    first = (root / "step-00000004" / "checkpoint.json").read_text()
    train_alone(f"checkpoint.resume={root}/step-00000002", "run.seed=1", "train.stop_at=4")
    assert names(root)[1:] == ["step-00000004", "step-00000004.superseded"]
    train_alone(f"checkpoint.resume={root}/step-00000004.superseded", "train.stop_at=5")
    assert (root / "step-00000004" / "checkpoint.json").read_text() == first
    train_alone("train.stop_at=6")
    assert "step-00000005 at step 5" in runs.log(tmp_path / "run")


def test_a_run_goes_back_to_a_checkpoint_that_is_a_link(config_file, train_alone, tmp_path, root):
    """To permanent storage, say."""
    train_alone(*KEEP_ALL, "train.stop_at=4")
    link = root / "step-00000002"
    link.rename(tmp_path / "archived")
    link.symlink_to(tmp_path / "archived")
    train_alone(f"checkpoint.resume={link}", "train.stop_at=3")
    (tmp_path / "good").symlink_to(root / "step-00000003")
    assert resuming.goes_back(runs.load(config_file, f"checkpoint.resume={tmp_path}/good"))
    assert "step-00000002 at step 2" in runs.log(tmp_path / "run")
    assert (root / "step-00000004.superseded").is_dir()
    assert link.is_symlink()


def test_a_restart_of_a_launch_that_was_to_begin_new_goes_on(
    train_alone, exit_code, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    train_alone(NEVER, "train.stop_at=3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train_alone(NEVER, "train.stop_at=4")
    assert "step-00000003 at step 3" in runs.log(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "8")
    assert exit_code(NEVER) == 2


def test_a_run_cannot_begin_where_it_is_to_end(train_alone, exit_code, tmp_path, imported, capfd):
    assert exit_code(imported, "train.steps=2") == 2
    error = capfd.readouterr().err
    assert "train.steps: 2, need more than 2, the step of " in error
    assert ", or checkpoint.weights_only=true\n" in error
    train_alone(imported)
    train_alone(imported)
    assert runs.log(tmp_path / "run").count("train.steps: 8: reached, no step is left") == 1
