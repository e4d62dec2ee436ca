"""``millrace report --serve``: a live page about a folder of runs.

The server is for one person on this machine: it listens on 127.0.0.1, answers only
requests to that name, and never writes. Runs are named by numbers of its own, so that no
part of an address becomes a path.
"""

import contextlib
import json
import re
import threading
from functools import cache, partial
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from millrace.config import ConfigurationError
from millrace.drawing.html import page
from millrace.report.folder import RunFolder
from millrace.report.record import read_run
from millrace.report.run_page import run_page

DEFAULT_PORT, _NUM_PORTS = 8600, 20
_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
_BODY = """<header class="live"><h1>Runs</h1><code>{folder}</code>
<p class="note"><span id="state">connecting …</span></p></header>
<noscript><p>This page needs JavaScript. <code>millrace report RUN</code> writes one that
does not.</p></noscript>
<div class="filters"><input id="filter" type="search" placeholder="Filter by name, command
 or status" aria-label="Filter runs"><span id="count" class="note"></span></div>
<div class="scroll"><table id="runs" class="live"><thead></thead><tbody></tbody></table>
</div><h2>Curves</h2><div id="charts"></div>"""


def serve(folder: Path, port: int | None = None) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        ConfigurationError: There is no such folder, or no free port.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"There is no folder {folder}. Name the folder of your runs: millrace report "
            "--serve FOLDER."
        )
    with open_server(folder, port) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        print(f"Runs in {folder}: {address} (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    print("\nEnded.")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Another server on this port must be an error, not shared with us.
    allow_reuse_address = True
    allow_reuse_port = False


def open_server(folder: Path, port: int | None = None) -> ThreadingHTTPServer:
    """Return a server on a port, or by default on the first free one from 8600 on."""
    handler = partial(_Handler, RunFolder(folder), threading.Lock())
    ports = range(DEFAULT_PORT, DEFAULT_PORT + _NUM_PORTS) if port is None else [port]
    problem = ""
    for each in ports:
        try:
            return _Server(("127.0.0.1", each), handler)
        except OSError as error:
            problem = error.strerror or str(error)
    numbers = str(port) if port is not None else f"{ports[0]} to {ports[-1]}"
    raise ConfigurationError(
        f"Cannot listen on port {numbers}: {problem}. Choose another one with --port."
    )


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "millrace", ""

    def __init__(self, runs: RunFolder, lock: threading.Lock, *arguments: Any) -> None:
        self._runs, self._lock = runs, lock
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer a request."""
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if host not in _HOSTS:  # a page elsewhere whose name was pointed at this machine
            return self.send_error(HTTPStatus.FORBIDDEN)
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            with self._lock:
                kind, body = self._answer(parts.path, query)
        except (LookupError, ValueError, ConfigurationError):
            return self.send_error(HTTPStatus.NOT_FOUND)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the page was closed
            self.wfile.write(body)

    def _answer(self, path: str, query: dict[str, str]) -> tuple[str, bytes]:
        """Return the type and the content of an address; a LookupError if unknown."""
        if path == "/":
            return "text/html", live_page(self._runs.path.resolve()).encode()
        if path == "/api/runs":
            self._runs.refresh()
            return _as_json(self._runs.changes(int(query.get("since", "0"))))
        numbers = {
            name: int(query.get(name, "0")) for name in ("run", "offset", "restarts")
        }
        if path == "/api/curves":
            found = self._runs.curves(
                numbers["run"], max(0, numbers["offset"]), numbers["restarts"]
            )
            return _as_json(found)
        found = re.fullmatch(r"/runs/(\d{1,9})", path)
        run = self._runs.get(int(found[1])) if found else None
        if run is None:
            raise LookupError(path)
        return "text/html", run_page(read_run(run.path)).encode()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a page asks every second."""
        del format, args


def _as_json(data: Any) -> tuple[str, bytes]:
    if data is None:
        raise LookupError
    return "application/json", json.dumps(data, separators=(",", ":")).encode()


def live_page(folder: Path) -> str:
    """Return the page, which then asks for its data."""
    body = _BODY.format(folder=escape(str(folder)))
    title = f"Runs in {folder.name}"
    return page(title, body, wide=True, script=live_script(), polls=True)


@cache
def live_script() -> str:
    """Return the script of the live page."""
    return (resources.files("millrace.report") / "live.js").read_text(encoding="utf-8")
