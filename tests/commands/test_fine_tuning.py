"""A Hugging Face model is fine-tuned by the documented commands, from an empty folder."""

import io
import re
import shutil
from pathlib import Path

import pytest
import yaml

from megafrontier.cli import main
from megafrontier.commands import convert
from megafrontier.commands.fine_tuning import write_config
from megafrontier.common.errors import UserError
from megafrontier.config import load_config
from megafrontier.config.model.gpt import ModelConfig
from megafrontier.families.hub import model_folder
from tests import runs
from tests.commands.helpers import way_to_fine_tune


def test_the_three_commands_of_the_page_train_a_model_that_then_talks(my_hf, monkeypatch, capfd):
    said = []
    for words in way_to_fine_tune():
        assert main(words) == 0
        said.append(capfd.readouterr().out)
    assert said[0] == "runs/mine/step-00000000\n"
    assert re.search(r"^trained: \d+ of \d+ tokens \(\d+%\)", said[1], re.MULTILINE)
    assert "<|im_start|>assistant\n▶4.<|im_end|>\n◀" in said[1]
    run = Path("runs/mine")
    assert "resumed from " in runs.log(run)
    losses = runs.losses(runs.metrics(run))
    assert losses[2] < losses[0]

    given = (run / "config.given.yaml").read_text()
    lines = [line for line in given.splitlines() if not re.match(r"#|\w+:$", line)]
    assert len(lines) > 20
    assert all(re.search(r"\w.*: .*  # \w", line) for line in lines)
    assert load_config(run / "config.yaml").model == load_config(run / "config.given.yaml").model
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2 + 2?\n"))
    assert main(["chat", str(run), "--max-new-tokens", "4", "--temperature", "0"]) == 0
    assert capfd.readouterr().out.endswith("\n")


def test_a_name_of_the_hub_is_imported_from_its_cache(my_hf, monkeypatch, capfd):
    hub = Path("hub").absolute()
    snapshot = hub / "models--me--tiny" / "snapshots" / "abc"
    shutil.copytree("my-hf", snapshot)
    (hub / "models--me--tiny" / "refs").mkdir()
    (hub / "models--me--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    assert model_folder("me/tiny") == snapshot
    assert model_folder("my-hf") == Path("my-hf")
    with pytest.raises(UserError, match=r"^me/other: no such folder in .*, and none in the hub: "):
        model_folder("me/other")
    assert main(["import", "me/tiny", "--out", "runs/tiny"]) == 0
    assert capfd.readouterr().out == "runs/tiny/step-00000000\n"
    assert load_config("runs/tiny/config.yaml").model.layers == 2


def test_a_config_that_is_there_is_not_replaced(my_hf, monkeypatch, capfd):
    monkeypatch.setattr(convert, "import_model", lambda _: pytest.fail("weights are read"))
    Path("config.yaml").write_text("mine")
    assert main(["import", "my-hf", "--out", "."]) == 2
    assert capfd.readouterr().err == "megafrontier: --out: ., holds a config.yaml; need another\n"


@pytest.mark.parametrize(
    ("changes", "rate", "batch", "length"),
    [
        ({"layers": 2}, 6.6e-5, (32, 4), 1024),
        ({"layers": 2, "position": "rotary", "sequence_length": 131072}, 6.6e-5, (32, 4), 2048),
        ({"layers": 32, "hidden": 4096, "heads": 32}, 7.4e-6, (64, 2), 1024),
        ({"layers": 80, "hidden": 8192, "heads": 64}, 2.5e-6, (128, 1), 1024),
    ],
)
def test_rate_batch_and_length_follow_the_model(tmp_path, changes, rate, batch, length):
    path = write_config(tmp_path / "step-00000000", ModelConfig(**changes), has_tokenizer=False)
    found = yaml.safe_load(path.read_text())
    assert float(found["optimizer"]["lr"]) == pytest.approx(rate, rel=0.05)
    assert (found["train"]["global_batch"], found["train"]["micro_batch"]) == batch
    assert found["model"]["sequence_length"] == length
    assert found["tokenizer"] == "none"
