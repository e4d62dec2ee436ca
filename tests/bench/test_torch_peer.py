"""The protocol with PyTorch's process, and PyTorch itself where there is one."""

import importlib.util
import os
import stat
import sys
import textwrap

import pytest

from millrace.bench.torch_peer import PeerFailed, TorchPeer, TorchProcess

WORK = {"kind": "training", "model": "a", "batch": 4}


def fake_python(folder, body):
    """A program that is called like Python and answers as `body` says."""
    script = folder / "fake.py"
    script.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    print('a library prints something')\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + "\n    print(json.dumps(answer), flush=True)\n"
    )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    return str(python)


GOOD = """
if request["do"] == "facts":
    answer = {"torch": "9.9"}
elif request["do"] == "prepare":
    answer = {"prepare_seconds": 1.0}
    if request["compiled"] and request["name"] == "second":
        answer = {"error": "RuntimeError: no compiler"}
else:
    answer = {"samples_per_second": [1.0, 3.0, 2.0]}
"""


def test_each_variant_is_prepared_then_measured(tmp_path):
    python = fake_python(tmp_path, GOOD)
    peer = TorchPeer(python, "cpu", {"first": WORK, "second": WORK})
    said = []
    peer.prepare(said.append)
    assert peer.facts == {"torch": "9.9"}
    assert peer.measure("first", 3, 0.1)["compiled"]["median"] == 2.0
    found = peer.measure("second", 3, 0.1)
    assert found["eager"]["median"] == 2.0
    assert found["compiled"] == {"error": "RuntimeError: no compiler"}
    peer.close()
    assert any("no compiler" in line for line in said)


def test_what_failed_beside_others_is_tried_once_more_alone(tmp_path):
    body = """
    if request["do"] == "facts":
        tries, answer = 0, {"torch": "9.9"}
    elif request["do"] == "prepare":
        tries += 1
        failed = {"error": "OutOfMemoryError"}
        answer = failed if tries == 1 else {"prepare_seconds": 1.0}
    else:
        answer = {"samples_per_second": [5.0]}
    """
    peer = TorchPeer(fake_python(tmp_path, body), "cpu", {"first": WORK})
    peer.prepare(lambda _: None)
    assert peer.measure("first", 1, 0.1)["eager"]["median"] == 5.0
    peer.close()


def test_a_process_that_dies_is_an_error_with_its_last_words(tmp_path):
    python = fake_python(tmp_path, "sys.exit('no torch here')")
    with pytest.raises(PeerFailed, match="ended with 1 no torch here"):
        TorchProcess(python, "cpu")
    peer = TorchPeer(python, "cpu", {"first": WORK})
    peer.prepare(lambda _: None)
    assert "no torch here" in peer.measure("first", 1, 0.1)["eager"]["error"]
    with pytest.raises(PeerFailed, match="cannot be run"):
        TorchProcess(str(tmp_path / "nowhere"), "cpu")


HERE = importlib.util.find_spec("torchvision") is not None
PYTHON = os.environ.get("MILLRACE_TORCH_PYTHON", sys.executable if HERE else "")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="no torchvision; MILLRACE_TORCH_PYTHON names one")
@pytest.mark.parametrize("kind", ["training", "inference", "autoencoder"])
def test_pytorch_does_the_same_work(kind):
    work = {
        "kind": kind,
        "model": "resnet18",
        "batch": 2,
        "size": 32,
        "classes": 10,
        "compute": "float32",
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "label_smoothing": 0.1,
        "widths": [50, 8, 16, 16],
        "dropout": 0.5,
        "rated": 5,
        "refeeding": "joint",
    }
    process = TorchProcess(PYTHON, "cpu")
    request = {"name": "x", "compiled": False}
    process.ask(do="prepare", settings={**work, "device": "cpu"}, **request)
    found = process.ask(do="measure", repeat=2, seconds=0.2, **request)
    process.close()
    assert len(found["samples_per_second"]) == 2
    assert ("latency_ms" in found) == (kind == "inference")
