"""A checkpoint of another model is refused, one of other data or another batch is told."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from megafrontier.checkpoint.format import FILE_NAME
from megafrontier.checkpoint.load import read_manifest
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.sampling.loader import Loader
from megafrontier.training.resume.compatibility import corpus_changes
from tests import runs
from tests.data.corpora import write_corpus


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("model.heads=4", "model.heads: 4, but "),
        ("model.hidden=64", "model.hidden: 64, but "),
        ("model.vocab_size=258", "model.vocab_size: 258, but "),
        ("model.norm_eps=1e-3", "model.norm_eps: 0.001, but "),
        ("model.parallel_residual=true", "model.parallel_residual: True, but "),
        ("model.rotary_fraction=0.5", "model.rotary_fraction: 0.5, but "),
    ],
)
def test_weights_that_fit_a_model_of_another_function_are_refused(
    config_file, imported, capfd, changed, said
):
    assert runs.train(runs.load(config_file, *runs.ONE, imported, changed), 1) == 2
    error = capfd.readouterr().err
    assert said in error
    assert "was trained with " in error
    assert error.count("\n") == 1


def test_the_other_gelu_is_another_function(config_file, tmp_path, capfd):
    """Its weights have the same shapes."""
    base = ("model.activation=gelu", "train.stop_at=2", f"run.directory={tmp_path}/other")
    runs.run(config_file, 1, *runs.ONE, *base)
    resumed = f"checkpoint.resume={tmp_path}/other/checkpoints/step-00000002"
    config = runs.load(config_file, *runs.ONE, resumed, "model.activation=gelu_tanh")
    assert runs.train(config, 1) == 2
    assert "model.activation: gelu_tanh, but " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("run.seed=8", "run.seed: 8, was 7"),
        ("data.split=[0.8, 0.2]", "data.split: [0.8, 0.2], was [0.9, 0.1]"),
        ("data.document_mask=true", "data.document_mask: True, was False"),
        ("model.sequence_length=8", "model.sequence_length: 8, was 16"),
    ],
)
def test_other_data_under_the_same_numbers_are_told(config_file, tmp_path, imported, changed, said):
    runs.run(config_file, 1, *runs.ONE, imported, changed, "train.stop_at=3")
    warning = f"warning: {said}; samples are others from here on"
    assert runs.log(tmp_path / "run").count("warning: ") == 1
    assert warning in runs.log(tmp_path / "run")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("train.clip_grad_norm=0.5", "train.clip_grad_norm: 0.5, was 1.0"),
        ("optimizer.betas=[0.5, 0.6]", "optimizer.betas: [0.5, 0.6], was [0.9, 0.95]"),
        ("optimizer.no_decay=[norm]", "optimizer.no_decay: ['norm'], was "),
        ("train.spike_window=7", "train.spike_window: 7, was "),
        ("model.dropout=0.5", "model.dropout: 0.5, was 0.0"),
        ("log.every=1", None),
    ],
)
def test_what_trains_otherwise_unseen_is_told(config_file, tmp_path, imported, changed, said):
    runs.run(config_file, 1, *runs.ONE, imported, changed, "train.stop_at=3")
    told = [line for line in runs.log(tmp_path / "run").splitlines() if ", was " in line]
    assert [said in line for line in told] == [True] * (said is not None)


def test_a_corpus_of_another_size_is_told(config_file, tmp_path, imported):
    """All of it is for training once validation has a corpus of its own; or it was made anew."""
    valid = f"data.valid=[{{path: {tmp_path}/corpus}}]"
    runs.run(config_file, 1, *runs.ONE, imported, valid, "train.stop_at=3")
    warning = r"warning: data.train: (\d+) windows, was (\d+); samples are others from here on"
    found = re.search(warning, runs.log(tmp_path / "run"))
    assert found is not None
    assert int(found[1]) * 0.9 == pytest.approx(int(found[2]), abs=1)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ([7, 3], None),
        ([4, 6], "data.train: 7 windows, was 4 (and 1 more corpora)"),
        ([7, 5], "data.train: 3 windows, was 5"),
        (10, None),  # of an older version: of both together
        (11, "data.train: 10 windows, was 11"),
    ],
)
def test_text_moved_from_one_corpus_to_another_is_told(before, said):
    trainer = SimpleNamespace(loader=SimpleNamespace(samples=SimpleNamespace(windows=[7, 3])))
    found = corpus_changes(trainer, SimpleNamespace(extra={"windows": before}))
    assert found == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("remake", "is_told"),
    [
        (lambda ids: (ids + 1) % runs.VOCABULARY, True),  # by another tokenizer, say
        (lambda ids: np.roll(ids, 1), True),  # of texts in another order
        (lambda ids: ids.astype(np.int32), False),  # the same, written by other code
    ],
)
def test_a_corpus_made_anew_with_as_many_windows_is_told(config_file, tmp_path, remake, is_told):
    runs.run(config_file, 1, *runs.ONE, "train.stop_at=2")
    ids = remake(IndexedDataset(tmp_path / "corpus").tokens)
    write_corpus(tmp_path / "corpus", [[ids.tolist()]], str(ids.dtype))
    runs.run(config_file, 1, *runs.ONE, "train.stop_at=3")
    warning = f"warning: data.train: {tmp_path}/corpus: made anew, of other ids; samples are others"
    assert (warning in runs.log(tmp_path / "run")) == is_told


@pytest.mark.parametrize(("weights", "is_told"), [((1, 2), False), ((2, 1), True)])
def test_corpora_that_have_moved_are_the_same(config_file, tmp_path, weights, is_told):
    write_corpus(tmp_path / "b", [[[1, 2, 3] * 200]])
    chosen = "data.train=[{{path: {}/corpus, weight: {}}}, {{path: {}/b, weight: {}}}]"
    was = chosen.format(tmp_path, 1, tmp_path, 2)
    runs.run(config_file, 1, *runs.ONE, was, "train.stop_at=2")
    (tmp_path / "scratch").mkdir()
    for path in (*tmp_path.glob("corpus.*"), *tmp_path.glob("b.*")):
        path.rename(tmp_path / "scratch" / path.name)
    now = chosen.format(tmp_path / "scratch", weights[0], tmp_path / "scratch", weights[1])
    runs.run(config_file, 1, *runs.ONE, now, "train.stop_at=3")
    assert ("warning: data.train: " in runs.log(tmp_path / "run")) == is_told


def test_a_checkpoint_from_before_contents_were_kept_says_nothing_of_them():
    loader = SimpleNamespace(samples=SimpleNamespace(windows=[7]))
    trainer = SimpleNamespace(loader=loader, is_first=True)
    assert not corpus_changes(trainer, SimpleNamespace(extra={"windows": [7]}))


def test_other_rotary_frequencies_may_be_meant_and_are_told(config_file, tmp_path, imported):
    longer = ("model.rotary_base=500000", "model.rotary_scaling={factor: 2, original_length: 16}")
    runs.run(config_file, 1, *runs.ONE, imported, *longer)
    told = runs.log(tmp_path / "run")
    assert "warning: model.rotary_base: 500000.0, was 10000.0" in told
    assert "warning: model.rotary_scaling: {'factor': 2.0, " in told
    assert "'original_length': 16}, was None" in told


def test_a_schedule_that_goes_on_at_another_rate_is_told(config_file, tmp_path, imported):
    """More steps stretch it, though it is alike within the warm-up; the same ones say nothing."""
    runs.run(config_file, 1, *runs.ONE, imported, "train.steps=80", "train.stop_at=3")
    runs.run(config_file, 1, *runs.ONE, "train.steps=80", "train.stop_at=4")
    runs.run(config_file, 1, *runs.ONE, "train.steps=8", "train.stop_at=5")
    pattern = r"learning rate: (\S+) from (\S+).* on, would have been (\S+)"
    said = re.findall(pattern, runs.log(tmp_path / "run"))
    assert [(start, float(now) < float(before)) for now, start, before in said] == [
        ("about", False),
        ("here", True),
    ]


@pytest.mark.parametrize("keeps_position", [True, False])
def test_another_global_batch_neither_repeats_nor_skips_a_sample(
    config_file, tmp_path, monkeypatch, keeps_position
):
    """Also after a checkpoint from before they held the position."""
    whole = Loader.step

    def step(loader, number):
        batches = whole(loader, number)
        with (tmp_path / "read").open("a") as file:
            file.writelines(
                f"{b.first_sample + i}\n" for b in batches for i in range(len(b.tokens))
            )
        return batches

    monkeypatch.setattr(Loader, "step", step)
    batches = ((3, 16), (5, 8), (6, 32)) if keeps_position else ((3, 16), (6, 32))
    for stop, batch in batches:
        runs.run(config_file, 1, *runs.ONE, f"train.stop_at={stop}", f"train.global_batch={batch}")
        if not keeps_position and stop == 3:
            forget_position(tmp_path / "run" / "checkpoints" / "step-00000003")
    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert read == list(range(3 * 16 + (2 * 8 + 32 if keeps_position else 3 * 32)))
    before, sample = (8, 64) if keeps_position else (16, 48)
    said = f"train.global_batch: 32, was {before}; the data go on at sample {sample}"
    assert said in runs.log(tmp_path / "run")


def forget_position(path):
    manifest = read_manifest(path)
    del manifest.extra["data"]
    (path / FILE_NAME).write_bytes(manifest.encode())
