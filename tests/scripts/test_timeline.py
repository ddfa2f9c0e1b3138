"""The picture of traces."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks.slow_network import timeline


@pytest.mark.parametrize("text", [None, "", "[]", json.dumps({"traceEvents": []})])
def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path,
    text: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    trace = tmp_path / "trace.json"
    if text is not None:
        trace.write_text(text)
    monkeypatch.setattr("sys.argv", ["timeline.py", str(tmp_path / "o.png"), str(trace)])
    with pytest.raises(SystemExit) as end:
        timeline.main()
    assert end.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"timeline: {trace}: ")
