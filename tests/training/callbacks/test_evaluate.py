"""Evaluations come when they are due and complete, and give way to a request to stop."""

from types import SimpleNamespace

from megafrontier.common.errors import UserError
from megafrontier.training import loop
from megafrontier.training.callbacks import evaluate as module
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.callbacks.evaluate import Evaluate
from tests import runs
from tests.data.corpora import write_corpus
from tests.ranks import run_mesh


def test_the_heartbeat_comes_with_every_micro_batch_of_an_evaluation(config_file):
    config = runs.load(config_file, "machine=laptop", "evaluate.batches=3")

    def body(mesh):
        beats = []
        with runs.open_trainer(config, mesh) as trainer:
            trainer.run_logger = SimpleNamespace(write=lambda line: beats.append(sorted(line)))
            Evaluate(lambda: beats.append("batch"))._run(trainer)
        return beats

    found = ["batch"] * 3 * 8 + [["step", "tokens", "valid_loss"]]
    assert run_mesh((1,), body) == [found]


def test_a_run_that_is_to_stop_before_its_first_step_only_ends(config_file, monkeypatch):
    class Note(Callback):
        def at_start(self, trainer):
            seen.append("start")

        def at_end(self, trainer):
            seen.append("end")

    def body(mesh):
        config = runs.load(config_file, "machine=laptop", "evaluate.batches=1")
        with runs.open_trainer(config, mesh) as trainer:
            monkeypatch.setattr(Evaluate, "_run", lambda *_: seen.append("evaluation"))
            for stops in (True, False):
                monkeypatch.setattr(loop, "stop_requested", lambda stops=stops: stops)
                trainer.config.train.stop_at = 0 if stops else 1
                loop.run(trainer, [Note(), Evaluate()])
        return seen

    seen = []
    assert run_mesh((1,), body) == [["end", "start", "end", "evaluation"]]


def test_a_request_to_stop_breaks_off_an_evaluation_and_no_step_follows(config_file, monkeypatch):
    """Near the time limit there may be time for neither."""
    config = runs.load(
        config_file, "machine=laptop", "evaluate.every=2", "evaluate.batches=5", "train.steps=6"
    )
    read, lines = [], []
    read_step = module.read_step

    def read_and_count(*arguments):
        read.append(1)
        return read_step(*arguments)

    monkeypatch.setattr(module, "read_step", read_and_count)

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            trainer.run_logger = SimpleNamespace(write=lines.append)
            monkeypatch.setattr(loop, "stop_requested", lambda: len(read) >= 2)
            loop.run(trainer, [Evaluate()], depth=1)
        return trainer.step, len(read), len(lines), trainer.model.training

    assert run_mesh((1,), body) == [(2, 2, 0, True)]


def test_the_next_start_makes_up_for_an_evaluation_that_a_kill_prevented(config_file, tmp_path):
    chosen = ("machine=laptop", "evaluate.batches=2", "evaluate.every=2", "checkpoint.every=2")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def start(*overrides):
        lines = runs.run(config_file, 2, *chosen, "train.steps=4", *overrides)
        return [(line["step"], line["valid_loss"]) for line in lines if "valid_loss" in line]

    def kill_after_the_save():
        """Leave the metrics as before the last evaluation."""
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))

    (first,) = start("train.stop_at=2")
    kill_after_the_save()
    whole = start()
    assert whole[0] == first
    assert [step for step, _ in whole] == [2, 4]
    kill_after_the_save()
    assert start() == start() == whole


def test_the_next_start_makes_up_for_tasks_at_the_last_step_alone(
    config_file, tmp_path, monkeypatch
):
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"step": 3, "loss": 1.0}\n{"step": 3, "valid_loss": 1.0}\n')
    config = runs.load(config_file, "machine=laptop", "evaluate.tasks=[some]", "train.stop_at=3")
    monkeypatch.setattr(module, "evaluate_tasks", lambda *_: {"some": {"acc": 0.5}})

    def body(mesh):
        lines = []
        with runs.open_trainer(config, mesh) as trainer:
            trainer.run_logger = SimpleNamespace(write=lines.append)
            trainer.step = 3
            loop.run(trainer, [Evaluate()])
            trainer.config.train.stop_at = 4
            loop.run(trainer, [Evaluate()], depth=0)
        return [sorted(line) for line in lines]

    tasks = ["step", "tasks", "tokens"]
    assert run_mesh((1,), body) == [[tasks, ["step", "tokens", "valid_loss"], tasks]]


def test_a_run_goes_on_without_tasks_that_fail(config_file, monkeypatch):
    config = runs.load(config_file, "machine=laptop", "evaluate.tasks=[gone]")
    asked, lines = [], []

    def fail(*_):
        asked.append(1)
        raise UserError("evaluate.tasks: gone, need tasks of the harness")

    monkeypatch.setattr(module, "evaluate_tasks", fail)

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            trainer.run_logger = SimpleNamespace(info=lines.append)
            callback = Evaluate()
            callback._run_tasks(trainer)
            callback._run_tasks(trainer)
        return len(asked), lines

    line = "warning: evaluate.tasks: gone, need tasks of the harness; the run goes on without tasks"
    assert run_mesh((1,), body) == [(1, [line])]


def test_corpora_with_a_name_are_also_evaluated_alone(config_file, tmp_path):
    write_corpus(tmp_path / "other", [[[5, 9, 3] * 200]])
    corpora = {"known": tmp_path / "corpus", "strange": tmp_path / "other"}

    def evaluated(*entries):
        valid = ", ".join(f"{{path: {corpora[of]}, name: '{name}'}}" for of, name in entries)
        config = runs.load(config_file, "machine=laptop", f"data.valid=[{valid}]")

        def body(mesh):
            lines = []
            with runs.open_trainer(config, mesh) as trainer:
                trainer.run_logger = SimpleNamespace(write=lines.append)
                Evaluate()._run(trainer)
            return lines

        ((line,),) = run_mesh((1,), body)
        return line

    both = evaluated(("known", "books"), ("strange", "web"))
    alone = [evaluated((of, ""))["valid_loss"] for of in corpora]
    assert [both["valid_loss/books"], both["valid_loss/web"]] == alone
    assert min(alone) < both["valid_loss"] < max(alone)
