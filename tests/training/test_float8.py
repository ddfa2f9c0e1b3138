"""Runs whose linear layers multiply in float8."""

import pytest

from megafrontier.common.errors import UserError
from megafrontier.plan import assemble
from tests import runs

SIZES = (
    "model.hidden=32", "model.ffn_hidden=64", "train.precision=bf16", "train.micro_batch=8",
    "model.attention={pattern: [delta, full], delta: {key_heads: 2, value_heads: 32, key_size: 16, "
    "value_size: 4}}",
)  # fmt: skip
FP8 = "train.linear_precision=fp8"
STEPS = ("train.steps=8", *runs.ONE)

SHORT = "train.stop_at=3"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    return runs.make_config_file(tmp_path_factory.mktemp("float8"))


@pytest.fixture(scope="module")
def run(config_file):
    """Losses and log of a run."""

    def run(name, ranks, *overrides):
        where = config_file.parent / name
        lines = runs.run(config_file, ranks, *SIZES, *overrides, f"run.directory={where}")
        return runs.losses(lines), runs.log(where)

    return run


@pytest.fixture(scope="module")
def exact(run):
    """Losses in bf16."""
    losses, log = run("exact", 1, *STEPS)
    assert "fp8" not in log
    assert losses[-1] < 0.9 * losses[0]
    return losses


def test_a_run_learns_as_in_bf16_and_repeats_its_bits(run, exact):
    losses, log = run("once", 1, *STEPS, FP8)
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.02)
    assert "linear layers: 8 in fp8; MFU is of the 16-bit peak" in log
    assert run("again", 1, *STEPS, FP8, SHORT)[0] == losses[:3]


def test_every_split_and_placement_learns_the_same(run, exact):
    splits = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.schedule=zero_bubble")
    losses, log = run("split", 4, *STEPS, FP8, *splits)
    assert "linear layers: 4 in fp8" in log
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.02)
    context = ("parallel.context=2", "partition.strategy=zero3", "model.ffn_hidden=40")
    losses, log = run("context", 2, *STEPS, SHORT, FP8, *context)
    assert "linear layers: 6 in fp8 (2 in bf16, with sizes that are no multiples of 16)" in log
    assert losses[0] == pytest.approx(exact[0], rel=0.02)


def test_without_float8_one_line_says_so_and_the_run_is_the_one_in_bf16(run, exact, monkeypatch):
    monkeypatch.setattr(assemble, "missing_float8", lambda of: "gfx90a has no float8 matrix units")
    losses, log = run("missing", 1, *STEPS, FP8, SHORT)
    assert losses == exact[:3]
    (line,) = [line for line in log.splitlines() if "fp8" in line]
    assert line.endswith(
        "warning: train.linear_precision: fp8: gfx90a has no float8 matrix units; "
        "linear layers multiply in bf16"
    )


@pytest.mark.parametrize(
    ("override", "fits"),
    [
        ("train.precision=fp32", "need null, or train.precision=bf16"),
        ("model.sequence_length=15", r"need null, or a multiple of 16 tokens a rank"),
    ],
)
def test_what_does_not_fit_is_refused(config_file, override, fits):
    with pytest.raises(UserError, match=f"train.linear_precision: fp8, {fits}"):
        runs.check(config_file, 1, *SIZES, FP8, *runs.ONE, override)
