"""The scripts' own virtual environment."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_an_environment_that_somebody_else_made_is_left_as_it_is(tmp_path: Path) -> None:
    """As one with torch for a GPU, which the pinned versions would replace."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    script = ROOT / "scripts" / "venv.sh"
    line = ["bash", "-c", f"source '{script}'; make_venv dev"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(".venv: not made by this script")
    assert not any((tmp_path / ".venv").iterdir())
