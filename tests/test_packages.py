"""The library needs the base packages alone; a command names the extra with what it lacks."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import TRAIN_PACKAGES, UserError
from megafrontier.launch.main import load_or_refuse

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LIBRARY = """
import torch, megafrontier
mesh = megafrontier.init_mesh({"levels": {"world": {}}})
model = megafrontier.shard(torch.nn.Linear(4, 1), mesh)
optimizer = megafrontier.AdamW(model, lr=0.1)
for _ in range(2):
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
megafrontier.save(model, optimizer, "saved", 2)
assert megafrontier.load(model, optimizer, "saved") == 2
"""
COMMANDS = """
from megafrontier.cli import main
codes = [main(line.split()) for line in (
    "prepare rows.parquet --tokenizer bytes --out out --workers 1",
    "prepare text.txt.zst --tokenizer bytes --out out --workers 1",
    "prepare text.txt --tokenizer folder --out out --workers 1",
    "prepare text.txt --tokenizer some.model --out out --workers 1",
)]
assert codes == [2, 2, 2, 2], codes
"""


def names(requirements):
    return {re.match(r"[\w-]+", line)[0].lower() for line in requirements}


def run_without_extras(code, folder):
    """Run code in `folder`, where no package of an extra can be imported."""
    absent = set.union(*map(names, EXTRAS.values())) | TRAIN_PACKAGES | {"google.protobuf"}
    absent -= {"megafrontier", *names(PROJECT["dependencies"])}
    hook = f"import sys\nsys.modules.update(dict.fromkeys({sorted(absent)}))\n"
    line = [sys.executable, "-c", hook + code]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def test_the_library_trains_saves_and_loads_with_the_base_packages_alone(tmp_path):
    done = run_without_extras(LIBRARY, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_command_names_the_extra_of_a_package_that_is_missing(tmp_path):
    for name in ("rows.parquet", "text.txt.zst", "text.txt", "some.model"):
        (tmp_path / name).write_bytes(b"PAR1")
    (tmp_path / "folder").mkdir()
    done = run_without_extras(COMMANDS, tmp_path)
    assert done.returncode == 0, done.stderr
    need = "not installed, need pip install 'megafrontier[train]'"
    missing = ("pyarrow", "zstandard", "transformers", "sentencepiece")
    assert done.stderr.splitlines() == [f"megafrontier: {name}: {need}" for name in missing]


def test_a_rank_that_lacks_a_package_refuses_with_that_line():
    def make():
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers.utils")

    with pytest.raises(UserError, match="transformers: not installed, need pip install"):
        load_or_refuse(make, nproc=None)


def test_the_extra_has_the_packages_that_are_named():
    # Only transformers and sentencepiece import protobuf.
    assert names(EXTRAS["train"]) == TRAIN_PACKAGES | {"protobuf"}


def test_a_module_that_no_extra_has_is_a_bug_and_keeps_its_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, "megafrontier.config.shipped", None)
    with pytest.raises(ModuleNotFoundError, match=r"megafrontier\.config\.shipped"):
        main(["configs"])
