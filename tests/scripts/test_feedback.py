"""The comparison of error feedback on a border: what it takes from a run, and what it finds."""

from pathlib import Path

from scripts.benchmarks.wire_quality.feedback import compare, load
from tests import runs


def test_the_rounding_error_of_one_micro_batch_does_not_help_another(tmp_path: Path) -> None:
    config = runs.make_config_file(tmp_path)
    runs.run(config, 1, *runs.ONE, "train.steps=2")
    _, _, row = compare(*load(tmp_path / "run", 16), ["int4"])
    name, *errors = [cell.strip() for cell in row.strip("|").split("|")]
    none, *others = [float(error.strip("%")) for error in errors]
    assert name == "int4"
    assert 0 < none < min(others)
