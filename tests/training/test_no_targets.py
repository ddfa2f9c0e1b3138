"""Batches in which no token has a target: of documents of one token, say, with a document mask."""

import pytest

from megafrontier.cli import main
from tests import runs
from tests.data.corpora import write_corpus

MASK = ("machine=laptop", "data.document_mask=true", "log.every=1")


@pytest.fixture
def ones(tmp_path):
    """A corpus of documents of one token."""
    return write_corpus(tmp_path / "ones", [[[i % 61]] for i in range(400)])


def test_a_step_without_a_target_is_skipped_and_counted(config_file, tmp_path):
    """Eight windows of documents of one token, and eight of one long document."""
    documents = [[[i % 61]] for i in range(128)] + [[[i % 61 for i in range(129)]]]
    path = write_corpus(tmp_path / "half", documents)
    chosen = ("train.global_batch=1", "train.steps=16", "data.split=[1,0]", "evaluate.batches=0")
    nonfinite = "train.nonfinite_limit=1"  # they are none
    lines = runs.run(config_file, 1, *MASK, *chosen, nonfinite, f"data.train=[{{path: {path}}}]")
    skipped = [line for line in lines if line.get("skipped")]
    assert len(lines) == 16
    assert len(skipped) == 8
    assert [line["loss"] for line in skipped] == [None] * 8
    assert all(line["loss"] > 0 for line in lines if line not in skipped)
    assert lines[-1]["tokens"] == 8 * 16
    log = runs.log(tmp_path / "run")
    assert log.count("skipped: no token has a target") == 8
    assert "loss 0.000" not in log


def test_the_loss_scale_learns_nothing_from_a_step_without_a_target(config_file, ones):
    chosen = ("train.steps=2", "train.precision=fp16", "train.loss_scale=1024", "data.split=[1,0]")
    corpus = f"data.train=[{{path: {ones}}}]"
    lines = runs.run(config_file, 1, *MASK, *chosen, corpus, "evaluate.batches=0")
    assert [line["loss_scale"] for line in lines] == [1024, 1024]


def test_an_evaluation_without_a_target_has_no_loss(config_file, tmp_path, ones, capfd):
    valid = f"data.valid=[{{path: {ones}}}]"
    lines = runs.run(config_file, 2, *MASK, "train.steps=2", valid)
    assert runs.valid_losses(lines) == []
    said = "nothing to evaluate: evaluate.batches: 1, no token in them has a target"
    assert f"step 2: {said}" in runs.log(tmp_path / "run")
    capfd.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), valid, "--nproc", "2"]) == 2
    told = capfd.readouterr()
    assert told.out == ""
    need = "need documents of 2 tokens or more"
    assert told.err == f"megafrontier: {said.partition(': ')[2]}; {need}\n"
