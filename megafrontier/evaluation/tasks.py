"""Tasks of lm-evaluation-harness: on rank 0, with a model that all ranks hold."""

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megafrontier.common.errors import FatalError, UserError, need
from megafrontier.config import Config
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer
from megafrontier.evaluation.rows import RowScorer, StopAsked
from megafrontier.parallel.mesh import Mesh
from megafrontier.pipeline.work import Runner

RESAMPLES = 1000
"""For standard errors without a formula, such as that of a perplexity."""
Results = dict[str, dict[str, float]]
"""Metrics by their names, of each task by its name."""


def check_tasks(config: Config) -> None:
    """Raises UserError if tasks are chosen that cannot be evaluated. It does not look for the
    tasks, because importing the harness takes seconds."""
    chosen = config.evaluate
    if not chosen.tasks:
        return
    fits = "needs the package lm-eval: pip install megafrontier[evaluate]"
    need(find_spec("lm_eval") is not None, "evaluate.tasks", ",".join(chosen.tasks), fits)
    is_text = cached_tokenizer(config.tokenizer).min_vocab_size > 0
    need(is_text, "evaluate.tasks", ",".join(chosen.tasks), "need a tokenizer that is not none")
    if chosen.tasks_path is not None:
        is_folder = Path(chosen.tasks_path).is_dir()
        need(is_folder, "evaluate.tasks_path", chosen.tasks_path, "need a folder of task files")


def evaluate_tasks(
    config: Config,
    runner: Runner,
    mesh: Mesh,
    heartbeat: Callable[[], None] = lambda: None,
    stops: Callable[[], bool] = lambda: False,
) -> Results | None:
    """The results of `evaluate.tasks`. All ranks call it; only rank 0 loads tasks and has results.

    heartbeat, stops: as of `RowScorer`. None also if `stops` was true. All ranks raise UserError
    for tasks that are unknown, cannot be loaded, or fail.
    """
    train = config.train
    batches = train.global_batch, train.micro_batch
    scorer = RowScorer(runner, mesh, *batches, heartbeat, stops)
    tokenizer = cached_tokenizer(config.tokenizer)
    return scorer.run(lambda: _results(config, scorer, tokenizer))


def _results(config: Config, scorer: RowScorer, tokenizer: Tokenizer) -> Results:
    try:
        return _run_harness(config, scorer, tokenizer)
    except (FatalError, StopAsked):
        raise
    except Exception as error:  # a task may need data, packages or anything else
        if scorer.is_computing:
            raise
        names, why = ",".join(config.evaluate.tasks), f"{type(error).__name__}: {error}"
        raise UserError(f"evaluate.tasks: {names}, need tasks that work here ({why})") from error


def _run_harness(config: Config, scorer: RowScorer, tokenizer: Tokenizer) -> Results:
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager, get_task_dict

    from megafrontier.evaluation.language_model import ShardedLanguageModel

    chosen = config.evaluate
    names = list(chosen.tasks)
    tasks = get_task_dict(names, _manager(names, chosen.tasks_path, TaskManager))
    model = ShardedLanguageModel(scorer, tokenizer)
    # Without this variable it forks, which a process that holds communicators must not do.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    options = {"limit": chosen.tasks_limit, "bootstrap_iters": RESAMPLES}
    with redirect_stdout(sys.stderr):  # it prints what it does; stdout is for results
        found: Any = evaluate(model, tasks, **options)
    return {task: _numbers(results) for task, results in found["results"].items()}


def _manager(names: list[str], folder: str | None, make: Any) -> Any:
    """What finds the tasks: those of the folder alone if it has them all, because the harness reads
    the thousands of its own files one by one. Raises UserError for unknown names."""
    if folder is not None:
        own = make(include_path=folder, include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    manager = make(include_path=folder)
    unknown = sorted(set(names) - set(manager.all_tasks))
    fits = "need tasks of lm-evaluation-harness or of evaluate.tasks_path"
    need(not unknown, "evaluate.tasks", ", ".join(unknown), fits)
    return manager


def _numbers(results: dict[str, Any]) -> dict[str, float]:
    """The harness names a metric `acc,none`, where none is the filter of the answers."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in results.items()
        if isinstance(value, int | float) and "," in name
    }
