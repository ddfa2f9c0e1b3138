"""A wheel holds all that the commands need, and finds it from any folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megafrontier.cli import main
from tests import runs
from tests.commands import conftest as fixtures
from tests.commands.helpers import way_to_fine_tune
from tests.commands.megatron.test_import import way_from_megatron

folder, my_hf = fixtures.folder, fixtures.my_hf

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; from megafrontier.cli import main; sys.exit(main(sys.argv[1:]))"
COMMANDS = """
import json, sys
from megafrontier.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""
WHERE = "import megafrontier; print(megafrontier.__file__)"
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


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs Python with words in a folder, with the wheel laid out as pip does it in a virtual
    environment."""
    env = tmp_path_factory.mktemp("env")
    site = env / "lib" / "python3" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    data = next(site.glob("*.data")) / "data" / "share"
    data.rename(env / "share")

    def run(folder, *words):
        environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, *words]
        return subprocess.check_output(line, cwd=folder, env=environment, text=True)

    assert Path(run(env, "-c", WHERE).strip()).parents[1] == site
    return run


def test_an_installed_wheel_finds_its_files_from_any_folder(run, tmp_path):
    listed = run(tmp_path, "-c", COMMAND, "configs")
    assert re.search(
        r"^gpt-1.3b +GPT-3 XL on 2 nodes: as gpt-125m, with 1M tokens a step$", listed, re.M
    )
    assert "machines/frontier " in listed
    assert run(tmp_path, "-c", COMMAND, "configs", "--copy", "slurm") == "slurm\n"
    assert (tmp_path / "slurm" / "env" / "frontier.sh").is_file()
    assert "MI250X" in run(tmp_path, "-c", LOAD)


def test_the_example_of_the_librarys_page_trains_and_goes_on_with_the_wheel_alone(run, tmp_path):
    page = (ROOT / "docs" / "library.md").read_text()
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    found = {}
    for steps in (20, 30):
        (tmp_path / "train.py").write_text(example.replace("steps = 100", f"steps = {steps}"))
        said = run(tmp_path, "train.py")
        found[steps] = re.findall(r"^step (\d+)  loss ([\d.]+)$", said, re.M)
    assert [step for step, _ in found[20]] == ["10", "20"]
    assert [step for step, _ in found[30]] == ["30"]
    (_, first), *_ = found[20]
    assert float(found[30][0][1]) < float(first)


def test_the_pages_for_hugging_face_and_megatron_train_with_the_wheel_alone(run, my_hf):
    ways = [*way_to_fine_tune(), *way_from_megatron()]
    run(Path.cwd(), "-c", COMMANDS, json.dumps(ways))
    steps = {
        name: [line["step"] for line in runs.metrics(Path("runs") / name) if "loss" in line]
        for name in ("mine", "7b")
    }
    assert steps == {"mine": [1, 2, 3], "7b": [6, 7, 8, 9]}


def test_a_copy_is_refused_if_the_name_is_unknown_or_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "--copy", "machines/frontier"]) == 0
    assert (tmp_path / "frontier.yaml").is_file()
    for name, said in (("machines/frontier", "exists"), ("gpt-5", "need one of gpt-1.3b, ")):
        assert main(["configs", "--copy", name]) == 2
        assert said in capsys.readouterr().err
