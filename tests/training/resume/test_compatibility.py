"""A checkpoint of another model is refused, other changes since then are reported."""

import re
from dataclasses import fields, replace
from typing import get_args

import numpy as np
import pytest
import torch

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import Checkpoint
from megafrontier.checkpoint.sets import ShardSet, StoredUnit
from megafrontier.common.errors import UserError
from megafrontier.config import (
    AttentionConfig,
    Config,
    MLPConfig,
    MoEConfig,
    PredictionConfig,
    RotaryScalingConfig,
    ScalingConfig,
    config_to_dict,
)
from megafrontier.config.fields import RESUME, Resume, section_class
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.sampling.loader import Loader
from megafrontier.partition.layout import Layout
from megafrontier.training.resume.compatibility import check_model
from tests import runs
from tests.data.corpora import write_corpus


def saved_with(config, path="step-00000002"):
    """A checkpoint of which only the manifest is there."""
    layout = Layout.build("unit", [("weight", (1,))], 1)
    units = [StoredUnit.of(layout, {"weight": torch.float32})]
    manifest = Manifest(2, 0, config_to_dict(config), sets=[ShardSet("", 1, units)])
    return Checkpoint(path, manifest)


OTHER_MODEL = {
    "layers": 3,
    "hidden": 48,
    "heads": 4,
    "kv_heads": 1,
    "head_size": 8,
    "ffn_hidden": 48,
    "sequence_length": 8,
    "vocab_size": 258,
    "norm": "layernorm",
    "norm_eps": 1e-3,
    "activation": "gelu",
    "position": "learned",
    "rotary_fraction": 0.5,
    "parallel_residual": True,
    "tie_embeddings": True,
    "bias": True,
    "qkv_bias": True,
    "qk_norm": "head",
    "norm_position": "both",
    "norm_unit_offset": True,
    "norm_bias": False,
    "scale_embedding": True,
    "logit_softcap": 30.0,
    "attention": AttentionConfig(window=7),
    "mlp": MLPConfig(bias=True),
    "moe": MoEConfig(),
    "scaling": ScalingConfig(base_hidden=24, base_layers=1),
    "prediction": PredictionConfig(),
}
ALLOWED = {
    "vocab_multiple": 8,
    "rotary_base": 5e5,
    "rotary_scaling": RotaryScalingConfig(2.0, original_length=16),
    "dropout": 0.5,
    "init": "neox",
    "init_std": 0.1,
}


def test_every_key_of_the_model_is_compared_unless_it_is_listed(config_file):
    """A key that is new has to be added here: to those that are refused, or on purpose to those
    that are not."""
    config = runs.load(config_file)
    saved = saved_with(config)
    assert {field.name for field in fields(config.model)} == {*OTHER_MODEL, *ALLOWED}
    for key, value in OTHER_MODEL.items():
        # With rotary positions, a model computes the same for other lengths.
        base = replace(config.model, position="learned") if key == "sequence_length" else None
        checkpoint = saved_with(replace(config, model=base)) if base else saved
        with pytest.raises(
            UserError, match=r"model\.[\w.]+: .*, but step-00000002 was trained with "
        ):
            check_model(replace(base or config.model, **{key: value}), checkpoint)
    for key, value in ALLOWED.items():
        check_model(replace(config.model, **{key: value}), saved)


MARKED = {
    "samples": ("run.seed", "model.sequence_length", "data.split", "data.document_mask",
                "data.packing"),
    "batch": ("train.global_batch", "train.batch_warmup"),
    "warn": ("model.rotary_base", "model.rotary_scaling"),
    "ignore": ("model.vocab_multiple", "model.init", "model.init_std"),
    "report": ("model.dropout", "model.moe.balance", "model.moe.bias_rate",
               "model.moe.loss_coefficient", "model.moe.z_loss", "model.prediction.coefficient",
               "train.steps", "train.precision", "train.linear_precision", "train.clip_grad_norm",
               "train.z_loss", "train.spike_loss", "train.spike_grad_norm", "train.spike_window"),
}  # fmt: skip
"""The fields that have another mark than their section."""


def marks(kind, prefix="", of_section=None):
    """(key, mark, mark of its section) of all fields, in all sections."""
    for field in fields(kind):
        key, mark = f"{prefix}{field.name}", field.metadata.get(RESUME, of_section)
        yield key, mark, of_section
        if (inner := section_class(field.type)) is not None:
            yield from marks(inner, f"{key}.", mark)


def test_every_field_says_what_a_resume_does_or_has_the_mark_of_its_section():
    found = list(marks(Config))
    assert len(found) > 200
    assert {mark for _, mark, _ in found} == set(get_args(Resume))
    others = {key: mark for key, mark, section in found if section not in (None, mark)}
    assert others == {key: mark for mark, keys in MARKED.items() for key in keys}


def test_other_balance_of_experts_and_prediction_is_reported_once_on_every_layout(
    config_file, tmp_path
):
    base = "model.moe={{experts: 4, balance: {}}}"
    first = (*runs.ONE, base.format("loss"), "model.prediction={coefficient: 0.5}")
    runs.run(config_file, 1, *first, "train.stop_at=1")
    changed = ("model.moe.balance=bias", "model.moe.bias_rate=0.01", "model.moe.z_loss=0.1",
               "model.moe.loss_coefficient=0.02", "model.prediction.coefficient=0.25")  # fmt: skip
    texts = ("model.moe.balance: bias, was loss", "model.moe.bias_rate: 0.01, was 0.001",
             "model.moe.loss_coefficient: 0.02, was 0.01", "model.moe.z_loss: 0.1, was 0.0",
             "model.prediction.coefficient: 0.25, was 0.5")  # fmt: skip
    resumed = f"checkpoint.resume={tmp_path}/run"
    for ranks, layout in ((1, ("train.micro_batch=4",)), (2, ("parallel.expert=2",))):
        folder = tmp_path / f"on {ranks}"
        chosen = (*first, *changed, *layout, resumed, f"run.directory={folder}")
        runs.run(config_file, ranks, *chosen, "train.stop_at=2")
        reported = [x for x in runs.log(folder).splitlines() if ", was " in x]
        assert len(reported) == len(texts)
        for line, text in zip(reported, texts, strict=True):
            assert text in line


def test_experts_may_be_balanced_differently_but_not_be_others(config_file):
    config = runs.load(config_file, "model.moe={experts: 4, balance: loss}")
    saved = saved_with(config)
    biased = replace(config.model, moe=MoEConfig(4, balance="bias", z_loss=0.1))
    check_model(biased, saved)
    with pytest.raises(UserError, match=r"model\.moe\.balance: loss, but .* with bias, and"):
        check_model(config.model, saved_with(replace(config, model=biased)))
    with pytest.raises(UserError, match=r"model\.moe\.active: 1, but .* was trained with 2"):
        check_model(replace(config.model, moe=MoEConfig(4, 1)), saved)


def test_a_default_and_its_value_are_the_same_model(config_file):
    config = runs.load(config_file)
    check_model(replace(config.model, kv_heads=2, head_size=12), saved_with(config))


def test_a_key_that_an_older_checkpoint_lacks_has_its_default(config_file):
    config = runs.load(config_file)
    old = saved_with(config)
    del old.manifest.config["model"]["parallel_residual"]
    old.manifest.config["model"]["gone_since"] = 1
    check_model(config.model, old)
    with pytest.raises(UserError, match=r"model\.parallel_residual: True, but .* with False"):
        check_model(replace(config.model, parallel_residual=True), old)


def test_all_keys_that_differ_are_named_at_once_with_the_way_on(config_file):
    config = runs.load(config_file)
    other = replace(config.model, layers=3, hidden=48, head_size=12, moe=MoEConfig())
    with pytest.raises(UserError) as caught:
        check_model(other, saved_with(config))
    assert str(caught.value) == (
        "model.layers: 3, but step-00000002 was trained with 2; model.hidden: 48, with 24; "
        "model.moe: given, with None; need the same, or model=from_checkpoint"
    )


def test_weights_that_fit_another_model_are_refused_in_one_line(config_file, tmp_path, capfd):
    base = ("model.activation=gelu", "train.stop_at=2", f"run.directory={tmp_path}/other")
    runs.run(config_file, 1, *runs.ONE, *base)
    resumed = f"checkpoint.resume={tmp_path}/other/checkpoints/step-00000002"
    config = runs.load(config_file, *runs.ONE, resumed, "model.activation=gelu_tanh")
    assert runs.train(config, 1) == 2
    error = capfd.readouterr().err
    assert "model.activation: gelu_tanh, but " in error
    assert "step-00000002 was trained with gelu" in error
    assert error.count("\n") == 1


def test_changed_keys_are_reported_and_warnings_if_samples_are_others(
    config_file, tmp_path, imported
):
    changed = (
        "run.seed=8", "data.split=[0.8, 0.2]", "data.document_mask=true", "model.sequence_length=8",
        "train.clip_grad_norm=0.5", "model.dropout=0.5", "optimizer.betas=[0.5, 0.6]",
        "optimizer.no_decay=[norm]", "train.spike_window=7", "train.steps=9", "log.every=1",
    )  # fmt: skip
    runs.run(config_file, 1, *runs.ONE, imported, *changed, "train.stop_at=3")
    lines = runs.log(tmp_path / "run").splitlines()
    found = [line for line in lines if "warning: " in line]
    texts = (
        "run.seed: 8, was 7", "model.sequence_length: 8, was 16",
        "data.split: [0.8, 0.2], was [0.9, 0.1]", "data.document_mask: True, was False",
    )  # fmt: skip
    assert len(found) == len(texts)
    for line, text in zip(found, texts, strict=True):
        assert f"warning: {text}; samples are others from here on" in line
    reported = [line for line in lines if ", was " in line and "warning" not in line]
    texts = (
        "train.clip_grad_norm: 0.5, was 1.0", "model.dropout: 0.5, was 0.0",
        "optimizer.betas: [0.5, 0.6], was [0.9, 0.95]", "optimizer.no_decay: ['norm'], was ",
        "train.spike_window: 7, was ", "train.steps: 9, was 8",
    )  # fmt: skip
    assert len(reported) == len(texts)
    for text in texts:
        assert any(text in line for line in reported)


def test_a_corpus_of_another_size_is_a_warning(config_file, tmp_path, imported):
    """All of it is for training once validation has its own corpus. Or the corpus has grown."""
    valid = f"data.valid=[{{path: {tmp_path}/corpus}}]"
    runs.run(config_file, 1, *runs.ONE, imported, valid, "train.stop_at=3")
    warning = r"warning: data.train: windows \[(\d+)\], was \[(\d+)\]; samples are others"
    found = re.search(warning, runs.log(tmp_path / "run"))
    assert found is not None
    assert int(found[1]) * 0.9 == pytest.approx(int(found[2]), abs=1)


def test_a_corpus_made_again_with_as_many_windows_is_a_warning_if_its_ids_are_others(
    config_file, tmp_path
):
    ids = IndexedDataset(tmp_path / "corpus").tokens.astype(np.int32)
    for stop, made in enumerate((None, ids, (ids + 1) % runs.VOCABULARY), start=1):
        if made is not None:
            write_corpus(tmp_path / "corpus", [[made.tolist()]], "int32")
        runs.run(config_file, 1, *runs.ONE, f"train.stop_at={stop}")
        warning = "warning: data.train: made anew, of other ids; samples are others"
        assert (warning in runs.log(tmp_path / "run")) == (stop == 3)


@pytest.mark.parametrize(("weights", "is_warning"), [((1, 2), False), ((2, 1), True)])
def test_corpora_that_have_moved_are_the_same(config_file, tmp_path, weights, is_warning):
    write_corpus(tmp_path / "b", [[[1, 2, 3] * 200]])
    chosen = "data.train=[{{path: {}/corpus, weight: {}}}, {{path: {}/b, weight: {}}}]"
    was = chosen.format(tmp_path, 1, tmp_path, 2)
    runs.run(config_file, 1, *runs.ONE, was, "train.stop_at=2")
    (tmp_path / "scratch").mkdir()
    for path in (*tmp_path.glob("corpus.*"), *tmp_path.glob("b.*")):
        path.rename(tmp_path / "scratch" / path.name)
    now = chosen.format(tmp_path / "scratch", weights[0], tmp_path / "scratch", weights[1])
    runs.run(config_file, 1, *runs.ONE, now, "train.stop_at=3")
    assert ("warning: data.train: " in runs.log(tmp_path / "run")) == is_warning


def test_other_rotary_frequencies_are_a_warning(config_file, tmp_path, imported):
    longer = ("model.rotary_base=500000", "model.rotary_scaling={factor: 2, original_length: 16}")
    runs.run(config_file, 1, *runs.ONE, imported, *longer)
    log = runs.log(tmp_path / "run")
    assert "warning: model.rotary_base: 500000.0, was 10000.0" in log
    assert "warning: model.rotary_scaling: {'factor': 2.0, " in log
    assert "'truncate': True}, was None" in log


def test_another_global_batch_neither_repeats_nor_skips_a_sample(
    config_file, tmp_path, monkeypatch
):
    whole = Loader.step

    def step(loader, number):
        batches = whole(loader, number)
        with (tmp_path / "read").open("a") as file:
            file.writelines(
                f"{b.first_sample + i}\n" for b in batches for i in range(len(b.tokens))
            )
        return batches

    monkeypatch.setattr(Loader, "step", step)
    for stop, batch in ((3, 16), (5, 8), (6, 32)):
        runs.run(config_file, 1, *runs.ONE, f"train.stop_at={stop}", f"train.global_batch={batch}")
    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert read == list(range(3 * 16 + 2 * 8 + 32))
    assert "train.global_batch: 32, was 8" in runs.log(tmp_path / "run")
