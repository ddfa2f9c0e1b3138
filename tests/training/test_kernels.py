"""A run says what it computes with, and goes on without a compiler."""

import pytest
import torch
from torch._inductor import config as inductor

from megafrontier.common.errors import UserError
from megafrontier.launch.main import train as train_config
from megafrontier.model.kernels import backends
from megafrontier.model.recompute import compile
from megafrontier.training.device import check_caches
from tests import runs


@pytest.fixture
def train(tmp_path):
    """Losses of a run of 2 ranks, and the lines of its log that are about kernels."""
    path = runs.make_config_file(tmp_path)

    def run(name: str, *overrides: str) -> tuple[list[float], list[str]]:
        chosen = ("train.steps=3", "train.micro_batch=8")
        where = ("machine.levels.node.size=1", f"run.directory={tmp_path}/{name}")
        lines = runs.run(path, 2, *where, *chosen, *overrides)
        log = runs.log(tmp_path / name).splitlines()
        return runs.losses(lines), [line for line in log if "blocks" in line]

    return run


def test_without_a_compiler_one_line_says_so_and_the_blocks_run_as_they_are(train):
    plain, said = train("plain", "model.dropout=0.1")
    assert said == ["attention: math; blocks: not compiled"]
    with inductor.patch("cpp.cxx", ("no-such-compiler",)):
        found, said = train("asked", "model.dropout=0.1", "train.compile=true")
    assert found == plain
    assert said == [
        "warning: train.compile: no working C++ compiler (CXX or g++); the blocks run uncompiled",
        "attention: math; blocks: not compiled",
    ]


def test_a_kernel_for_documents_that_the_compiler_would_refuse_runs_uncompiled(train, monkeypatch):
    monkeypatch.setattr(backends, "returns_traced_shape", lambda *_: False)
    _, said = train("asked", "train.compile=true", "data.document_mask=true")
    assert said == [
        "warning: train.compile: this GPU's attention within documents (data.document_mask) is of "
        "another shape; the blocks run uncompiled",
        "attention: varlen flash; blocks: not compiled",
    ]


def test_a_compiled_run_with_documents_has_the_losses_of_the_plain_one(train, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    plain, _ = train("plain", "data.document_mask=true")
    chosen = ("data.document_mask=true", "train.compile=true")
    found, said = train("compiled", *chosen, "train.activation_checkpointing=selective")
    assert found == pytest.approx(plain, rel=1e-5)
    assert said == ["attention: varlen flash; blocks: compiled"]


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_folder_in_which_compilers_cannot_write_is_named_before_the_run_starts(
    name, tmp_path, monkeypatch
):
    config = runs.make_config_file(tmp_path)
    (tmp_path / "taken").touch()
    monkeypatch.setenv(name, f"{tmp_path}/taken/cache")
    check_caches(runs.load(config))  # who compiles nothing needs none
    with pytest.raises(UserError, match=f"{name}: {tmp_path}/taken/cache: Not a directory, need"):
        train_config(runs.load(config, "train.compile=true"), 4)
    assert not (tmp_path / "run").exists()
