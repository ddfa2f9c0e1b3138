"""`model: from_checkpoint` takes the model of the checkpoint that the run begins with."""

import json
from dataclasses import asdict, replace

import pytest

from megafrontier.common.checkpoints import MANIFEST, checkpoints_of, step_folder
from megafrontier.config import AttentionConfig, ModelConfig, load_config
from tests.config.conftest import refusal

SAVED = ModelConfig(layers=3, hidden=48, heads=3, attention=AttentionConfig(window=5))


@pytest.fixture
def save(tmp_path):
    """Write a manifest of a step that says no more than the config."""

    def write(folder, model, step=0):
        path = step_folder(tmp_path / folder, step)
        path.mkdir(parents=True)
        (path / MANIFEST).write_text(json.dumps({"config": {"model": model}}))
        return path

    return write


def test_the_model_is_the_checkpoints_and_keys_beside_it_and_after_it_change_it(save, write):
    save("base", asdict(SAVED) | {"gone_since": 1})
    base = save("base", asdict(replace(SAVED, layers=4)), 7)
    text = "model: {preset: from_checkpoint, attention: {sinks: true}}"
    words = [f"checkpoint.resume={base.parent}", "model.sequence_length=64"]
    found = load_config(write("run.yaml", text), words).model
    expected = replace(SAVED, layers=4, sequence_length=64)
    assert found == replace(expected, attention=AttentionConfig(window=5, sinks=True))
    older = ["model=from_checkpoint", f"checkpoint.resume={step_folder(base.parent, 0)}"]
    plain = write("plain.yaml", "model: {layers: 9, dropout: 0.5}")
    assert load_config(plain, older).model == SAVED
    assert load_config(plain, [*older, "model.preset=gpt2"]).model.layers == 12


def test_a_run_with_checkpoints_of_its_own_has_their_model_wherever_it_began(save, write, tmp_path):
    save(checkpoints_of("run"), asdict(SAVED))
    words = [f"run.directory={tmp_path}/run", "checkpoint.resume=/gone"]
    path = write("run.yaml", "model: from_checkpoint")
    assert load_config(path, words).model == SAVED
    assert load_config(path, words[:1]).model == SAVED


def test_without_a_checkpoint_that_has_a_model_the_line_says_what_is_missing(save, write):
    path = write("run.yaml", "model: from_checkpoint")
    assert refusal(load_config, path) == (
        "model: from_checkpoint, but checkpoint.resume is auto and runs/run has no checkpoints; "
        "need the path of a checkpoint in checkpoint.resume"
    )
    assert refusal(load_config, path, ["checkpoint.resume=/gone"]).startswith(
        "checkpoint.resume: /gone: no such folder"
    )
    empty = save("empty", None)
    line = refusal(load_config, path, [f"checkpoint.resume={empty}"])
    assert line.startswith(f"model: from_checkpoint, but the checkpoint is {empty}, which does not")
    (empty / MANIFEST).write_text("{")
    assert "not sound" in refusal(load_config, path, [f"checkpoint.resume={empty}"])


def test_an_error_of_the_command_line_is_not_blamed_on_the_file(save, write):
    base = save("base", asdict(SAVED))
    path = write("run.yaml", "model: from_checkpoint")
    line = refusal(load_config, path, [f"checkpoint.resume={base}", "train.steps=x"])
    assert line == "train.steps: x, need an integer"
