"""Scores of rows of tokens with every split are those of one whole model."""

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.evaluation.rows import Row, RowScorer
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.plan.resolve import resolve_plan
from tests import runs
from tests.ranks import make_levels, run_mesh

ROWS = [
    Row([(7 * i + j) % 257 for j in range(2 + i % 16)], 1 + i % (1 + i % 16)) for i in range(21)
]
"""Of 2 to 17 tokens, the most that fit."""
MOE = ("model.moe={experts: 4, active: 2, ffn_hidden: 16}",)


def expected(config):
    model = GPT(config.model)
    initialise(model, config.run.seed)
    model.eval()
    for row in ROWS:
        ids = torch.tensor(row.ids)
        with torch.no_grad():
            logits = model(ids[None, :-1])[0, -row.scored :]
        targets = ids[-row.scored :]
        found = -torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        yield found, bool((logits.argmax(-1) == targets).all()), logits.argmax(-1)[-1].item()


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        ((2, 2), ["parallel.tensor=2", "parallel.context=2", "model.logit_softcap=0.2"]),
        ((2, 2), ["parallel.pipeline=2", "model.tie_embeddings=true"]),
        ((2, 2), ["parallel.expert=2", "parallel.tensor=2", *MOE]),
        ((1,), ["data.document_mask=true", "train.micro_batch=8"]),
    ],
)
def test_scores_of_rows_are_those_of_one_model(config_file, sizes, overrides):
    names = make_levels(sizes).names
    levels = "{" + ", ".join(f"{n}: {{size: {s}}}" for n, s in zip(names, sizes, strict=True)) + "}"
    config = runs.load(config_file, *overrides, f"machine={{levels: {levels}}}")

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            scorer = RowScorer(trainer.runner, mesh, 16, config.train.micro_batch)
            found = scorer.run(lambda: scorer.score(ROWS))
            assert trainer.model.training
            with pytest.raises(UserError, match="asked"):
                scorer.run(lambda: refuse(scorer))
            return found

    splits = resolve_plan(config, make_levels(sizes).ranks).shape.splits
    first, *others = run_mesh(sizes, body, splits=splits)
    assert others == [None] * len(others)
    for row, score, one in zip(ROWS, first, expected(config), strict=True):
        log_probability, is_greedy, likeliest = one
        assert score.log_probability == pytest.approx(log_probability, abs=2e-5)
        assert score.is_greedy == is_greedy
        assert row.scored > 1 or score.likeliest == likeliest


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [((2, 2), ["parallel.expert=2", *MOE]), ((1,), ["train.micro_batch=8", "model.kv_heads=1"])],
)
def test_continuations_with_a_cache_are_those_of_one_model(config_file, sizes, overrides):
    config = runs.load(config_file, *overrides, "machine=laptop")
    contexts, most = [row.ids[:-1] for row in ROWS], [1 + i % 4 for i in range(len(ROWS))]

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            scorer, found = RowScorer(trainer.runner, mesh, 16, config.train.micro_batch), {}

            def add(i, token):
                new = found.setdefault(i, [])
                new.append(token)
                return len(new) < most[i] and len(contexts[i]) + len(new) <= 16

            assert scorer.has_cache
            scorer.run(lambda: scorer.extend(contexts, add))
            return found

    splits = resolve_plan(config, make_levels(sizes).ranks).shape.splits
    first, *others = run_mesh(sizes, body, splits=splits)
    assert others == [{}] * len(others)
    model = GPT(config.model)
    initialise(model, config.run.seed)
    model.eval()
    for i, context in enumerate(contexts):
        text = list(context)
        for token in first[i]:
            with torch.no_grad():
                assert model(torch.tensor([text]))[0, -1].argmax() == token
            text.append(token)
        assert len(first[i]) == min(most[i], 17 - len(context))


def refuse(scorer):
    scorer.score(ROWS[:1])
    raise UserError("asked for by a task")
