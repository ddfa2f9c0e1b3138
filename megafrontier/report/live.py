"""The report of runs that go on, served to a browser that loads it again and again."""

import html
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from megafrontier.common.errors import UserError, need
from megafrontier.report.draw import pyplot, write_report


def serve_report(
    runs: Sequence[Path], host: str, port: int, seconds: float, show: Callable[[str], object]
) -> None:
    """Serve the report of `runs` until Ctrl-C, drawn anew when their metrics have changed, but not
    before `seconds` have passed. Pages ask for a new one after that time.

    It answers one request at a time, because matplotlib has one figure for all threads. Raises
    UserError for a host or port that cannot be used, and a missing matplotlib.
    """
    need(0 <= seconds < math.inf, "--seconds", seconds, "need 0 or more")
    pyplot()
    with tempfile.TemporaryDirectory() as folder:
        report = LiveReport(runs, Path(folder), seconds)
        try:
            server = HTTPServer((host, port), _handler(report))
        except (OSError, OverflowError) as error:
            fits = "need an address of this machine and a free port"
            raise UserError(f"--host, --port: {host}:{port}, {fits} ({error})") from error
        with server:
            show(f"http://{host}:{server.server_port}/ until Ctrl-C")
            server.serve_forever()


class LiveReport:
    """The newest page, and what it was drawn from."""

    def __init__(self, runs: Sequence[Path], folder: Path, seconds: float) -> None:
        """`folder`: for the pictures. `seconds`: between two drawings."""
        self._runs, self._folder, self._seconds = runs, folder, seconds
        self._drawn_at, self._sizes, self._page = -seconds, list[int](), b""

    def page(self) -> bytes:
        """The page. A run without steps is named in its place."""
        sizes = [_size(run / "metrics.jsonl") for run in self._runs]
        is_due = time.monotonic() - self._drawn_at >= self._seconds
        if is_due and (sizes != self._sizes or not self._page):
            self._sizes, self._page = sizes, self._draw().encode()
            self._drawn_at = time.monotonic()
        return self._page

    def _draw(self) -> str:
        try:
            text = write_report(self._runs, self._folder).read_text(encoding="utf-8")
        except UserError as error:
            text = f"<!doctype html>\n<head></head><p>{html.escape(str(error))}</p>"
        refresh = f'<head><meta http-equiv="refresh" content="{max(1, round(self._seconds))}">'
        return text.replace("<head>", refresh, 1)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _handler(report: LiveReport) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # a browser that opens a connection and sends nothing holds up the others

        def do_GET(self) -> None:
            """Send the page, under any path but those that browsers ask for by themselves."""
            if self.path != "/":
                self.send_error(404)
                return
            page = report.page()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Print no line for each request."""

    return Handler
