"""Export to and import from Hugging Face's format."""

from pathlib import Path

import pytest
import torch

from megafrontier.checkpoint.load import Checkpoint
from megafrontier.cli import main
from megafrontier.commands import convert
from tests import runs
from tests.commands.helpers import numbers, run_command, whole_model_loss


def test_what_is_exported_gives_transformers_the_same_loss_and_comes_back_to_train_on(
    life, capfd, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shown = run_command(capfd, "export", life / "run", "--out", tmp_path / "exported")
    assert "LlamaForCausalLM" in shown
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").encode("breit")

    def model_loss(batch):
        logits = model(batch.tokens).logits[..., :300]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
        )

    nats, batch, _ = whole_model_loss(life, model_loss)
    trained = numbers(run_command(capfd, "evaluate", life / "run"))[0]
    assert nats / batch.targets.numel() == pytest.approx(trained, abs=2e-4)

    imported = run_command(
        capfd, "import", tmp_path / "exported", "--out", tmp_path / "imported"
    ).strip()
    named = tmp_path / "by-name" / "step-00000000"
    assert str(named) in run_command(capfd, "import", tmp_path / "exported", "--out", named)
    assert (named / "checkpoint.json").is_file()
    again = ["import", str(tmp_path / "exported"), "--out", str(tmp_path / "imported")]
    assert main(again) == 2
    assert "imported: holds checkpoints; need another --out" in capfd.readouterr().err
    lines = runs.run(
        life / "config.yaml", 4, f"checkpoint.resume={imported}", "model.vocab_size=300",
        "model.vocab_multiple=128",
        f"run.directory={tmp_path}/on", "train.steps=4", "data.split=[0.8,0.2]",
        "evaluate.batches=2", "evaluate.every=1", "optimizer.lr=0",
    )  # fmt: skip
    assert runs.valid_losses(lines)[0] == pytest.approx(trained, abs=2e-4)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


def test_an_export_opens_each_shard_file_once_for_many_parameters(
    life, capfd, monkeypatch, tmp_path
):
    """With thousands of ranks each read opens thousands of files."""
    read, opened = Checkpoint.tensors, []

    def counted(checkpoint, state, names):
        opened.append(list(names))
        return read(checkpoint, state, names)

    monkeypatch.setattr(Checkpoint, "tensors", counted)
    run_command(capfd, "export", life / "run", "--out", tmp_path / "at-once")
    (names,) = opened
    opened.clear()
    monkeypatch.setattr(convert, "READ_BYTES", 1)
    run_command(capfd, "export", life / "run", "--out", tmp_path / "one-by-one")
    assert opened == [[name] for name in names]
    one, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("at-once", "one-by-one")
    )
    assert one == other


def test_an_import_that_cannot_be_is_refused_before_its_weights_are_read(
    capfd, monkeypatch, tmp_path
):
    """Neither is the tokenizer blamed for a folder that is not there."""
    monkeypatch.setattr(convert, "import_model", lambda _: pytest.fail("weights are read"))
    monkeypatch.setattr(convert, "cached_tokenizer", lambda _: pytest.fail("tokenizer is read"))

    def refused(out):
        assert main(["import", str(tmp_path), "--out", str(out)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    assert refused(tmp_path / "out").startswith(f"megafrontier: {tmp_path}/config.json: ")
    monkeypatch.undo()
    monkeypatch.setattr(convert, "import_model", lambda _: pytest.fail("weights are read"))
    monkeypatch.setattr(convert, "described_model", lambda _: None)
    assert refused(tmp_path / "out").startswith(f"megafrontier: tokenizer '{tmp_path}': no ")
    monkeypatch.setattr(convert, "cached_tokenizer", lambda _: None)
    (tmp_path / "file").touch()
    said = refused(tmp_path / "file" / "out")
    assert said == f"megafrontier: {tmp_path}/file/out: Not a directory"


def test_a_model_imported_without_a_tokenizer_trains_and_evaluates_and_refuses_prompts(
    life, capfd, tmp_path
):
    """On a corpus whose ids fit: what its folder lacks, `--tokenizer` gives or does without."""
    run_command(capfd, "export", life / "run", "--out", tmp_path / "hf")
    for path in (tmp_path / "hf").glob("*token*"):
        path.unlink()

    def refused(*words):
        assert main([str(word) for word in words]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    out = ["--out", tmp_path / "bare"]
    line = refused("import", tmp_path / "hf", *out)
    assert line.startswith(f"megafrontier: tokenizer '{tmp_path}/hf': no SentencePiece file, and ")
    assert line.endswith("; or --tokenizer PATH or --tokenizer none")
    general = Path(__file__).parents[2] / "tokenizers" / "general-16k.model"
    line = refused("import", tmp_path / "hf", *out, "--tokenizer", general)
    assert line.startswith("megafrontier: model.vocab_size: 300, need at least 16384 for tokenizer")
    run_command(capfd, "import", tmp_path / "hf", *out, "--tokenizer", "none")
    given = ["--out", tmp_path / "given", "--tokenizer", life / "tokenizer"]
    run_command(capfd, "import", tmp_path / "hf", *given)

    corpus = [f"data.valid=[{{path: {life}/text}}]", "evaluate.batches=2"]
    found = run_command(capfd, "evaluate", tmp_path / "given", *corpus)
    shown = run_command(capfd, "evaluate", tmp_path / "bare", *corpus)
    assert shown.partition(": ")[2].split()[:4] == found.partition(": ")[2].split()[:4]
    assert "bits per byte" not in shown
    need = "megafrontier: tokenizer: none, need one to read and write text"
    assert refused("generate", tmp_path / "bare", "--prompt", "Der") == need
    assert refused("prepare", life / "text.txt", "--tokenizer", "none", "--out", "x") == need
    assert run_command(capfd, "generate", tmp_path / "given", "--prompt", "Der").startswith("Der")

    lines = runs.run(
        life / "config.yaml", 1, f"checkpoint.resume={tmp_path}/bare", "machine=laptop",
        "model.vocab_size=300", "model.vocab_multiple=128", "train.steps=2", "tokenizer=none",
        f"run.directory={tmp_path}/on",
    )  # fmt: skip
    assert len(runs.losses(lines)) == 2
    run_command(capfd, "export", tmp_path / "on", "--out", tmp_path / "again")
    assert not list((tmp_path / "again").glob("*token*"))
