"""Worker processes end with their command, at once and without leaving files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megafrontier.common.errors import UserError
from megafrontier.data.text.prepare import prepare
from tests.processes import alive, children, wait_for

BUSY = """
import signal, sys, time
from pathlib import Path
from megafrontier.cli import main
from megafrontier.data.text import prepare
from megafrontier.data.tokenizers import train

def be_busy(*_):
    \"\"\"Ignore signals, as a library in native code does.\"\"\"
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    Path("busy").touch()
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
prepare.Encoder.encode = train._run_trainer = be_busy
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("prepare x.jsonl --tokenizer bytes --out out/c", signal.SIGTERM, 128 + signal.SIGTERM),
        ("tokenizer x.jsonl --vocab-size 400 --out t", signal.SIGINT, 130),
    ],
)
def test_an_interrupted_command_ends_at_once_whatever_its_workers_do(
    tmp_path: Path, command: str, number: int, code: int
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a document"}) + "\n")
    called = [sys.executable, "-c", BUSY, *command.split()]
    process = subprocess.Popen(called, cwd=tmp_path, start_new_session=True)
    wait_for(lambda: (tmp_path / "busy").exists())
    workers = children(process.pid)
    os.killpg(process.pid, number)  # as a terminal does
    assert process.wait(20) == code
    assert workers
    assert not any(alive(pid) for pid in workers)
    left = {path.name for path in tmp_path.rglob("*")}
    assert left <= {"x.jsonl", "busy", "out"}


def test_a_killed_worker_is_one_line_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "megafrontier.data.text.prepare.Encoder.encode", lambda job, pieces: os._exit(9)
    )
    text = tmp_path / "x.txt"
    text.write_text("x")
    with pytest.raises(UserError, match="a worker was killed"):
        prepare([str(text)], "bytes", tmp_path / "made", 2)
    assert os.listdir(tmp_path) == ["x.txt"]
