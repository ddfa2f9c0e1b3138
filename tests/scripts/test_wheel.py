"""A wheel holds all that the commands need, and finds it from any folder."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megafrontier.cli import main

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; from megafrontier.cli import main; sys.exit(main(sys.argv[1:]))"
LOAD = "from megafrontier.config import *; print(load_machine(load_config('gpt-1.3b').machine))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built without network from a copy of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("megafrontier", "configs", "slurm"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    build += ["--disable-pip-version-check", "--quiet", "-w", str(folder), str(source)]
    subprocess.run(build, check=True)
    return next(folder.glob("*.whl"))


def test_a_wheel_has_all_modules_configs_machines_and_slurm_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    shared = {name.partition("/data/share/megafrontier/")[2] for name in names}
    for folder in ("configs", "slurm"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"]
        assert {str(path.relative_to(ROOT)) for path in files} <= shared
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "megafrontier").rglob("*.py")}
    assert modules | {"megafrontier/py.typed"} <= set(names)
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


def test_an_installed_wheel_finds_its_files_from_any_folder(wheel, tmp_path):
    """Laid out as pip does it in a virtual environment."""
    site = tmp_path / "env" / "lib" / "python3" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    data = next(site.glob("*.data")) / "data" / "share"
    data.rename(tmp_path / "env" / "share")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(code, *words):
        environment = {**os.environ, "PYTHONPATH": str(site)}
        line = [sys.executable, "-c", code, *words]
        return subprocess.check_output(line, cwd=elsewhere, env=environment, text=True)

    listed = run(COMMAND, "configs")
    assert re.search(
        r"^gpt-1.3b +GPT-3 XL on 2 nodes: as gpt-125m, with 1M tokens a step$", listed, re.M
    )
    assert "machines/frontier " in listed
    assert run(COMMAND, "configs", "--copy", "slurm") == "slurm\n"
    assert (elsewhere / "slurm" / "env" / "frontier.sh").is_file()
    assert "MI250X" in run(LOAD)


def test_a_copy_is_refused_if_the_name_is_unknown_or_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "--copy", "machines/frontier"]) == 0
    assert (tmp_path / "frontier.yaml").is_file()
    for name, said in (("machines/frontier", "exists"), ("gpt-5", "need one of gpt-1.3b, ")):
        assert main(["configs", "--copy", name]) == 2
        assert said in capsys.readouterr().err
