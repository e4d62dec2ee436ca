"""GPUs, NUMA cores and ports that the launcher hands out."""

import os
import socket
import subprocess
import sys

import pytest

from millrace.config import ConfigurationError
from millrace.distributed import coordination
from millrace.distributed.environment import ProcessInfo
from millrace.distributed.hardware import (
    assign_gpus,
    find_free_port,
    get_port_error,
    numa_cores,
    pin_to_cores,
    uses_gpu,
)
from millrace.distributed.launcher import Launcher, launch
from millrace.distributed.options import LaunchConfig


def test_gpus_are_divided_among_processes_or_too_few():
    four = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert uses_gpu(four) and not uses_gpu(four | {"JAX_PLATFORMS": "cpu"})
    assert [assign_gpus(n, 2, 2, four) for n in range(2)] == ["4,5", "6,7"]
    with pytest.raises(ConfigurationError, match="need 8 GPUs, but there are 4"):
        assign_gpus(0, 4, 2, four)


def test_a_process_started_for_a_numa_node_runs_on_its_cores(tmp_path):
    some = min(os.sched_getaffinity(0))
    for number, cores in enumerate((str(some), "4000-4003")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    assert numa_cores(tmp_path) == [{some}]  # we may not use those of the other node
    code = "import os; print(os.sched_getaffinity(0))"
    with pin_to_cores({some}):
        printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == str({some})
    assert len(os.sched_getaffinity(0)) >= 1


@pytest.fixture
def busy():
    """A port that another program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_is_free_until_someone_listens_on_it(busy):
    assert get_port_error("127.0.0.1", find_free_port()) is None
    assert get_port_error("127.0.0.1", busy) == "Address already in use"
    assert get_port_error("0.0.0.0", busy) == "Address already in use"


def test_a_port_is_free_as_soon_as_its_last_user_has_closed_it():
    """Connections that the server closed first stay in TIME_WAIT for a minute."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            client.recv(1)
    assert get_port_error("127.0.0.1", port) is None


def test_a_port_option_in_use_is_refused_before_anything_starts(busy, tmp_path):
    args = ["-n", "2", "--port", str(busy), "--", "touch", str(tmp_path / "started")]
    with pytest.raises(ConfigurationError, match=f"port {busy}: Address already in use"):
        launch(args)
    assert not (tmp_path / "started").exists()
    assert launch(["--port", str(busy), "--", "true"]) == 0  # a single process ignores it


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
    record = "$MILLRACE_LAUNCH_DIR/port-taken"
    code = (
        f'echo "$MILLRACE_COORDINATOR" >> {tmp_path}/tried; '
        f'test $(wc -l < {tmp_path}/tried) -gt 2 && exit 0; touch "{record}"; exit 2'
    )
    config = LaunchConfig(num_instances=2)
    launcher = Launcher(
        config, ["sh", "-c", f"test $MILLRACE_PROCESS_ID = 1 || {{ {code}; }}"]
    )
    assert launcher.run() == 0
    tried = (tmp_path / "tried").read_text().split()
    assert len(set(tried)) == 3
    assert capfd.readouterr().err.count("another program has taken the port") == 2
