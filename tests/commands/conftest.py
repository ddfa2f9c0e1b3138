"""One run for all tests of the commands, trained on real text with a real tokenizer."""

from pathlib import Path

import pytest

from megafrontier.cli import main
from megafrontier.data.text.prepare import prepare
from megafrontier.families.hf_io import export_model
from tests import runs
from tests.data.text import test_chats
from tests.model.small_models import SHAPES, filled, small_config

TEXT = "Der Fluß ist breit, 3 € sind viel; a stitch in time saves nine.\n" * 60


@pytest.fixture(scope="session")
def life(tmp_path_factory):
    """A config whose run has been trained on real text with a real tokenizer."""
    folder = tmp_path_factory.mktemp("life")
    (folder / "text.txt").write_text(TEXT)
    main(["tokenizer", str(folder / "text.txt"), "--vocab-size", "300", "--out",
          str(folder / "tokenizer")])  # fmt: skip
    prepare([str(folder / "text.txt")], str(folder / "tokenizer"), str(folder / "text"), 1)
    path = folder / "config.yaml"
    runs.make_config_file(folder)
    text = path.read_text().replace(f"{folder}/corpus", f"{folder}/text")
    path.write_text(text.replace("tokenizer: bytes", f"tokenizer: {folder}/tokenizer"))
    chosen = ("model.vocab_size=300", "train.steps=30", "train.micro_batch=4",
              "data.split=[0.8,0.2]", "evaluate.batches=2")  # fmt: skip
    runs.run(path, 4, *chosen)
    return folder


folder = test_chats.folder


@pytest.fixture
def my_hf(folder, tmp_path, monkeypatch):
    """The folder my-hf in an empty working directory: a model whose tokenizer has a template of
    chats."""
    tokenizer = test_chats.with_template(folder, test_chats.CHATML)
    config = small_config(**SHAPES["llama"], sequence_length=96, vocab_size=280)
    monkeypatch.chdir(tmp_path)
    export_model(config, filled(config).state_dict(), Path("my-hf"), tokenizer)
