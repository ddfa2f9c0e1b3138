"""docs/configuration.md says what the dataclasses say."""

import importlib.util
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

from megafrontier.config import Config

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "config_reference.py"


def load_script():
    spec = importlib.util.spec_from_file_location("config_reference", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    return script


def test_the_reference_is_not_stale():
    check = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_a_stale_reference_is_found(tmp_path, monkeypatch, capsys):
    script = load_script()
    (tmp_path / "configuration.md").write_text("old")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "REFERENCE", tmp_path / "configuration.md")
    monkeypatch.setattr(sys, "argv", ["config_reference.py", "--check"])
    assert script.main() == 1
    assert "configuration.md is stale: run python scripts/" in capsys.readouterr().err


def test_every_option_stands_in_the_reference_with_a_sentence():
    script = load_script()
    page = script.write_reference(script.read_sections(script.read_schemas()))
    for section in fields(Config):
        if is_dataclass(section.type):
            for option in fields(section.type):
                (row,) = (r for r in page.splitlines() if f"| `{section.name}.{option.name}`" in r)
                if not is_dataclass(option.type):
                    assert not row.endswith("|  |"), f"no docstring: {row}"


def test_defaults_are_written_as_yaml_writes_them():
    script = load_script()
    source = """
class Config:
    a: int = 1
    b: float = 0.0
    c: bool = True
    d: str | None = None
    e: list[str] = field(default_factory=lambda: ["x", "y"])
    f: dict[str, str] = field(default_factory=dict)
    g: str = ""
    h: float = bounded(1.5, at_least=0, below=2)
    i: int = count(3)
"""
    options = script.read_sections(source)["Config"]
    assert [option.bounds for option in options[-3:]] == ["", " ≥ 0, < 2", " ≥ 1"]
    assert [option.default for option in options] == [
        "1", "0.0", "true", "null", "[x, y]", "{}", '""', "1.5", "3",
    ]  # fmt: skip
