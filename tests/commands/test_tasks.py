"""Tasks of lm-evaluation-harness against transformers with the exported model."""

import json
import math
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from megafrontier.cli import main
from megafrontier.common.checkpoints import newest
from megafrontier.common.errors import UserError
from megafrontier.config import Config
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from megafrontier.evaluation import tasks as tasks_module
from megafrontier.evaluation.rows import StopAsked
from tests import runs
from tests.commands.helpers import run_command

DOCUMENTS = [
    {"question": "a stitch in", "choices": [" time", " the Fluß"], "answer": 0},
    {"question": "3 € sind", "choices": [" nine", " viel;", " breit"], "answer": 1},
    {"question": "Der Fluß ist", "choices": [" breit", " saves nine"], "answer": 1},
]
TEXT = "Der Fluß ist breit, 3 € sind viel; a stitch in time saves nine.\n" * 2
TASKS = {
    "pick": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
    "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}]",
    "guess": "output_type: loglikelihood\ndoc_to_text: '{{question}}'\n"
    "doc_to_target: '{{choices[0]}}'\nmetric_list: [{metric: perplexity}, {metric: acc}]",
    "read": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: bits_per_byte}]",
    "write": "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
    "doc_to_target: '{{written}}'\ngeneration_kwargs: {until: [e], max_gen_toks: 5}\n"
    "metric_list: [{metric: exact_match}]",
}


@pytest.fixture(scope="module")
def reference(life, tmp_path_factory):
    """transformers' model and tokenizer of the run."""
    pytest.importorskip("lm_eval.evaluator")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path_factory.mktemp("hf") / "model"
    assert main(["export", str(life / "run"), "--out", str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    return model, lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer


@torch.no_grad()
def log_probability(model, context, ids):
    """Of `ids` after `context`, and whether they are greedy."""
    logits = model(torch.tensor([context + ids])).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
    found = logits.gather(1, torch.tensor(ids)[:, None]).sum().item()
    return found, logits.argmax(-1).tolist() == ids


@torch.no_grad()
def write(model, tokenizer, ids):
    """A greedy continuation, up to an e, of 5 tokens at most."""
    out = list(ids)
    while len(out) < len(ids) + 5:
        out.append(model(torch.tensor([out])).logits[0, -1].argmax().item())
    text = tokenizer.decode(out, skip_special_tokens=True)
    return text[len(tokenizer.decode(ids)) :].partition("e")[0]


@pytest.fixture(scope="module")
def tasks(life, reference, tmp_path_factory):
    """A folder of task files, and the result of each by another road."""
    model, encode, tokenizer = reference
    folder = tmp_path_factory.mktemp("tasks")
    right, guessed, greedy, nats = 0, [], 0, 0.0
    for document in DOCUMENTS:
        context = encode(document["question"])
        scores = [
            log_probability(model, context, encode(document["question"] + c)[len(context) :])
            for c in document["choices"]
        ]
        best = max(range(len(scores)), key=lambda i: scores[i][0])
        right += best == document["answer"]
        guessed.append(scores[0][0])
        greedy += scores[0][1]
        document["written"] = write(model, tokenizer, context)
        document["text"] = TEXT
    DOCUMENTS[0]["written"] += "x"
    ids = [load_tokenizer(str(life / "tokenizer")).bos, *encode(TEXT)]
    length = model.config.max_position_embeddings
    for start in range(0, len(ids) - 1, length):
        stop = min(start + length, len(ids) - 1)
        # The last window has as many tokens before it as fit.
        first = max(0, stop - length)
        nats += log_probability(model, ids[first : start + 1], ids[start + 1 : stop + 1])[0]
    lines = [json.dumps(document) for document in DOCUMENTS]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{cache_dir: {folder}/cache, data_files: "
        data += f"{{test: {folder}/documents.jsonl}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}\n{text}\n")
    count = len(DOCUMENTS)
    expected = {
        "pick": {"acc": right / count},
        "guess": {"perplexity": math.exp(-sum(guessed) / count), "acc": greedy / count},
        "read": {"bits_per_byte": -nats / math.log(2) / len(TEXT.encode())},
        "write": {"exact_match": (count - 1) / count},
    }
    return folder, expected


def results(run):
    """The tasks' results in the metrics of a run, without standard errors."""
    for line in runs.metrics(run):
        if "tasks" in line:
            yield (
                line["step"],
                {
                    task: {k: v for k, v in found.items() if "stderr" not in k}
                    for task, found in line["tasks"].items()
                },
            )


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for task, values in expected.items():
        assert found[task] == pytest.approx(values, rel=1e-4)


def test_evaluate_gives_the_results_of_transformers_with_the_exported_model(life, tasks, capfd):
    folder, expected = tasks
    shown = run_command(
        capfd, "evaluate", life / "run", "--tasks", ",".join(TASKS), "--include-path", folder,
        "--nproc", 4,
    )  # fmt: skip
    step, found = list(results(life / "run"))[-1]
    assert step == 30
    assert_close(found, expected)
    assert f"{found['guess']['perplexity']:.4f}" in shown
    error = (found["pick"]["acc"] * (1 - found["pick"]["acc"]) / (len(DOCUMENTS) - 1)) ** 0.5
    assert re.search(rf"pick +acc +[\d.]+ ± {error:.4f}", shown)


def test_without_the_package_one_line_names_the_extra(life, capfd, monkeypatch):
    monkeypatch.setattr("megafrontier.evaluation.tasks.find_spec", lambda name: None)
    assert main(["evaluate", str(life / "run"), "--tasks", "arc_easy"]) == 2
    assert "pip install megafrontier[evaluate]" in capfd.readouterr().err


def test_a_run_evaluates_tasks_while_it_trains_at_any_split(life, tasks):
    """The weights do not change, so the results are those of the checkpoint."""
    folder, expected = tasks
    chosen = ("model.vocab_size=300", "train.steps=2", "train.micro_batch=4", "run.name=split",
              f"run.directory={life}/split", f"checkpoint.resume={newest(life / 'run')}",
              "checkpoint.weights_only=true", "optimizer.lr=1e-30", "schedule.min_lr=0",
              "parallel.tensor=2", "parallel.pipeline=2", "evaluate.batches=0",
              "evaluate.tasks=[guess,write]", f"evaluate.tasks_path={folder}",
              "evaluate.tasks_every=1")  # fmt: skip
    runs.run(life / "config.yaml", 4, *chosen)
    found = list(results(life / "split"))
    assert [step for step, _ in found] == [1, 2]
    for _, values in found:
        assert_close(values, {task: expected[task] for task in ("guess", "write")})


def test_unknown_and_failing_tasks_are_named_in_one_line(monkeypatch):
    class Manager:
        def __init__(self, include_path, include_defaults=True):
            self.all_tasks = ["own", "arc"] if include_defaults else ["own"]

    assert tasks_module._manager(["own"], "folder", Manager).all_tasks == ["own"]
    assert tasks_module._manager(["own", "arc"], "folder", Manager).all_tasks == ["own", "arc"]
    with pytest.raises(UserError, match=r"evaluate\.tasks: ark, need tasks of"):
        tasks_module._manager(["own", "ark"], "folder", Manager)
    config = Config()
    config.evaluate.tasks = ["own"]
    for error, raised in ((KeyError("text"), UserError), (StopAsked(), StopAsked)):
        monkeypatch.setattr(tasks_module, "_run_harness", Mock(side_effect=error))
        with pytest.raises(raised):
            tasks_module._results(config, SimpleNamespace(is_computing=False), None)
