"""The report of a run that goes on, and the table of its throughput."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer
from urllib.request import urlopen

import pytest

from megafrontier.cli import main
from megafrontier.config import Config, save_config
from megafrontier.model.flops import flops_per_token
from megafrontier.report import live
from megafrontier.report.live import LiveReport, _handler
from megafrontier.report.throughput import throughput_table


def add_step(run, step, **values):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 3.0, "grad_norm": 1.0, **values}) + "\n")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_the_served_page_follows_the_run_and_asks_for_a_new_one(run, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    report = LiveReport([run], tmp_path, 7.0)
    assert b"metrics.jsonl" in report.page()
    add_step(run, 1)
    assert b"base64" not in report.page()
    now[0] += 7
    with HTTPServer(("127.0.0.1", 0), _handler(report)) as server, ThreadPoolExecutor() as pool:
        asked = pool.submit(urlopen, f"http://127.0.0.1:{server.server_port}/", timeout=60)
        server.handle_request()
        page = asked.result().read()
    assert b'<meta http-equiv="refresh" content="7">' in page
    assert b"<td>steps</td><td>1</td>" in page
    assert page.count(b"data:image/png;base64,") == 3


def test_a_port_that_is_taken_is_refused_in_one_line(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["report", str(run), "--live", "--port", port]) == 2
    assert f"--host, --port: 127.0.0.1:{port}, need" in capsys.readouterr().err


def test_the_table_of_throughput_can_be_pasted(run):
    config = Config()
    config.run.name, config.machine = "a|b", "frontier"
    save_config(config, run / "config.yaml")
    flops = 1e6 * flops_per_token(config.model) / 16 / 1e12
    comm = {"pair": {"bytes": 4_000_000, "seconds": 0.1}}
    speeds = {"tokens_per_second": 1e6, "tflops_per_device": flops, "mfu": 0.25, "comm": comm}
    add_step(run, 1, **speeds)
    head, line, row = throughput_table([run]).splitlines()
    assert len(head) == len(line) == len(row)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "a/b"
    assert cells[2:5] == ["frontier, MI250X GCD", "16", "1,000,000"]
    assert cells[6:] == ["25.0%", "4 MB"]
