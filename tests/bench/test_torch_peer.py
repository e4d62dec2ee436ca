"""The protocol with the PyTorch process, and PyTorch itself if it is installed."""

import importlib.util
import json
import os
import stat
import sys
import textwrap

import jax
import pytest

from millrace.apps.cnn.models.catalog import build_layers
from millrace.bench import applications, session, torch_models
from millrace.bench.applications import find_torch_model
from millrace.bench.session import Session
from millrace.bench.spec import Entry, parse_command
from millrace.bench.torch_peer import PeerFailed, TorchPeer, TorchProcess, require_torch
from millrace.bench.torch_process import measure_calls, warm_up
from millrace.cli import main
from millrace.nn.layers import init_shapes, num_parameters

WORK = {"kind": "training", "model": "a", "batch": 4}


def fake_python(folder, body):
    """Return a program that runs like Python and answers requests with `body`."""
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
    logged = []
    peer.prepare(logged.append)
    assert peer.facts == {"torch": "9.9"}
    first = peer.measure("first", 3, 0.1)["compiled"]
    assert (first["median"], first["lowest"], first["highest"]) == (2.0, 1.0, 3.0)
    second = peer.measure("second", 3, 0.1)
    assert second["eager"]["median"] == 2.0
    assert second["compiled"] == {"error": "RuntimeError: no compiler"}
    peer.close()
    assert any("no compiler" in line for line in logged)


def test_a_failed_preparation_is_repeated_before_measuring(tmp_path):
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


def test_a_process_that_dies_is_an_error_with_its_last_line(tmp_path):
    python = fake_python(tmp_path, "sys.exit('no torch here')")
    with pytest.raises(PeerFailed, match="ended with 1 no torch here"):
        TorchProcess(python, "cpu")
    peer = TorchPeer(python, "cpu", {"first": WORK})
    peer.prepare(lambda _: None)
    assert "no torch here" in peer.measure("first", 1, 0.1)["eager"]["error"]
    with pytest.raises(PeerFailed, match="cannot be run"):
        TorchProcess(str(tmp_path / "nowhere"), "cpu")


class Calls:
    """Calls that take the given times; the last time repeats."""

    def __init__(self, *seconds):
        self._seconds, self.counts = list(seconds), []

    def __call__(self, count):
        self.counts.append(count)
        left = self._seconds
        return sum(left.pop(0) if len(left) > 1 else left[0] for _ in range(count))


def test_pytorch_is_warm_when_two_values_in_a_row_agree():
    slow_at_first = Calls(*[9.0] * 5, *[5.0] * 5, *[2.0] * 5, 1.0)
    assert warm_up(slow_at_first, seconds=1000.0) == pytest.approx(1.0, rel=0.03)
    assert warm_up(Calls(1.0), seconds=10.0) == 1.0


def test_a_warm_up_ends_even_if_no_two_values_agree():
    slower = Calls(*(2.0**n for n in range(20) for _ in range(5)))
    warm_up(slower, seconds=100.0)
    assert slower.counts == [5] * 5  # 5, 10, 20, 40 and 80 s
    counts = []

    def jumping(count):
        counts.append(count)
        return count * (1e-6 if len(counts) % 2 else 2e-6)

    warm_up(jumping, seconds=1.0)
    assert 10 < len(counts) <= 21


def test_a_pytorch_value_covers_several_calls_even_if_they_are_slow():
    slow = Calls(3.0)
    assert measure_calls(slow, repeat=4, seconds=1.0) == [3.0] * 4
    assert min(slow.counts) >= 5
    quick = Calls(1 / 128)
    measure_calls(quick, repeat=4, seconds=4.0)
    assert quick.counts[-4:] == [128] * 4


TORCH = """
__version__ = "9.9"
def set_float32_matmul_precision(_): pass
def get_num_threads(): return 1
"""


def test_torchvision_is_optional(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "torchvision.py").write_text("raise ImportError('no torchvision')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    require_torch(sys.executable, "cpu")
    process = TorchProcess(sys.executable, "cpu")
    assert process.facts["torch"] == "9.9"
    process.close()


def test_without_pytorch_nothing_is_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Session, "run", lambda _: pytest.fail("too late"))
    with pytest.raises(SystemExit) as left:
        main(["bench", "vcd_small", "--peer", "torch", "--out", str(tmp_path / "out")])
    assert left.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    assert f"no PyTorch for {platform}" in error and "no torch here" in error
    assert f"{sys.executable} -m pip install torch torchvision" in error
    assert not (tmp_path / "out").exists()


DIGITS = "cnn validate --dataset digits --synthetic-data --num-batches 3"


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Measure inference next to a PyTorch that answers with `body`."""
    monkeypatch.setattr(session, "measure_roofline", lambda _: {})

    def run(body):
        spec, out = tmp_path / "spec.yml", tmp_path / "out"
        spec.write_text(json.dumps({"infer": {"command": DIGITS, "batch_sizes": [2]}}))
        arguments = [
            "--spec",
            spec,
            "--out",
            out,
            "--seconds",
            0.02,
            "--max-seconds",
            1,
            "--repeat",
            1,
        ]
        arguments += ["--peer", "torch", "--torch-python", fake_python(tmp_path, body)]
        with pytest.raises(SystemExit) as left:
            main(["bench", *map(str, arguments)])
        (entry,) = json.loads((out / "results.json").read_text())["entries"]
        return left.value.code, entry, (out / "results.md").read_text()

    return run


def test_an_entry_without_a_pytorch_model_says_so(compare, capsys):
    status, entry, text = compare(GOOD)
    assert status == 0
    assert entry["no_ratio"] == "there is no PyTorch version of this network"
    reason = "not compared with PyTorch: there is no PyTorch version of this network"
    assert f"infer_b2: {reason}" in capsys.readouterr().err
    assert f"infer_b2 is {reason}." in text


def test_an_entry_whose_peer_fails_says_why_and_sets_the_status(
    compare, capsys, monkeypatch
):
    monkeypatch.setattr(applications, "find_torch_model", lambda _: "resnet18")
    status, entry, text = compare("""
    answer = {"torch": "9.9"}
    if request["do"] != "facts":
        answer = {"error": "ImportError: no\\ntorchvision."}
    """)
    assert status == 1 and "ratio" not in entry
    why = "ImportError: no torchvision"
    assert entry["no_ratio"] == f"eager: {why}; compiled: {why}"
    assert f"infer_b2 is not compared with PyTorch: eager: {why}; compiled" in text
    log = capsys.readouterr().err
    assert f"infer_b2: not compared with PyTorch: eager: {why}" in log
    assert "0.000" not in log


@pytest.mark.parametrize("size", ["18", "34", "50", "101", "152"])
def test_every_resnet_has_a_torchvision_model(size):
    command = f"cnn train --model resnet --model-size {size} --dataset imagenet"
    config = parse_command(Entry(name="x", command=f"{command} --batch-norm"))
    assert find_torch_model(config) == f"resnet{size}"


@pytest.mark.parametrize("model", ["cifar_resnet8", "cifar_resnet20", "cifar_resnet56"])
def test_residual_networks_for_cifar_have_a_pytorch_version(model):
    command = f"cnn train --model {model} --dataset cifar10 --synthetic-data"
    assert find_torch_model(parse_command(Entry(name="x", command=command))) == model
    command += " --norm-layer '{name: group_norm, num_groups: 4}'"
    assert find_torch_model(parse_command(Entry(name="x", command=command))) is None


HERE = importlib.util.find_spec("torchvision") is not None
PYTHON = os.environ.get("MILLRACE_TORCH_PYTHON", sys.executable if HERE else "")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="no torchvision; set MILLRACE_TORCH_PYTHON")
@pytest.mark.parametrize("kind", ["training", "inference", "autoencoder", "vcd"])
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
        "samples": 20,
        "pixels": 16,
        "hidden": 8,
        "z_dim": 3,
        "hmc_steps": 2,
        "leapfrog_steps": 3,
    }
    process = TorchProcess(PYTHON, "cpu")
    request = {"name": "x", "compiled": False}
    process.ask(do="prepare", settings={**work, "device": "cpu"}, **request)
    figures = process.ask(do="measure", repeat=2, seconds=0.2, **request)
    process.close()
    assert len(figures["samples_per_second"]) == 2
    assert (
        ("latency_ms" in figures) == ("latency_calls" in figures) == (kind == "inference")
    )


@pytest.mark.slow
@pytest.mark.parametrize("depth", [8, 20])
def test_the_residual_network_for_cifar_has_our_number_of_parameters(depth):
    torch = pytest.importorskip("torch")
    name = f"cifar_resnet{depth}"
    theirs = torch_models.build_cnn(name, 10)
    assert theirs(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    ours = init_shapes(
        build_layers(name, 10), jax.ShapeDtypeStruct((1, 32, 32, 3), "float32")
    )
    assert sum(p.numel() for p in theirs.parameters()) == num_parameters(ours[0])
