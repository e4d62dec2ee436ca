"""Downloads from a local server that can be made to misbehave."""

import hashlib
import http.server
import io
import os
import socketserver
import tarfile
import threading
import time
import types
from pathlib import Path

import pytest
from image_files import real_data
from power_cut import Disk

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.cli import main
from millrace.config import build
from millrace.data import catalog, fetch
from millrace.data.catalog import DataFile, Dataset
from millrace.data.fetch import FetchError
from millrace.data.verify import verify

CONTENT = bytes(range(256)) * 20


class Server:
    """Serves files over HTTP, records requests, and can disconnect or fail."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.requested: list[tuple[str, str | None]] = []
        self.failures: list[int] = []
        self.disconnect_after: list[int] = []
        self.ranges = True
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            def log_message(self, format, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request):
        wanted = request.headers.get("Range")
        self.requested.append((request.path, wanted))
        content = self.files.get(request.path)
        if self.failures or content is None:
            request.send_error(self.failures.pop(0) if self.failures else 404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        start = start if self.ranges else 0
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(content) - start))
        if start:
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            request.send_header("Content-Range", span)
        request.end_headers()
        length = self.disconnect_after.pop(0) if self.disconnect_after else len(content)
        request.wfile.write(content[start : start + length])

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetch, "_PAUSES_SECONDS", (0.0, 0.0))
    # A proxy must not come between this process and the local server.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    opened = Server()
    yield opened
    opened.close()


def data_file(name, content):
    sha256 = hashlib.sha256(content).hexdigest()
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return DataFile(name, len(content), md5, sha256)


def dataset(server, **files):
    server.files = {f"/{name}": content for name, content in files.items()}
    return Dataset(
        name="pebbles",
        num_training=1,
        num_validation=1,
        image_shape=(1, 1, 1),
        num_classes=2,
        mean=(0,),
        std=(1,),
        url=server.url,
        files=tuple(data_file(name, content) for name, content in files.items()),
    )


def fetched(known, folder, **options):
    seen = []
    paths = fetch.fetch(
        known, folder, progress=lambda *progress: seen.append(progress), **options
    )
    return [path.name for path in paths], seen


def test_files_are_downloaded_once(server, tmp_path):
    known = dataset(server, one=CONTENT, two=b"2")
    names, seen = fetched(known, tmp_path / "new" / "folder")
    assert names == ["one", "two"]
    assert seen[0] == ("one", 0, len(CONTENT)) and seen[-1] == ("two", 1, 1)
    folder = tmp_path / "new" / "folder"
    assert (folder / "one").read_bytes() == CONTENT
    assert sorted(os.listdir(folder)) == ["one", "two"]  # nothing else remains
    assert fetched(known, folder)[0] == []
    assert len(server.requested) == 2


def test_two_processes_that_need_the_same_files_download_them_once(server, tmp_path):
    """Both would append to the same part of a file."""
    known, answer, errors = dataset(server, one=CONTENT), server.answer, []

    def answer_slowly(request):
        time.sleep(0.3)
        answer(request)

    def fetch_one():
        try:
            fetched(known, tmp_path)
        except FetchError as error:
            errors.append(error)

    server.answer = answer_slowly
    threads = [threading.Thread(target=fetch_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (errors, len(server.requested)) == ([], 1)
    assert (tmp_path / "one").read_bytes() == CONTENT


def test_a_wrong_file_is_replaced(server, tmp_path):
    known = dataset(server, one=CONTENT)
    (tmp_path / "one").write_bytes(CONTENT[:-1])
    assert fetched(known, tmp_path)[0] == ["one"]
    assert (tmp_path / "one").read_bytes() == CONTENT


def test_a_download_resumes_where_it_stopped(server, tmp_path):
    known = dataset(server, one=CONTENT)
    (tmp_path / "one.part").write_bytes(CONTENT[:1000])
    _, seen = fetched(known, tmp_path)
    assert server.requested == [("/one", "bytes=1000-")]
    assert seen[0] == ("one", 1000, len(CONTENT))
    assert (tmp_path / "one").read_bytes() == CONTENT
    assert os.listdir(tmp_path) == ["one"]


def test_a_download_continues_after_the_server_disconnects(server, tmp_path):
    known = dataset(server, one=CONTENT)
    server.disconnect_after = [700, 800]
    fetched(known, tmp_path)
    assert [wanted for _, wanted in server.requested] == [None, "bytes=700-", "bytes=1500-"]
    assert (tmp_path / "one").read_bytes() == CONTENT


def test_the_received_part_is_kept_if_the_server_keeps_disconnecting(server, tmp_path):
    known = dataset(server, one=CONTENT)
    server.disconnect_after = [10, 10, 10]
    with pytest.raises(
        FetchError, match=r"interrupted: 30 of 5,120 bytes received.*to continue"
    ):
        fetched(known, tmp_path)
    assert (tmp_path / "one.part").read_bytes() == CONTENT[:30]
    fetched(known, tmp_path)
    assert (tmp_path / "one").read_bytes() == CONTENT


def test_a_server_that_cannot_resume_sends_the_whole_file(server, tmp_path):
    known = dataset(server, one=CONTENT)
    server.ranges = False
    (tmp_path / "one.part").write_bytes(CONTENT[:1000])
    fetched(known, tmp_path)
    assert (tmp_path / "one").read_bytes() == CONTENT


@pytest.mark.parametrize("stale", [b"x" * 100, b"x" * len(CONTENT), b"x" * 9999])
def test_a_part_of_another_version_is_discarded(server, tmp_path, stale):
    known = dataset(server, one=CONTENT)
    (tmp_path / "one.part").write_bytes(stale)
    fetched(known, tmp_path)
    assert (tmp_path / "one").read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"?", CONTENT + b"more"])
def test_a_wrong_checksum_is_an_error_and_nothing_is_left(server, tmp_path, wrong):
    known = dataset(server, one=CONTENT)
    server.files["/one"] = wrong
    with pytest.raises(FetchError) as caught:
        fetched(known, tmp_path)
    expected = hashlib.sha256(CONTENT).hexdigest()
    for part in (f"{server.url}one is not", f"expected {expected}", str(tmp_path), "--url"):
        assert part in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_temporary_server_errors_are_retried(server, tmp_path):
    known = dataset(server, one=CONTENT)
    server.failures = [503, 500]
    fetched(known, tmp_path)
    assert len(server.requested) == 3


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ([404], r"answered 404 Not Found for http://127.*one\. Put one \(5,120 bytes\)"),
        ([500] * 3, "interrupted: the server answered 500 Internal Server Error"),
    ],
)
def test_a_server_error_says_how_to_get_the_file_manually(
    server, tmp_path, failures, message
):
    known = dataset(server, one=CONTENT)
    server.failures = failures
    with pytest.raises(FetchError, match=message) as caught:
        fetched(known, tmp_path)
    assert f"into {tmp_path} manually" in str(caught.value)


def test_offline_the_error_says_which_file_to_put_where(server, tmp_path):
    known = dataset(server, one=CONTENT)
    server.close()
    with pytest.raises(FetchError) as caught:
        fetched(known, tmp_path)
    for part in (
        "Cannot reach",
        f"{server.url}one",
        "Put one (5,120 bytes)",
        str(tmp_path),
    ):
        assert part in str(caught.value)
    (tmp_path / "one").write_bytes(CONTENT)  # manually
    assert fetched(known, tmp_path)[0] == []


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (CONTENT[:-1], "it has 5,119 bytes, expected 5,120."),
        (CONTENT[:-1] + b"?", f"expected {hashlib.sha256(CONTENT).hexdigest()}."),
    ],
)
def test_offline_the_error_says_what_is_wrong_with_a_present_file(
    server, tmp_path, wrong, found
):
    known = dataset(server, one=CONTENT)
    server.close()
    (tmp_path / "one").write_bytes(wrong)
    with pytest.raises(FetchError, match="Cannot reach") as caught:
        fetched(known, tmp_path)
    message = str(caught.value)
    assert f"The one in {tmp_path} is not the published file: it" in message
    assert found in message
    assert "Replace it manually and run the command again" in message
    assert (tmp_path / "one").read_bytes() == wrong


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_not_mistaken_for_a_network_error(server, tmp_path, monkeypatch):
    known = dataset(server, one=CONTENT)
    monkeypatch.setattr(fetch, "_open_part", lambda part, append: open("/dev/full", "wb"))
    with pytest.raises(OSError, match="No space left on device"):
        fetched(known, tmp_path)


@pytest.mark.parametrize("kind", ["symlink", "dangling", "hard link", "pipe"])
def test_a_link_in_place_of_a_part_is_not_followed(server, tmp_path, kind):
    known = dataset(server, one=CONTENT)
    (folder := tmp_path / "data").mkdir()
    part, other = folder / "one.part", tmp_path / "unrelated"
    if kind != "dangling":
        other.write_bytes(CONTENT[:7])
    if kind == "hard link":
        part.hardlink_to(other)
    elif kind == "pipe":
        os.mkfifo(part)
    else:
        part.symlink_to(other)
    fetched(known, folder)
    assert (folder / "one").read_bytes() == CONTENT
    assert not (folder / "one").is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == ["one"]
    assert not other.exists() if kind == "dangling" else other.read_bytes() == CONTENT[:7]


def test_a_folder_in_place_of_a_part_is_an_error(server, tmp_path):
    (tmp_path / "one.part").mkdir()
    with pytest.raises(FetchError, match=r"one\.part is a folder"):
        fetched(dataset(server, one=CONTENT), tmp_path)


def test_a_part_that_the_server_cannot_continue_is_downloaded_again(server, tmp_path):
    known = dataset(server, one=CONTENT)
    (tmp_path / "one.part").write_bytes(CONTENT[:100])
    server.failures = [416]
    fetched(known, tmp_path)
    assert (tmp_path / "one").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requested] == ["bytes=100-", None]


HOSTILE = {
    "no answer": b"",
    "noise": b"\x00\xff" * 500,
    "no status": b"HTTP/1.1 abc OK\r\n\r\n",
    "strange status": b"HTTP/1.1 999 What\r\n\r\n",
    "redirect to itself": b"HTTP/1.1 302 x\r\nLocation: /one\r\n\r\n",
    "redirect nowhere": b"HTTP/1.1 302 x\r\n\r\n",
    "redirect to a file": b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\n\r\n",
    "redirect to half a URL": b"HTTP/1.1 302 x\r\nLocation: http://[::1\r\n\r\n",
    "redirect to no port": b"HTTP/1.1 302 x\r\nLocation: http://127.0.0.1:x/\r\n\r\n",
    "redirect to a far port": b"HTTP/1.1 302 x\r\nLocation: http://127.0.0.1:99999/\r\n\r\n",
    "redirect to no host": b"HTTP/1.1 302 x\r\nLocation: http:///one\r\n\r\n",
    "redirect to non-ASCII": "HTTP/1.1 302 x\r\nLocation: http://\u00e9..\u00fc/\r\n\r\n".encode(),
    "long label": b"HTTP/1.1 302 x\r\nLocation: http://" + b"a" * 300 + b"/\r\n\r\n",
    "range of many digits": b"HTTP/1.1 206 x\r\nContent-Range: bytes "
    + b"9" * 6000
    + b"-/*\r\n\r\nabc",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc",
    "length of many digits": b"HTTP/1.1 200 OK\r\nContent-Length: "
    + b"9" * 6000
    + b"\r\n\r\nabc",
    "wrong length": b"HTTP/1.1 200 OK\r\nContent-Length: 5120\r\n\r\nabc",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    "negative chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
    "huge chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"f" * 5000
    + b"\r\nabc",
    "long header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 200 + b"\r\n",
    "too much": b"HTTP/1.1 200 OK\r\n\r\n" + CONTENT * 3,
    "something else": b"HTTP/1.1 200 OK\r\n\r\n" + CONTENT[::-1],
    "authentication required": b"HTTP/1.1 401 x\r\nWWW-Authenticate: Strange\r\n\r\n",
    "not satisfiable": b"HTTP/1.1 416 x\r\n\r\n",
    "not modified": b"HTTP/1.1 304 x\r\n\r\n",
    "non-ASCII status": "HTTP/1.1 404 \u00fc\x00\x1b[31m\r\n\r\n".encode(),
}


@pytest.mark.parametrize("begun", [False, True], ids=["from the start", "resumed"])
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_is_one_error_and_never_a_wrong_file(
    answer, begun, tmp_path, monkeypatch
):
    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(4096)
            self.request.sendall(answer)

    monkeypatch.setattr(fetch, "_PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as opened:
        threading.Thread(target=opened.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{opened.server_address[1]}"
        if begun:
            (tmp_path / "one.part").write_bytes(CONTENT[:1000])
        known = dataset(types.SimpleNamespace(url=url), one=CONTENT)
        with pytest.raises(FetchError, match="manually"):
            fetched(known, tmp_path)
        opened.shutdown()
    assert not (tmp_path / "one").exists()


def test_a_lost_connection_is_retried(server, tmp_path, monkeypatch):
    known = dataset(server, one=CONTENT)
    answer, calls = server.answer, []

    def hang_up_first(request):
        calls.append(request)
        return answer(request) if len(calls) > 1 else None

    monkeypatch.setattr(server, "answer", hang_up_first)
    fetched(known, tmp_path)
    assert (tmp_path / "one").read_bytes() == CONTENT


def archive(**members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as opened:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                opened.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content
                opened.addfile(info)
    return stream.getvalue()


def test_an_archive_is_unpacked_next_to_itself(server, tmp_path):
    packed = archive(**{"batches/a.bin": b"a", "batches/deep/b.bin": b"b"})
    known = dataset(server, **{"all.tar.gz": packed})
    fetched(known, tmp_path)
    assert (tmp_path / "batches" / "a.bin").read_bytes() == b"a"
    assert (tmp_path / "batches" / "deep" / "b.bin").read_bytes() == b"b"
    assert sorted(os.listdir(tmp_path)) == ["all.tar.gz", "batches"]
    (tmp_path / "batches" / "deep" / "b.bin").unlink()
    (tmp_path / "batches").rename(tmp_path / ".gone")
    fetched(known, tmp_path)  # the archive is present, and is only unpacked
    assert (tmp_path / "batches" / "deep" / "b.bin").read_bytes() == b"b"
    assert len(server.requested) == 1


def test_what_is_unpacked_is_complete_after_a_power_cut(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "all.tar.gz").write_bytes(archive(**{"batches/deep/a.bin": b"a"}))
    disk = Disk(folder)
    with disk.watching():
        fetch.unpack(folder / "all.tar.gz", folder)
    found = []
    for number, moment in enumerate(disk.moments):
        left = disk.restore(moment, tmp_path / f"left-{number}")
        if (left / "batches").exists():
            found.append((left / "batches" / "deep" / "a.bin").read_bytes())
    assert found and set(found) == {b"a"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("../escaped", b"x"),
        ("/tmp/escaped", b"x"),
        ("a/../../escaped", b"x"),
        ("link", (tarfile.SYMTYPE, "/etc/passwd")),
        ("hard", (tarfile.LNKTYPE, "/etc/passwd")),
        ("device", (tarfile.CHRTYPE, "")),
    ],
)
def test_an_archive_cannot_write_outside_its_folder(server, tmp_path, name, content):
    packed = archive(**{"fine": b"f", name: content})
    known = dataset(server, **{"all.tar.gz": packed})
    folder = tmp_path / "inner"
    with pytest.raises(FetchError, match="not safe to unpack"):
        fetched(known, folder)
    assert os.listdir(tmp_path) == ["inner"]
    assert os.listdir(folder) == ["all.tar.gz"]


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "all.tar.gz").write_bytes(archive(a=b"a" * 5000)[:60])
    with pytest.raises(FetchError, match=r"all\.tar\.gz is a damaged archive"):
        fetch.unpack(tmp_path / "all.tar.gz", tmp_path)
    assert os.listdir(tmp_path) == ["all.tar.gz"]


# The command


@pytest.fixture
def command(server, tmp_path, monkeypatch, capsys):
    """Return a function that runs ``millrace data fetch`` with its own data folder."""
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["data", "fetch", *arguments])
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return call


def test_mnist_is_downloaded_and_then_found_without_a_path(command, server, tmp_path):
    for file in catalog.CATALOG["mnist"].files:
        content = (real_data("mnist") / file.name).read_bytes()
        server.files[f"/mirror/{file.name}"] = content
    status, out, errors = command("mnist", "--url", f"{server.url}mirror")
    assert status == 0, errors
    assert f"mnist is in {tmp_path / 'cache' / 'mnist'}\n" in out
    assert "millrace cnn train --dataset mnist\n" in out
    assert "fetching train-images-idx3-ubyte.gz, 9,912,422 bytes\n" in errors
    options = {"accelerator_side_preprocess": True, "eight_bit_transfer": True}
    images = data.load(build(CnnConfig, {"dataset": "mnist", **options}))
    assert images.folder == tmp_path / "cache" / "mnist"
    sources = images.training, images.validation
    assert verify(sources, catalog.CATALOG["mnist"]) == []
    status, out, _ = command("mnist", "--url", f"{server.url}mirror")
    assert (status, len(server.requested)) == (0, 4)
    assert "mnist is already complete." in out


@pytest.fixture
def pebbles(server, monkeypatch):
    """Put a small dataset into the catalog and return it."""
    known = dataset(server, one=CONTENT)
    # Patch the users first: patching imports them, which needs the real catalog.
    monkeypatch.setattr("millrace.commands.fetch.CATALOG", {"pebbles": known})
    monkeypatch.setattr(catalog, "CATALOG", {"pebbles": known})
    return known


def test_the_command_for_another_folder_includes_its_path(command, pebbles, tmp_path):
    status, out, _ = command("pebbles", "--data-dir", str(tmp_path / "mine"))
    assert status == 0
    assert f"--dataset-path {tmp_path / 'mine' / 'pebbles'}\n" in out
    assert (tmp_path / "mine" / "pebbles" / "one").read_bytes() == CONTENT


def test_quiet_prints_nothing(command, pebbles):
    assert command("pebbles", "--quiet") == (0, "", "")


def test_a_failed_download_is_one_line_and_status_1(command, pebbles, server):
    server.failures = [404]
    status, _, errors = command("pebbles", "--quiet")
    assert status == 1
    assert errors.startswith("millrace: The server answered 404")
    assert errors.count("\n") == 1


def test_a_terminal_shows_a_progress_bar(pebbles, server, tmp_path, monkeypatch, capsys):
    from millrace.commands.fetch import FetchConfig, fetch_dataset

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    fetch_dataset(FetchConfig(name="pebbles", data_dir=tmp_path))
    assert "one" in capsys.readouterr().err
    assert (tmp_path / "pebbles" / "one").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "NAME is required"),
        (["cifr10"], "Did you mean cifar10?"),
        (["digits"], "nothing to fetch"),
        (["imagenet"], "Download ILSVRC2012_img_train.tar"),
        (["mnist", "--url", "ftp://mirror"], "must start with http"),
        (["mnist", "--date-dir", "x"], "Did you mean --data-dir?"),
    ],
)
def test_usage_errors_exit_with_status_2(command, arguments, message):
    status, out, errors = command(*arguments)
    assert (status, out) == (2, "")
    assert message in errors
