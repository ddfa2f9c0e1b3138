"""Commands on a run whose files are damaged, pruned meanwhile or too large, and a run's trace."""

import json
import shutil
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

from megafrontier.cli import main
from megafrontier.commands import evaluate as evaluate_module
from tests import runs
from tests.commands.helpers import (
    CHECKPOINTS,
    CONVERT,
    EVALUATE,
    GENERATE,
    numbers,
    run_command,
)


def test_a_checkpoint_that_one_rank_cannot_read_is_named_in_one_line(life, capfd, tmp_path):
    """Whichever rank it is, and however it would be noticed: by the length or by the contents."""
    source = sorted((life / "run" / "checkpoints").glob("step-*"))[-1]

    def overwrite(data):
        header = 8 + int.from_bytes(data[:8], "little")
        return data[:header] + bytes(len(data) - header)

    for number, damage in enumerate((lambda data: data[:-9], overwrite)):
        copy = tmp_path / str(number) / source.name
        shutil.copytree(source, copy)
        last = max(copy.glob("pieces/*/*"))
        assert last.name != "00000000.safetensors"
        last.write_bytes(damage(last.read_bytes()))
        assert main(["evaluate", str(copy), "--nproc", "4"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert str(last) in line


@pytest.mark.parametrize("command", ["generate", "evaluate", "export"])
def test_a_damaged_tokenizer_in_a_checkpoint_is_not_used(life, tmp_path, capfd, command):
    """It may still load, and give wrong text."""
    copy = tmp_path / "step-00000030"
    shutil.copytree(life / "run" / "checkpoints" / copy.name, copy)
    model = next(path for path in sorted((copy / "tokenizer").iterdir()) if path.is_file())
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    words = {"generate": ["--prompt", "x"], "export": ["--out", str(tmp_path / "out")]}
    assert main([command, str(copy), *words.get(command, [])]) == 2
    assert f"{model}: checksum does not match" in capfd.readouterr().err


@pytest.fixture
def training(life, tmp_path):
    """A run as `life`'s, with two checkpoints more, and what a training does when it has saved."""
    run = tmp_path / "run"
    shutil.copytree(life / "run", run)
    kept = run / "checkpoints" / "step-00000030"
    for step in ("31", "32"):
        shutil.copytree(kept, kept.with_name(f"step-000000{step}"))

    def prune(path):
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)

    return SimpleNamespace(path=run, prune=prune, kept=kept)


@pytest.mark.parametrize(
    ("command", "reader"),
    [
        (["checkpoint", "show"], "megafrontier.checkpoint.commands.read_manifest"),
        (["generate", "--prompt", "x", "--max-new-tokens", "1"], GENERATE + "saved_config"),
        (["generate", "--prompt", "x", "--max-new-tokens", "1"], CHECKPOINTS + "open_checkpoint"),
        (["export"], CONVERT + "saved_config"),
        (["export"], CONVERT + "Checkpoint.tensors"),
        (["evaluate"], EVALUATE + "saved_config"),
    ],
)
def test_what_the_training_prunes_meanwhile_is_not_needed(
    training, capfd, monkeypatch, tmp_path, command, reader
):
    read = resolve_name(reader)

    def pruned_before(source, *args, **named):
        training.prune(source if isinstance(source, Path) else source.path)
        return read(source, *args, **named)

    monkeypatch.setattr(reader, pruned_before)
    out = ["--out", tmp_path / "out"] if command == ["export"] else []
    run_command(capfd, *command, training.path, *out)
    assert [path.name for path in training.kept.parent.iterdir()] == [training.kept.name]


def test_all_ranks_of_an_evaluation_take_the_same_next_newest(training, capfd, monkeypatch):
    load_checkpoint = evaluate_module.load_checkpoint

    def pruned_before(path, *, load, world):
        if world.rank == 1:
            training.prune(path)
        world.barrier()
        return load_checkpoint(path, load, world)

    monkeypatch.setattr(evaluate_module, "load_checkpoint", pruned_before)
    line = run_command(capfd, "evaluate", training.path, "--nproc", "2").splitlines()[-1]
    assert line.startswith(f"{training.kept}: loss ")
    expected = runs.valid_losses(runs.metrics(training.path))[-1]
    assert numbers(line)[0] == pytest.approx(expected, abs=1e-4)


def test_a_trace_has_a_row_a_level_and_costs_no_run_its_end(life, capfd, tmp_path):
    words = ["train", life / "config.yaml", "--nproc", 4, "model.vocab_size=300", "train.steps=2"]
    run_command(capfd, *words, "--trace", f"run.directory={tmp_path}/run")
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert rows == ["waiting", "pair", "node", "world"]
    assert {event["name"].split()[0] for event in events if event["ph"] == "X"} >= {
        "gather", "reduce", "finish", "publish"
    }  # fmt: skip
    (tmp_path / "other" / "trace.json").mkdir(parents=True)
    shown = run_command(capfd, *words, "--trace", f"run.directory={tmp_path}/other")
    assert f"warning: {tmp_path}/other/trace.json is not written: Is a directory" in shown
