"""Open pages in a real Chromium, at the width of a phone or a desktop."""

import functools
import json
import os
import queue
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

PHONE, DESKTOP = 380, 1100
_TIMEOUT_SECONDS = 300  # a page takes a fraction of a second on a quiet machine
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_HARNESS = """<!doctype html><meta charset="utf-8"><title>harness</title><body><script>
const pages = %s;
function facts(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  const images = [...page.images];
  frame.contentWindow.getSelection().selectAllChildren(page.body);
  const charts = [...page.querySelectorAll("svg.chart")]
    .filter(svg => svg.getBoundingClientRect().width > 0);
  return {
    overflow: root.scrollWidth - root.clientWidth,
    images: images.length,
    missing: images.filter(i => !i.complete || !i.naturalWidth)
      .map(i => i.src.slice(0, 80)),
    selected: frame.contentWindow.getSelection().toString(),
    text: page.body.innerText,
    smallest: Math.min(99, ...charts.map(
      svg => 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)),
    charts: charts.length,
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    ink: frame.contentWindow.getComputedStyle(page.body).color,
  };
}
async function look() {
  const found = [];
  for (const [page, width] of pages) {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px"; frame.style.height = "800px";
    frame.style.border = "0"; frame.style.colorScheme = "light dark";
    const loaded = new Promise(resolve => frame.onload = resolve);
    frame.src = page; document.body.append(frame);
    await loaded;
    await new Promise(resolve => setTimeout(resolve, 150));  // its scripts may run
    found.push(facts(frame));
    frame.remove();
  }
  return JSON.stringify(found);
}
const tell = text => fetch("/facts", {method: "POST", body: text});
look().then(tell, error => tell(JSON.stringify(String(error))));
</script>"""


class PageFacts(NamedTuple):
    """Measurements of a page in the browser."""

    overflow: int
    """Pixels by which the page is wider than the window."""
    images: int
    missing: list[str]
    selected: str
    """The text of a selection of everything."""
    text: str
    smallest: float
    """Size of the smallest text in a chart, in pixels."""
    charts: int
    background: str
    ink: str


class BrowserResult(NamedTuple):
    """Measurements of all pages, and the messages of the browser."""

    pages: list[PageFacts]
    console: list[str]
    """Errors and warnings."""


def chromium() -> str:
    """Return the path of the browser, or skip the test."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), "")
    if not path:
        pytest.skip(f"no Chromium: none of {', '.join(_NAMES)}, and CHROMIUM is not set")
    return path


def look_at(
    folder: Path, pages: Sequence[tuple[str, int]], profile: Path, *, dark: bool = False
) -> BrowserResult:
    """Open pages of a folder, each at a width, from a local HTTP server."""
    program = chromium()
    log = profile / "log"
    answers: queue.Queue[str] = queue.Queue()
    with _served(folder, _HARNESS % json.dumps(list(pages)), answers) as address:
        colors = ["--blink-settings=preferredColorScheme=0"] if dark else []
        arguments = [
            program,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--enable-logging=stderr", "--v=0", "--disable-background-networking"),
            *(*colors, f"--user-data-dir={profile}", f"{address}/harness"),
        ]
        with log.open("w") as errors:
            process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=errors)
            try:
                found = json.loads(answers.get(timeout=_TIMEOUT_SECONDS))
            except queue.Empty:
                pytest.fail(f"Chromium did not answer: {log.read_text()[-2000:]}")
            finally:
                process.terminate()
                process.wait()
    assert isinstance(found, list), found
    console = re.findall(r"CONSOLE[:(].*", log.read_text())
    return BrowserResult([PageFacts(**facts) for facts in found], console)


@contextmanager
def _served(folder: Path, harness: str, answers: "queue.Queue[str]") -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in ("/harness", "/favicon.ico"):
                return super().do_GET()
            return self._answer(harness.encode() if self.path == "/harness" else b"")

        def do_POST(self) -> None:
            answers.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

    handler = functools.partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
