"""The commands as a user types them: help, one-line errors, exit codes."""

import errno
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import megafrontier
from megafrontier.cli import main
from megafrontier.common.arguments import commands_with_overrides, parse
from tests import runs

COMMANDS = (
    "tokenizer", "prepare", "merge", "train", "plan", "certify", "probe", "evaluate", "generate",
    "export", "import", "checkpoint", "report", "configs", "chat",
)  # fmt: skip


ACTIONS = tuple(
    f"checkpoint {name}" for name in ("list", "show", "verify", "average", "export", "import")
)


@pytest.mark.parametrize("command", COMMANDS + ACTIONS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    usage, about, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: megafrontier {command}")
    assert re.match(r"[A-Z].*\.$", about, re.DOTALL), "a sentence below the usage"


def test_an_option_may_stand_before_the_action():
    for words in (["--json", "verify", "run"], ["verify", "run", "--json"]):
        arguments = parse(["checkpoint", *words])
        assert (arguments.run.__name__, arguments.path) == ("_checkpoint_verify", Path("run"))
        assert arguments.json


@pytest.mark.parametrize("found", ["2.10.0", None])
def test_the_version_is_that_of_the_package_and_of_torch(found, capsys, monkeypatch):
    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    expected = f"megafrontier {megafrontier.__version__}, torch {found or 'not installed'}\n"
    assert capsys.readouterr().out == expected


def test_the_module_is_the_command_and_lists_every_one():
    """--help must not wait for torch, so it is not imported."""
    code = "import runpy, sys; sys.argv = ['megafrontier', '--help']\n"
    code += "try: runpy.run_module('megafrontier', run_name='__main__')\n"
    code += "finally: assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert all(re.search(rf"^    {command}\b", ended.stdout, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "fly",
        "train",
        "train nowhere.yaml",
        "train nowhere.yaml --nproc two",
        "evaluate nowhere",
        "generate nowhere --prompt x",
        "export nowhere --out {folder}/x",
        "import nowhere --out {folder}/x",
        "checkpoint list nowhere",
        "checkpoint burn nowhere",
        "report nowhere",
        "merge nowhere --out {folder}/x",
        "prepare {folder}/nowhere.txt --tokenizer bytes --out {folder}/x",
        "tokenizer {folder}/nowhere.txt --vocab-size 300 --out {folder}/x",
        "tokenizer {folder} --vocab-size 300 --max-megabytes nan --out {folder}/x",
        "certify gpt-125m --minutes 0",
        "certify gpt-125m --minutes -3",
        "certify gpt-125m --minutes nan",
        "certify gpt-125m --minutes inf",
        "plan gpt-125m --nodes 1 --tokens 0",
        "plan gpt-125m --nodes 1 --tokens nan",
        "plan gpt-125m --nodes 1 --mtbf 0",
        "plan gpt-125m --nodes 1 --mtbf -5",
        "plan gpt-125m --nodes 1 --mtbf nan",
        "plan gpt-125m --nodes 1 --mtbf inf",
        "report nowhere --live --seconds nan",
    ],
)
def test_bad_input_is_code_2_and_one_line(line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(line.format(folder=tmp_path).split())
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.err.startswith("megafrontier: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize(
    "line",
    [
        "train nowhere.yaml",
        "train {config} machine=laptop tokenizer=texts/nowhere",
        "train {config} machine=laptop data.train=[{{path: nowhere}}]",
        "evaluate nowhere",
    ],
)
def test_a_missing_relative_path_is_refused_with_the_folder_it_was_looked_for_in(
    line, tmp_path, capsys, monkeypatch
):
    """Because a config may name paths relative to another folder."""
    config = runs.make_config_file(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(line.format(config=config).split(" ", 3)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in said
    assert f" in {tmp_path}/elsewhere" in said


@pytest.mark.parametrize(
    "command", ["generate {} --prompt x", "evaluate {}", "export {} --out x", "checkpoint list {}"]
)
def test_a_hugging_face_folder_is_to_be_imported_first(command, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    assert main(command.format(tmp_path).split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"megafrontier: {tmp_path}: a Hugging Face model, need ")
    assert said.endswith(f"`megafrontier import {tmp_path} --out DIR`")


def test_bad_input_is_code_2_even_if_stderr_is_lost():
    """Not 1, the code of a bug, nor 120, with which Python exits if it cannot flush."""
    words = [sys.executable, "-m", "megafrontier", "fly"]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as unread, open("/dev/full", "wb") as full:
        for lost in (unread, full):
            assert subprocess.run(words, stderr=lost, env=buffered).returncode == 2


@pytest.mark.parametrize("out", ["", ".", "folder/"])
def test_a_folder_is_no_corpus_prefix(out, tmp_path, capsys, monkeypatch):
    """The corpus would be a hidden file in it, `..bin`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text\n")
    assert main(["prepare", "text.txt", "--tokenizer", "bytes", "--out", out]) == 2
    reported = capsys.readouterr().err
    assert f"--out {out!r}: need a corpus prefix, as " in reported
    assert reported.endswith("corpus\n")
    assert os.listdir(tmp_path) == ["text.txt"]


def test_a_path_without_permission_is_one_line(tmp_path, capfd, monkeypatch):
    """File modes do not stop root, so the error of the system is faked."""
    closed, looked = tmp_path / "closed", Path.stat

    def stat(path, **options):
        if path.is_relative_to(closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return looked(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    config = runs.make_config_file(tmp_path)
    for words in (
        ["train", config, f"machine={closed}/mine.yaml"],
        ["train", config, "machine=laptop", f"tokenizer={closed}/tokenizer"],
        ["train", config, "machine=laptop", f"checkpoint.resume={closed}/step-00000001"],
        ["evaluate", closed / "run"],
        ["prepare", closed / "text", "--tokenizer", "bytes", "--out", tmp_path / "x"],
        ["tokenizer", config, "--vocab-size", "300", "--out", closed / "tokenizer"],
    ):
        assert main([str(word) for word in words]) == 2, words
        err = capfd.readouterr().err
        assert "Permission denied" in err, words
        assert err.count("\n") == 1, words


@pytest.mark.parametrize(
    "line",
    [
        "train --nproc 3 {config} run.name=a train.steps=7",
        "train run.name=a --nproc=3 train.steps=7 {config}",
        "train {config} run.name=a --nproc 3 train.steps=7",
    ],
)
def test_overrides_may_stand_anywhere(line, tmp_path, monkeypatch):
    from megafrontier.launch import main as launch

    seen = []
    monkeypatch.setattr(launch, "train", lambda *given: seen.append(given) or 0)
    path = runs.make_config_file(tmp_path)
    assert main(line.format(config=path).split()) == 0
    ((config, nproc, restarts),) = seen
    assert (config.run.name, config.train.steps, nproc, restarts) == ("a", 7, 3, 0)


@pytest.mark.parametrize("command", commands_with_overrides())
def test_overrides_of_every_command_may_follow_its_options(command):
    count = "--nodes" if command == "plan" else "--nproc"
    arguments = parse([command, "config.yaml", count, "2", "run.name=a"])
    assert arguments.overrides == ["run.name=a"]


def test_a_word_without_equals_sign_is_refused_among_overrides(tmp_path, capsys):
    path = runs.make_config_file(tmp_path)
    assert main(["train", str(path), "train.steps", "7", "run.name=a"]) == 2
    assert "override 'train.steps': expected key=value" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(monkeypatch, tmp_path):
    from megafrontier.launch import main as launch

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "train", interrupt)
    assert main(["train", str(runs.make_config_file(tmp_path))]) == 130
