"""A run downloads a dataset that is missing, if it may and can."""

import dataclasses
import gzip
import hashlib
import http.server
import json
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from launched import environment
from several_processes import as_processes

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.data import load_images
from millrace.commands import fetch
from millrace.config import build
from millrace.data import catalog
from millrace.data.catalog import DataFile, DatasetNotFound
from millrace.data.fetch import FetchError, is_reachable


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve a smaller MNIST, and let the catalog point to it."""
    requests, rng = [], np.random.default_rng(0)
    names = [file.name for file in catalog.CATALOG["mnist"].files]
    contents = {
        name: idx(
            rng.integers(0, 10, (3, 28, 28) if "images" in name else (3,), dtype=np.uint8)
        )
        for name in names
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(405)

        def do_GET(self):
            requests.append(self.path)
            content = contents[self.path.lstrip("/")]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format, *args):
            pass

    opened = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=opened.serve_forever, args=(0.01,), daemon=True).start()
    files = tuple(
        DataFile(name, len(c), "", hashlib.sha256(c).hexdigest())
        for name, c in contents.items()
    )
    url = f"http://127.0.0.1:{opened.server_port}/"
    known = dict(catalog.CATALOG)
    known["mnist"] = dataclasses.replace(
        known["mnist"], url=url, files=files, num_training=3, num_validation=3
    )
    for module in (catalog, fetch, data):
        monkeypatch.setattr(module, "CATALOG", known)
    monkeypatch.setattr("millrace.data.mnist.CATALOG", known)
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("MILLRACE_NO_FETCH")
    yield requests, contents
    opened.shutdown()
    opened.server_close()


def load(folder, **options):
    values = {"dataset": "mnist", "dataset_path": str(folder), **options}
    return data.load(build(CnnConfig, values))


def test_a_missing_dataset_is_downloaded_once(server, tmp_path, capsys):
    requests, contents = server
    loaded = load(tmp_path)
    assert len(loaded.training) == len(loaded.validation) == 3
    assert loaded.folder == tmp_path / "cache" / "mnist"
    assert "Downloading mnist" in capsys.readouterr().err
    load(tmp_path)
    assert len(requests) == len(contents)
    assert capsys.readouterr().err == ""


def test_vcd_downloads_its_images_as_well(server, tmp_path):
    requests, contents = server
    values = {"dataset": "mnist", "dataset_path": str(tmp_path)}
    with pytest.raises(DatasetNotFound, match="millrace data fetch mnist"):
        load_images(build(VcdConfig, values | {"fetch": False}).data)
    assert requests == []
    assert len(load_images(build(VcdConfig, values).data).test) == 3
    assert len(requests) == len(contents)


def test_of_several_processes_one_downloads_and_the_others_wait(server, tmp_path, capsys):
    requests, contents = server
    loaded = as_processes(2, lambda process: load(tmp_path))
    assert [len(found.training) for found in loaded] == [3, 3]
    assert len(requests) == len(contents)
    assert capsys.readouterr().err.count("Downloading mnist") == 1


SCRIPT = """
import json, os
from types import MappingProxyType

from millrace.data import catalog

mnist = json.loads(os.environ["SMALL_MNIST"])
files = tuple(catalog.DataFile(**file) for file in mnist.pop("files"))
mnist = catalog.Dataset(**mnist, files=files)
catalog.CATALOG = MappingProxyType({**catalog.CATALOG, "mnist": mnist})

from millrace.apps.vcd.config.sections import DataOptions
from millrace.apps.vcd.data import load_images
from millrace.run.process import join_processes

assert join_processes()
print("images:", len(load_images(DataOptions(dataset="mnist")).training))
"""


def test_processes_of_a_launch_use_data_that_one_of_them_downloads(server, tmp_path):
    requests, contents = server
    (tmp_path / "script.py").write_text(SCRIPT)
    mnist = json.dumps(dataclasses.asdict(fetch.CATALOG["mnist"]))
    poprun = (sys.executable, "-m", "millrace", "poprun", "--num-instances", "2")
    done = subprocess.run(
        [*poprun, sys.executable, "script.py"],
        env={**environment(), "SMALL_MNIST": mnist},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.count("images: 3") == 2, done.stdout
    assert sorted(requests) == sorted(f"/{name}" for name in contents)


def test_an_option_or_the_environment_forbids_it(server, tmp_path, monkeypatch):
    with pytest.raises(DatasetNotFound, match="millrace data fetch mnist"):
        load(tmp_path, fetch=False)
    monkeypatch.setenv("MILLRACE_NO_FETCH", "1")
    with pytest.raises(DatasetNotFound, match="millrace data fetch mnist"):
        load(tmp_path)
    assert server[0] == []


def test_a_wrong_file_is_an_error_and_is_not_kept(server, tmp_path):
    name = next(iter(server[1]))
    server[1][name] = bytes(len(server[1][name]))
    with pytest.raises(FetchError, match="is not the published"):
        load(tmp_path)
    assert not any((tmp_path / "cache" / "mnist").iterdir())


def test_without_a_network_the_usual_error_comes_soon(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "is_reachable", lambda url: is_reachable(url, 0.2))
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, but never answers
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with silent:
        for address in (silent.getsockname()[1], port):
            known = fetch.CATALOG["mnist"]
            url = f"http://127.0.0.1:{address}/"
            monkeypatch.setitem(fetch.CATALOG, "mnist", dataclasses.replace(known, url=url))
            started = time.monotonic()
            with pytest.raises(DatasetNotFound, match="cannot be reached") as raised:
                load(tmp_path)
            assert time.monotonic() - started < 5
            assert "There is no mnist in" in str(raised.value)


def test_a_dataset_that_needs_registration_is_not_downloaded(server, tmp_path):
    with pytest.raises(DatasetNotFound, match=r"image-net\.org"):
        load(tmp_path, dataset="imagenet")
