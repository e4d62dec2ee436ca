"""The live page: what its server answers, reads and refuses, and how it looks."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from made_runs import EVENTS, make_run

from millrace.config import ConfigurationError
from millrace.durable import lock_folder
from millrace.report import folder as folder_module
from millrace.report.folder import RunFolder, find_runs
from millrace.report.serve import open_server

HOSTILE = "<img src=x onerror=alert(1)>"


@contextlib.contextmanager
def serving(folder):
    with open_server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(port, path, host="127.0.0.1"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def log(run, *events):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def event(epoch, **metrics):
    return {"update": 44 * epoch, "epoch": float(epoch), "time": 1.0 * epoch} | metrics


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "first")
    make_run(tmp_path / "deeper" / "second", ended=False)
    return tmp_path


def test_the_server_answers_only_what_it_has(runs):
    (runs / "secret.txt").write_text("secret")
    with serving(runs) as port:
        status, page = get(port, "/")
        assert status == 200 and "connect-src 'self'" in page and str(runs) in page
        _, found = get(port, "/api/runs?since=0")
        found = json.loads(found)
        names = {run["name"]: run for run in found["runs"]}
        assert set(names) == {"first", "deeper/second"}
        assert names["first"]["status"] == "completed"
        assert names["first"]["best"]["value"] == 0.9611
        assert names["first"]["best"]["title"] == "validation accuracy"
        assert names["deeper/second"]["class"] == "unfinished"
        status, page = get(port, f"/runs/{names['first']['id']}")
        assert status == 200 and "cnn train · first" in page
        for path in (
            *("/secret.txt", "/../secret.txt", "/runs/../secret.txt", "/runs/%2e%2e"),
            *("/runs/99", "/runs/first", "/runs/-1", "/api/curves?run=99", "//etc/passwd"),
            *("/api/runs?since=x", "/api/curves?run=1&offset=1e9", "/favicon.ico"),
        ):
            assert get(port, path)[0] == 404, path
        assert get(port, "/", host="evil.example")[0] == 403  # DNS rebinding
        assert get(port, "/", host=f"localhost:{port}")[0] == 200


def test_the_server_is_for_this_machine_and_only_reads(runs):
    with serving(runs) as port:
        for method in ("POST", "PUT", "DELETE"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request(method, "/")
            assert connection.getresponse().status == 501
            connection.close()
        with socket.socket() as other, pytest.raises(OSError):
            other.settimeout(1)
            other.connect(("127.0.0.2", port))


def test_only_new_bytes_of_a_log_are_read(runs, monkeypatch):
    run = runs / "first"
    log(run, *(event(n, train_loss=1.0 / n) for n in range(3, 2000)))
    followed = RunFolder(runs)
    followed.refresh()
    version = followed.changes(0)["version"]
    read = []
    read_bytes = folder_module._read_bytes

    def count(path, start, end):
        data = read_bytes(path, start, end)
        read.append(len(data))
        return data

    monkeypatch.setattr(folder_module, "_read_bytes", count)
    followed.refresh()
    assert read == [] and followed.changes(version)["runs"] == []
    log(run, event(2000, train_loss=0.001))
    followed.refresh()
    assert 0 < sum(read) < 300
    (changed,) = followed.changes(version)["runs"]
    assert changed["epoch"] == 2000


def test_curves_are_sent_from_where_the_page_has_them(runs):
    followed = RunFolder(runs)
    followed.refresh()
    (number,) = (r["id"] for r in followed.changes(0)["runs"] if r["name"] == "first")
    first = followed.curves(number, 0, 0)
    assert {c["name"]: c["y"] for c in first["curves"]}["train_loss"] == [0.5, 0.25]
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event(3, train_loss=0.125)) + '\n{"update": 9, "epo')
    more = followed.curves(number, first["offset"], first["restarts"])
    assert [(c["name"], c["y"]) for c in more["curves"]] == [("train_loss", [0.125])]
    assert followed.curves(number, more["offset"], 0)["curves"] == []


def test_a_log_that_a_resumed_run_has_cut_is_read_again(runs):
    followed = RunFolder(runs)
    followed.refresh()
    path = runs / "first" / "metrics.jsonl"
    # Longer than before, but not the same file any more.
    path.write_text("")
    log(runs / "first", EVENTS[0], *(event(n, train_loss=7.0) for n in range(5, 30)))
    followed.refresh()
    (run,) = (r for r in followed.changes(0)["runs"] if r["name"] == "first")
    assert run["restarts"] == 1
    found = followed.curves(run["id"], 400, 0)
    assert found["start"] == 0
    assert {c["name"]: c["y"] for c in found["curves"]}["train_loss"][:2] == [0.5, 7]


def test_new_and_deleted_runs_are_noticed(runs):
    followed = RunFolder(runs)
    followed.refresh()
    before = followed.changes(0)
    make_run(runs / "third")
    (runs / "deeper" / "second" / "config.yml").unlink()
    followed.refresh()
    after = followed.changes(before["version"])
    assert [run["name"] for run in after["runs"]] == ["third"]
    assert len(after["all"]) == 2


def test_a_run_that_writes_nothing_for_long_is_running_while_its_process_is(runs):
    run = runs / "deeper" / "second"
    lock = lock_folder(run)
    assert lock is not None
    followed = RunFolder(runs)
    for is_running in (True, False):
        before = followed.changes(0)["version"]
        followed.refresh()
        changed = {each["name"]: each for each in followed.changes(before)["runs"]}
        assert changed["deeper/second"]["locked"] is is_running
        assert ("first" in changed) is is_running  # only in the first answer
        if is_running:
            os.close(lock)


def test_runs_are_not_searched_for_in_checkpoints(runs):
    make_run(runs / "first" / "checkpoints" / "x")
    assert sorted(path.name for path in find_runs(runs)) == ["first", "second"]


def test_no_file_of_unchanged_runs_is_opened(tmp_path, monkeypatch):
    events = [event(n, train_loss=1.0 / n) for n in range(1, 50)]
    for number in range(20):
        make_run(tmp_path / f"run-{number}", events=events)
    followed = RunFolder(tmp_path)
    followed.refresh()
    opened = []
    open_file = Path.open

    def count(path, *arguments, **options):
        opened.append(path)
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", count)
    followed.refresh()
    assert opened == []
    log(tmp_path / "run-7", event(50, train_loss=0.02))
    opened.clear()
    followed.refresh()
    assert {path.parent.name for path in opened} == {"run-7"}


def test_a_port_in_use_is_an_error_or_the_next_one_is_taken(runs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port {port}: .*--port"):
            open_server(runs, port)
    with open_server(runs) as one, open_server(runs) as two:
        assert one.server_port != two.server_port >= 8600


# A shell may ignore Ctrl-C in what it runs in the background, these tests included.
START = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from millrace.cli import script; script()"
)


def command(*arguments):
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", START, "report", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )


def test_the_command_prints_its_address_and_ends_on_ctrl_c(runs):
    with command("--watch", str(runs), "--port", "0") as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.split("127.0.0.1:")[1].split("/")[0])
            assert get(port, "/")[0] == 200
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out.strip(), errors) == (0, "Ended.", "")


# ---- In the browser ----


def cells(tab, column):
    return tab.evaluate(
        f"[...document.querySelectorAll('#runs tbody td:nth-child({column})')]"
        ".map(e => e.firstChild?.textContent ?? '')"
    )


def test_the_page_sorts_filters_compares_and_shows_new_points(browser, tmp_path):
    for number, loss in ((1, 0.3), (2, 0.1), (10, 0.2)):
        events = [event(n, train_loss=loss * 3 / n) for n in (1, 2, 3)]
        make_run(tmp_path / f"run-{number}", events=events, ended=False)
    make_run(tmp_path / f"{HOSTILE}", events=[], status="failed", metrics={})
    with serving(tmp_path) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait_for("document.querySelectorAll('#first .curve').length === 3")
        browser.evaluate("window.isSamePage = true")

        browser.click("th:nth-child(2) button")
        assert cells(browser, 2) == [HOSTILE, "run-1", "run-2", "run-10"]
        browser.click("th:nth-child(6) button")  # train loss, empty ones last
        assert cells(browser, 2) == ["run-2", "run-10", "run-1", HOSTILE]
        browser.click("th:nth-child(6) button")
        assert cells(browser, 6) == ["0.3", "0.2", "0.1", ""]

        browser.evaluate("document.getElementById('filter').focus()")
        for letter in "un-1":
            browser.press(letter)
        assert cells(browser, 2) == ["run-1", "run-10"]
        assert "2 of 4 runs" in browser.evaluate("document.body.innerText")
        browser.evaluate(
            "document.getElementById('filter').value = '';"
            "document.getElementById('filter').dispatchEvent(new Event('input'))"
        )

        # The run without curves is compared only if it is checked.
        for compared in (3, 4, 0):
            text = browser.evaluate("document.body.innerText")
            assert f"{compared} compared" in text
            browser.click("#all")
        browser.click("#runs tbody tr:nth-child(1) input")
        names = "[...document.querySelectorAll('#first .curve')].map(e => e.dataset.name)"
        browser.wait_for(f"{names}.length === 2")
        assert "run-1" not in browser.evaluate(names)

        log(tmp_path / "run-2", event(4, train_loss=0.05))
        browser.wait_for("document.body.innerText.includes('0.05')")
        browser.wait_for("Charts.charts[0].data.series.some(s => s.y.at(-1) === 0.05)")
        browser.hover(".plot", 0.97)
        assert "run-20.05" in browser.evaluate(
            "[...document.querySelectorAll('.tip.shown div')].map(e => e.textContent)"
        )

        make_run(tmp_path / "run-11")
        browser.wait_for("document.querySelectorAll('#runs tbody tr').length === 5")
        assert browser.evaluate("window.isSamePage")

        browser.evaluate("[...document.links].find(a => a.text === 'run-11').click()")
        browser.wait_for("document.querySelector('h1')?.innerText.includes('run-11')")
        browser.wait_for("document.querySelectorAll('figure.interactive').length > 1")
    # The browser asks for an icon, which there is not.
    problems = [text for text in browser.problems if "favicon" not in text]
    browser.problems.clear()
    assert problems == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 380])
def test_the_page_fits_each_screen_and_says_when_the_server_has_ended(
    browser, runs, width, dark
):
    with serving(runs) as port:
        browser.open(f"http://127.0.0.1:{port}/", width=width, dark=dark)
        browser.wait_for("document.querySelectorAll('#first .curve').length > 1")
        root = "document.documentElement"
        assert browser.evaluate(f"{root}.scrollWidth - {root}.clientWidth") == 0
        color = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(color.split("(")[1].split(",")[0]) < 128) is dark
        browser.hover(".plot")
        assert browser.evaluate("document.querySelectorAll('.tip.shown').length") > 0
        toggle, names = "#runs tbody tr:nth-child(1) input", "#first .curve"
        shown = browser.evaluate(f"document.querySelectorAll('{names}').length")
        browser.click(toggle)
        browser.wait_for(f"document.querySelectorAll('{names}').length < {shown}")
    browser.wait_for("document.body.innerText.includes('the server has ended')")
    assert len(cells(browser, 2)) == 2  # the figures stay
    browser.problems.clear()
