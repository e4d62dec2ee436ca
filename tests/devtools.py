"""Drive a real Chromium with mouse and keys, through the DevTools protocol.

The client is a WebSocket over the standard library: commands go out one at a time, and
events that arrive in between are kept.
"""

import base64
import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import urlopen

import pytest
from browser import chromium

_TIMEOUT_SECONDS = 60.0


class Navigated(Exception):
    """The page was replaced by another one during an evaluation."""


class Socket:
    """A WebSocket to a server on this machine; messages are text."""

    def __init__(self, address: str) -> None:
        parts = urlparse(address)
        assert parts.hostname and parts.port
        self._socket = socket.create_connection((parts.hostname, parts.port), 10)
        self._socket.settimeout(_TIMEOUT_SECONDS)
        key = base64.b64encode(os.urandom(16)).decode()
        request = (
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n"
        )
        self._socket.sendall(request.encode())
        self._file = self._socket.makefile("rb")
        assert b"101" in self._file.readline()
        while self._file.readline() != b"\r\n":
            pass

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        long = struct.pack("!BH", 0xFE, size) if size < 65536 else b""
        head = bytes([0x80 | size]) if size < 126 else long
        head = head or struct.pack("!BQ", 0xFF, size)
        masked = bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))
        self._socket.sendall(b"\x81" + head + mask + masked)

    def receive(self) -> str:
        parts, is_last = [], False
        while not is_last:
            first, size = self._file.read(2)
            is_last, kind = bool(first & 0x80), first & 0x0F
            if size == 126:
                (size,) = struct.unpack("!H", self._file.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._file.read(8))
            data = self._file.read(size)
            if kind in (0, 1):
                parts.append(data)
            else:  # a ping, which Chromium does not need answered
                is_last = False
        return b"".join(parts).decode()

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Tab:
    """A tab of the browser."""

    def __init__(self, address: str) -> None:
        self._socket = Socket(address)
        self._number = 0
        self.problems: list[str] = []
        """Errors and warnings of pages, such as blocked scripts."""
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.receive())
            if answer.get("id") == self._number:
                if "navigated" in str(answer.get("error")):
                    raise Navigated
                assert "error" not in answer, answer
                return answer["result"]
            self._notice(answer)

    def _notice(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded":
            self.problems.append(
                f"{details['entry']['text']} {details['entry'].get('url')}"
            )
        elif event["method"] == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(details["args"]))

    def open(
        self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        """Show a page, and wait until its scripts have run."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1},
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Page.navigate", url=address)
        self.wait_for(f"location.href === {json.dumps(address)}")
        self.wait_for("document.readyState === 'complete'")
        self.settle()

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = _TIMEOUT_SECONDS) -> None:
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(Navigated):
                if self.evaluate(condition):
                    return
            assert time.monotonic() < until, f"{condition} is still false"
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until everything is drawn."""
        frame = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
        with contextlib.suppress(Navigated):  # a click may have opened another page
            self.evaluate(f"{frame}.then(() => {frame}).then(() => 1)")

    def place(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Return a point in an element, scrolled into view, by shares of its size."""
        left, top, width, height = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.left, r.top, r.width, r.height]; })()"
        )
        return left + x * width, top + y * height

    def mouse(self, kind: str, point: tuple[float, float], **more: Any) -> None:
        x, y = point
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        self.mouse("mouseMoved", self.place(selector, x, y))

    def click(self, selector: str, *, count: int = 1, modifiers: int = 0) -> None:
        point = self.place(selector)
        self.mouse("mouseMoved", point)
        for n in range(1, count + 1):
            pressed = {"button": "left", "clickCount": n, "modifiers": modifiers}
            self.mouse("mousePressed", point, buttons=1, **pressed)
            self.mouse("mouseReleased", point, **pressed)
        self.settle()

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag sideways over an element, from one share of its width to another."""
        first, last = (self.place(selector, share) for share in (start, end))
        middle = ((first[0] + last[0]) / 2, first[1])
        pressed = {"button": "left", "clickCount": 1}
        self.mouse("mouseMoved", first)
        self.mouse("mousePressed", first, buttons=1, **pressed)
        for point in (middle, last):
            self.mouse("mouseMoved", point, button="left", buttons=1)
        self.mouse("mouseReleased", last, **pressed)
        self.settle()

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        self.command("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page, for people to look at."""
        answer = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """Start Chromium without a window, and end it afterwards."""
    arguments = [
        chromium(),
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--hide-scrollbars"),
        *("--remote-debugging-port=0", "--remote-allow-origins=*"),
        *(f"--user-data-dir={profile}", "about:blank"),
    ]
    log = profile / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        tab = Tab(_find_tab(log))
        try:
            yield tab
        finally:
            tab.close()
    finally:
        process.terminate()
        process.wait()


def _find_tab(log: Path) -> str:
    until = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < until:
        if found := re.search(r"ws://(127\.0\.0\.1:\d+)/", log.read_text()):
            with urlopen(f"http://{found[1]}/json", timeout=10) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    pytest.fail(f"Chromium did not start: {log.read_text()[-2000:]}")
