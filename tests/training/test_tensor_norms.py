"""Norms by kind and by block, the bound of logits, and losses by corpus are those of one process on
every layout."""

import shutil
from dataclasses import asdict

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config import CorpusConfig, corpus_labels
from megafrontier.parallel.mesh import Splits
from megafrontier.training.loop import train_step
from tests import runs
from tests.ranks import run_mesh

CHOSEN = (
    "log.tensor_norms=1", "optimizer.eps=1e-3", "train.micro_batch=2", "train.global_batch=8",
    "model.heads=4", "model.kv_heads=2", "model.tie_embeddings=true", "model.attention.sinks=true",
    "model.moe={experts: 4, active: 2, ffn_hidden: 16, every: 2}", "optimizer.weight_decay=0.1",
)  # fmt: skip
LAYOUTS = [
    ((2, 2, 1), Splits(tensor=2, context=2), ("partition.strategy=zero3",)),
    ((2, 2, 1), Splits(expert=2), ("partition.strategy=topo", "partition.overlap_update=true")),
    (
        (2, 2, 1),
        Splits(pipeline=2),
        (
            "parallel.schedule=zero_bubble",
            "partition.offload.optimizer=cpu",
            "train.activation_checkpointing=block",
        ),
    ),
]
METRICS = (
    "corpus_loss", "corpus_tokens", "grad_norm_kinds", "grad_norm_blocks", "update_norm_kinds",
    "update_norm_blocks",
)  # fmt: skip


def steps(folder, mesh, *chosen):
    corpora = f"data.train=[{{path: {folder}/corpus}}, {{path: {folder}/other, weight: 2}}]"
    sizes = [f"parallel.{name}={size}" for name, size in asdict(mesh.splits).items() if size > 1]
    config = runs.load(folder / "config.yaml", *CHOSEN, corpora, *sizes, *chosen)
    with runs.open_trainer(config, mesh) as trainer:
        return [train_step(trainer) for _ in range(2)]


@pytest.fixture(scope="module")
def alone(folder):
    """The steps of one process."""
    for end in ("bin", "idx"):
        shutil.copy(folder / f"corpus.{end}", folder / f"other.{end}")
    (found,) = run_mesh((1,), lambda mesh: steps(folder, mesh, "machine=laptop"))
    return found


def test_the_numbers_of_kinds_blocks_and_corpora_make_up_those_of_the_step(alone):
    first, second = alone
    assert "update_norm_kinds" not in first.metrics
    kinds = {"embedding", "matrix", "norm", "bias", "router", "expert"}
    assert first.metrics["grad_norm_kinds"].keys() == kinds
    assert [*second.metrics["update_norm_blocks"]] == ["embedding", "blocks.0", "blocks.1", "head"]
    for step in alone:
        for metric in ("grad_norm_kinds", "grad_norm_blocks"):
            squares = [value**2 for value in step.metrics[metric].values()]
            assert sum(squares) ** 0.5 == pytest.approx(step.grad_norm, rel=1e-5)
        losses, tokens = step.metrics["corpus_loss"], step.metrics["corpus_tokens"]
        assert [*losses] == ["corpus", "other"]
        assert tokens["other"] > tokens["corpus"] > 0
        assert sum(tokens.values()) == step.tokens
        total = sum(losses[name] * tokens[name] for name in losses)
        assert total == pytest.approx(step.loss * step.tokens, rel=1e-6)


@pytest.mark.parametrize(("sizes", "splits", "chosen"), LAYOUTS)
def test_every_layout_has_the_numbers_of_one_process(folder, alone, sizes, splits, chosen):
    ranks = run_mesh(sizes, lambda mesh: steps(folder, mesh, *chosen), splits=splits)
    for found in ranks:
        for step, expected in zip(found, alone, strict=True):
            for metric in METRICS:
                values = expected.metrics.get(metric, {})  # no update before the first step
                found_values = step.metrics.get(metric, {})
                assert found_values == pytest.approx(values, rel=1e-4, abs=1e-9), metric


def test_no_logit_exceeds_the_bound_and_an_update_is_the_change_of_the_masters(folder, alone):
    scores = []

    def body(mesh):
        corpora = f"data.train=[{{path: {folder}/corpus}}]"
        config = runs.load(
            folder / "config.yaml", *CHOSEN, corpora, *runs.ONE, "train.micro_batch=8"
        )
        with runs.open_trainer(config, mesh) as trainer:
            attention = trainer.model.blocks[1].attention
            project = attention._project

            def noted(*inputs):
                (query, key, value), gate = project(*inputs)
                keys = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
                logits = torch.einsum("bqhd,bkhd->bhqk", query, keys) / query.shape[-1] ** 0.5
                scores.append(logits.max().item())
                return (query, key, value), gate

            attention._project = noted
            before = [unit.master.clone() for unit in trainer.engine.units]
            first = train_step(trainer)
            after = [unit.master.clone() for unit in trainer.engine.units]
            second = train_step(trainer)
        assert "corpus_loss" not in first.metrics
        change = sum((a - b).square().sum().item() for a, b in zip(after, before, strict=True))
        return first.metrics["attention_logit_bound"], scores[0], change**0.5, second.metrics

    ((bound, largest, change, metrics),) = run_mesh((1,), body)
    assert [*bound] == ["blocks.0", "blocks.1"]
    assert largest < bound["blocks.1"] < 30 * largest
    squares = sum(value**2 for value in metrics["update_norm_kinds"].values())
    assert squares**0.5 == pytest.approx(change, rel=1e-5)


def test_corpora_are_named_by_name_by_file_or_by_path():
    corpora = [CorpusConfig("a/x"), CorpusConfig("b/x"), CorpusConfig("b/y"), CorpusConfig("b/y")]
    assert corpus_labels(corpora) == ["a/x", "b/x", "y", "y"]
    assert corpus_labels([CorpusConfig("a/x", name="web"), CorpusConfig("b/z")]) == ["web", "z"]


def test_a_negative_interval_is_refused(config_file):
    with pytest.raises(UserError, match=r"log.tensor_norms: -1, need at least 0"):
        runs.load(config_file, "log.tensor_norms=-1")
