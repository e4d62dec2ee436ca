"""A port that someone else uses is named, or another one is taken."""

import os
import socket

import pytest

from millrace.commands.launch import launch
from millrace.config import ConfigurationError
from millrace.distributed import coordination
from millrace.distributed.environment import ProcessInfo
from millrace.distributed.launcher import Launcher
from millrace.distributed.options import LaunchConfig
from millrace.distributed.ports import free_port, why_not_free


@pytest.fixture
def busy():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_is_free_until_someone_listens_on_it(busy):
    assert why_not_free("127.0.0.1", free_port()) is None
    assert why_not_free("127.0.0.1", busy) == "Address already in use"
    assert why_not_free("0.0.0.0", busy) == "Address already in use"


def test_a_port_is_free_as_soon_as_its_last_user_has_closed_it():
    """Connections that the server closed first linger for a minute."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            client.recv(1)
    assert why_not_free("127.0.0.1", port) is None


def test_a_given_port_that_is_in_use_is_refused_before_anything_starts(busy, tmp_path):
    words = ["-n", "2", "--port", str(busy), "--", "touch", str(tmp_path / "started")]
    with pytest.raises(ConfigurationError, match=f"port {busy}: Address already in use"):
        launch(words)
    assert not (tmp_path / "started").exists()
    assert launch(["--port", str(busy), "--", "true"]) == 0  # one process has no need of it


@pytest.mark.parametrize("host", ["127.0.0.1", "some.other.host"])
def test_the_coordinator_refuses_an_address_in_use(busy, host, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setattr(
        coordination.jax.distributed,
        "initialize",
        lambda *_, **__: pytest.fail("it crashes"),
    )
    with pytest.raises(ConfigurationError, match=r"cannot listen on .*already in use"):
        coordination.join(ProcessInfo(f"{host}:{busy}", 0, 2))
    assert os.listdir(tmp_path) == ["port-taken"]


def test_if_the_port_is_taken_at_the_last_moment_another_one_is_tried(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # two processes need two GPUs
    note = "$MILLRACE_LAUNCH_DIR/port-taken"
    code = (
        f'echo "$MILLRACE_COORDINATOR" >> {tmp_path}/tried; '
        f'test $(wc -l < {tmp_path}/tried) -gt 2 && exit 0; touch "{note}"; exit 2'
    )
    config = LaunchConfig(num_instances=2)
    launcher = Launcher(
        config, ["sh", "-c", f"test $MILLRACE_PROCESS_ID = 1 || {{ {code}; }}"]
    )
    assert launcher.run() == 0
    tried = (tmp_path / "tried").read_text().split()
    assert len(set(tried)) == 3
    assert capfd.readouterr().err.count("another program has taken the port") == 2
