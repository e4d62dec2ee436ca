"""Published weights from files, URLs and a hub: a local server stands for the hub."""

import hashlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from millrace.config import ConfigurationError
from millrace.data import weights
from millrace.data.weights import find_weights

CONTENT = bytes(range(256)) * 9000  # more than two chunks
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "timm/resnet50.a1_in1k"
RESOLVED = f"/{NAME}/resolve/main/model.safetensors"


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does: the checksum comes with a redirect to the storage."""

    asked: list[str]
    checksum = SHA256
    is_truncated = False

    def do_GET(self):
        type(self).asked.append(self.path)
        if self.path == RESOLVED:
            self.send_response(302)
            self.send_header("Location", "/storage/blob")
            self.send_header("X-Linked-Etag", f'"{self.checksum}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path in ("/storage/blob", "/own/weights.safetensors"):
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[: 1000 if self.is_truncated else None])
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    handler = type("Hub", (Hub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    handler.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", handler.url)
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_repository_is_downloaded_once_and_checked(hub, tmp_path):
    said = []
    found = find_weights(NAME, said.append)
    assert found.path.read_bytes() == CONTENT
    assert found.path.is_relative_to(tmp_path / "cache" / "weights")
    assert (found.source, found.sha256) == (NAME, SHA256)
    assert said == [f"downloading {hub.url}{RESOLVED}, 2 MB"]
    record = json.loads((found.path.parent / "source.json").read_text())
    assert record == {"url": hub.url + RESOLVED, "sha256": SHA256}
    assert find_weights(NAME, said.append) == found  # from the cache
    assert len(hub.asked) == 2 and len(said) == 1


def test_a_damaged_download_is_replaced(hub):
    found = find_weights(NAME)
    found.path.write_bytes(CONTENT[:-1])
    assert find_weights(NAME).path.read_bytes() == CONTENT


def test_a_url_may_carry_its_checksum(hub):
    url = f"{hub.url}/own/weights.safetensors"
    assert find_weights(f"{url}#sha256={SHA256}").path.name == "weights.safetensors"
    with pytest.raises(ConfigurationError, match=f"SHA-256 is {SHA256}, expected 0000"):
        find_weights(f"{url}#sha256={'0' * 64}")
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits, got md5=1"):
        find_weights(f"{url}#md5=1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checksum": "0" * 64}, f"SHA-256 is {SHA256}, expected 000"),
        ({"is_truncated": True}, "only 1,000 of 2,304,000 bytes|connection broke"),
    ],
)
def test_a_wrong_or_incomplete_download_leaves_nothing(hub, tmp_path, change, message):
    for name, value in change.items():
        setattr(hub, name, value)
    with pytest.raises(ConfigurationError, match=message) as caught:
        find_weights(NAME)
    assert "\n" not in str(caught.value)
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_a_repository_that_does_not_exist_is_named(hub):
    with pytest.raises(ConfigurationError, match=r"no file timm/none, and .*404 Not Found"):
        find_weights("timm/none")
    with pytest.raises(ConfigurationError, match=r"/timm/none/resolve/v1%2F2/a/b\.bin was"):
        find_weights("timm/none/a/b.bin@v1/2")


def test_a_machine_without_network_gets_a_message_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # nobody listens
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ConfigurationError, match=r"cannot reach the server.*pass its path"):
        find_weights(NAME)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set"):
        find_weights(NAME)


def test_a_server_that_never_answers_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path))
    monkeypatch.setattr(weights, "_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, start = silent.getsockname()[1], time.monotonic()
        with pytest.raises(ConfigurationError, match="timed out"):
            find_weights(f"http://127.0.0.1:{port}/x.safetensors")
        assert time.monotonic() - start < 5


def test_files_and_folders_come_before_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"owner/name has no model\.safetensors"):
        find_weights("owner/name")
    (folder / "model.safetensors").write_bytes(CONTENT)
    for source in ("owner/name", folder, "owner/name/model.safetensors"):
        found = find_weights(source)
        assert found.path.samefile(folder / "model.safetensors")
        assert found.sha256 == SHA256


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "runs/weights.safetensors",
        "/a/b",
        "a" * 300,
        "x/\0",
        "../a/b",
        "a/b/../../c",
        "a/b@..",
    ],
)
def test_what_is_neither_a_path_nor_a_name_is_not_looked_for_elsewhere(text):
    with pytest.raises(ConfigurationError, match="neither a URL nor"):
        find_weights(text)
