"""Blocks are divided so that the slowest stage is as fast as it can be."""

from itertools import combinations

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig, MoEConfig, PredictionConfig
from megafrontier.model.flops import flops_per_token
from megafrontier.pipeline.balance import (
    balanced_layers,
    block_flops,
    describe_pipeline,
    head_flops,
    stage_costs,
)
from megafrontier.pipeline.simulate import StageCosts


def model(**keys):
    return ModelConfig(hidden=64, heads=2, sequence_length=32, **keys)


def largest(config, layers):
    return max(costs.forward for costs in stage_costs(config, layers))


def test_the_costs_of_blocks_and_head_are_the_flops_of_the_model():
    for config in (
        model(layers=3, vocab_size=512),
        model(layers=3, vocab_size=512, tie_embeddings=True),
        model(layers=4, vocab_size=512, moe=MoEConfig(experts=4, active=2, every=2)),
        model(
            layers=3,
            vocab_size=512,
            position="rotary",
            prediction=PredictionConfig(),
            moe=MoEConfig(experts=4, active=2),
        ),
    ):
        total = sum(block_flops(config)) + head_flops(config)
        assert total == pytest.approx(flops_per_token(config))


def test_the_backward_of_weights_costs_what_the_matrices_of_blocks_do():
    config = model(layers=4, vocab_size=512)
    first, last = stage_costs(config, (2, 2))
    assert first.backward == pytest.approx(2 * first.forward)
    matrices = 12 * 64**2  # of a block
    assert first.backward_weight == last.backward_weight == 2 * 2 * matrices
    assert last.backward_input - first.backward_input > head_flops(config) / 2
    predicting = model(layers=4, vocab_size=512, prediction=PredictionConfig())
    _, last = stage_costs(predicting, (2, 2))
    assert last.backward_weight == 2 * (2 * matrices + matrices + 2 * 64**2)


def test_no_other_division_has_a_faster_slowest_stage():
    for vocab_size in (512, 5000):
        for layers in (5, 8):
            moe = MoEConfig(experts=4, active=2, every=2)
            for config in (
                model(layers=layers, vocab_size=vocab_size),
                model(layers=layers, vocab_size=vocab_size, moe=moe),
            ):
                for stages in (1, 2, 3, 5):
                    found = balanced_layers(config, stages)
                    assert sum(found) == layers
                    assert min(found) >= 1
                    others = (
                        tuple(b - a for a, b in zip((0, *cut), (*cut, layers), strict=True))
                        for cut in combinations(range(1, layers), stages - 1)
                    )
                    fastest = min(largest(config, other) for other in others)
                    assert largest(config, found) == pytest.approx(fastest)


def test_a_head_as_expensive_as_blocks_takes_their_place_in_the_last_stage():
    assert balanced_layers(model(layers=12, vocab_size=64), 4) == (3, 3, 3, 3)
    wide = model(layers=12, vocab_size=8192)
    assert head_flops(wide) > 2 * block_flops(wide)[0]
    *_, last = balanced_layers(wide, 4)
    assert last == 1


def test_the_first_and_the_last_stage_have_the_fewer_blocks():
    assert balanced_layers(model(layers=14, vocab_size=64), 4) == (3, 4, 4, 3)


def test_fewer_blocks_than_stages_are_refused():
    with pytest.raises(UserError, match=r"model\.layers: 3, need at least 4, one block for each"):
        balanced_layers(model(layers=3), 4)


def test_the_line_of_a_pipeline_has_its_bubble_and_warns_of_too_few_micro_batches():
    even = [StageCosts(1.0, 1.0, 1.0)] * 4
    line = describe_pipeline("1f1b", 4, 1, 8, even)
    assert line == "pipeline: 4 stages, 1f1b, 8 micro-batches: bubble 27%"
    assert describe_pipeline("zero_bubble", 2, 2, 8, even).endswith(
        "4 stages on 2 ranks, zero_bubble, 8 micro-batches: bubble 2%"
    )
    assert describe_pipeline("1f1b", 4, 1, 2, even).startswith("warning: pipeline: 4 stages")
    # A stage twice as slow makes all others wait.
    slow = [*even[:3], StageCosts(2.0, 2.0, 2.0)]
    assert describe_pipeline("1f1b", 4, 1, 8, slow).endswith("bubble 47%")
