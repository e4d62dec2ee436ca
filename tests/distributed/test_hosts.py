"""Two hosts, each in a network namespace: one run, a cut cable, a lost host."""

import ast
import re
import shutil
import subprocess
import time
from pathlib import Path

import network_hosts
import pytest
from launched import (
    alone,
    assert_same_history,
    assert_same_weights,
    end_all,
    finish,
    summary,
    wait_for,
)

import millrace

PORT = 12345
NAMES = ("node-a", "node-b")
SLOWLY = ("--delay", "0.1", "--num-epochs", "5")


@pytest.fixture
def hosts(request):
    if (reason := network_hosts.why_not()) is not None:
        pytest.skip(reason)
    made = network_hosts.Hosts(**getattr(request, "param", {}))
    yield made
    end_all()
    made.close()


def start_both(hosts, directory, *args, wrappers=None):
    """Start one process with two devices on each host.

    ``wrappers`` has words in front of the command by host.
    """
    devices = ("--virtual-devices", "2", "--num-replicas", "4", "--num-processes", "2")
    place = ("--coordinator", f"{NAMES[0]}:{PORT}")
    return [
        hosts.start(
            name,
            [
                *(wrappers or {}).get(name, ()),
                *alone(directory, *devices, *place, "--process-id", str(number), *args),
            ],
        )
        for number, name in enumerate(NAMES)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "hosts", [{}, {"own_name_is_loopback": True}], indirect=True, ids=["plain", "Debian"]
)
def test_two_hosts_give_the_weights_of_one_process(hosts, tmp_path, undisturbed):
    for process in start_both(hosts, tmp_path / "run"):
        finish(process)
    assert_same_weights(tmp_path / "run", undisturbed)
    assert_same_history(tmp_path / "run", undisturbed)


def cut_for(hosts, seconds):
    hosts.cut("node-b")
    time.sleep(seconds)
    hosts.connect("node-b")


@pytest.mark.slow
def test_a_cable_cut_for_30_s_ends_the_run_plainly_and_it_resumes(
    hosts, tmp_path, undisturbed
):
    directory = tmp_path / "run"
    both = start_both(hosts, directory, *SLOWLY)
    wait_for(directory, 9, both[0])
    cut_for(hosts, 30)
    for process, other in zip(both, (1, 0), strict=True):
        line = (
            rf"Process {other} \(pid \d+ on {NAMES[other]}\) has sent no heartbeat for 30"
        )
        assert re.search(line, finish(process, 1))
    assert summary(directory)["status"] == "failed"
    for process in start_both(hosts, directory, *SLOWLY, "--auto-resume"):
        finish(process)
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


@pytest.mark.slow
def test_the_run_continues_after_a_shorter_cut(hosts, tmp_path, undisturbed):
    directory = tmp_path / "run"
    both = start_both(hosts, directory, *SLOWLY)
    wait_for(directory, 9, both[0])
    cut_for(hosts, 10)
    for process in both:
        finish(process)
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 1])
def test_a_lost_host_is_named_within_the_documented_time(
    gone, hosts, tmp_path, undisturbed
):
    directory = tmp_path / "run"
    both = start_both(hosts, directory, *SLOWLY)
    wait_for(directory, 9, both[0])
    hosts.cut(NAMES[gone])
    both[gone].kill()
    began = time.monotonic()
    output = finish(both[1 - gone], 1)
    assert 25 < time.monotonic() - began < 40
    name = rf"Process {gone} \(pid {both[gone].pid} on {NAMES[gone]}\)"
    assert re.search(rf"{name} has sent no heartbeat for 30 s. Stopping.", output)
    assert "Traceback" not in output
    if gone == 1:  # process 0 writes the summary
        assert "Process 1" in summary(directory)["error"]
    hosts.connect(NAMES[gone])
    for process in start_both(hosts, directory, "--auto-resume"):
        finish(process)
    assert_same_weights(directory, undisturbed)


@pytest.mark.slow
def test_hosts_whose_clocks_differ_by_a_day_train_one_run(hosts, tmp_path, undisturbed):
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed: apt-get install -y faketime")
    tomorrow = ("faketime", "-f", "+1d")
    told = subprocess.run([*tomorrow, "date", "+%s"], capture_output=True, check=True)
    assert int(told.stdout) > time.time() + 86000
    for name in NAMES:
        directory = tmp_path / name
        for process in start_both(hosts, directory, wrappers={name: tomorrow}):
            finish(process)
        assert_same_weights(directory, undisturbed)


def test_no_decision_compares_the_clocks_of_two_hosts():
    """The clock on the wall is only printed; waiting is measured with our own clock."""
    folder = Path(millrace.__file__).parent / "distributed"
    read = {
        (path.name, node.attr)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "time"
    }
    assert ("heartbeat.py", "monotonic") in read
    assert {attr for _, attr in read} == {"monotonic", "sleep", "strftime"}
    imported = {
        ast.unparse(node)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")
    }
    assert not imported
