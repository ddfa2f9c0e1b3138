"""The comparison of wires: each variant is trained once, and stands beside the exact one."""

import json
from pathlib import Path
from typing import Any

import pytest

from megafrontier.common.errors import UserError
from scripts.benchmarks.wire_quality import __main__ as wire_quality
from tests import runs

Figures = dict[str, dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.make_config_file(tmp_path)


def compared(config: Path, *overrides: str, names: str = "exact,low") -> tuple[Figures, list[str]]:
    """What the comparison wrote: the figures, and the rows of the table."""
    out = config.parent / "out"
    settings = ["train.steps=2", *overrides]
    wire_quality.compare(names.split(","), str(config), settings, out, 4)
    figures = json.loads((out / "quality.json").read_text())
    return figures, (out / "quality.md").read_text().splitlines()[2:]


def test_each_variant_stands_beside_the_exact_one(config: Path) -> None:
    figures, rows = compared(config)
    exact, low = (figures[name]["validation"] for name in ("exact", "low"))
    assert list(exact) == list(low) == ["2"]
    assert low != exact, "the variant must have had wires of its own"
    learned = {name: figures[name]["training"] for name in ("exact", "low")}
    above, trained_above = low["2"] / exact["2"] - 1, learned["low"] / learned["exact"] - 1
    assert rows == [
        f"| exact | {exact['2']:.4f} | +0.00% | {learned['exact']:.4f} | +0.00% |",
        f"| low | {low['2']:.4f} | {above:+.2%} | {learned['low']:.4f} | {trained_above:+.2%} |",
    ]
    for picture in ("differences.png", "loss.png"):
        assert (config.parent / "out" / picture).is_file()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("low", "--variants: low, need exact, and others of exact, "),
        ("exact,lower", "--variants: exact,lower, need exact"),
    ],
)
def test_what_cannot_be_compared_is_refused(config: Path, names: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        compared(config, names=names)
    assert not (config.parent / "out").exists()
