"""``millrace devices``: devices, measurements and suggested options."""

import json

import jax
import numpy as np
import pytest

from millrace.cli import main
from millrace.commands.devices import DeviceReport, suggest_options
from millrace.program.roofline import CopyRates, MatmulRate, measure_copy, measure_matmul


def rates(**flops: float) -> dict[str, MatmulRate]:
    return {
        name: MatmulRate(dtype=name, size=64, flops_per_second=value)
        for name, value in flops.items()
    }


def report(
    platform: str, count: int, gain: float, to_device: float | None = None
) -> DeviceReport:
    devices = [
        {"number": n, "platform": platform, "kind": "x", "memory_bytes": 2**30}
        for n in range(count)
    ]
    copy = CopyRates(num_bytes=8, on_device=1.0, to_device=to_device, from_device=1.0)
    return DeviceReport(devices, {}, rates(float32=1e12, bfloat16=gain * 1e12), copy)


@pytest.mark.cpu("compares with NumPy")
def test_the_measured_rate_is_similar_to_that_of_numpy():
    rate = measure_matmul(size=512)
    matrix = np.ones((512, 512), np.float32)
    import time

    best = np.inf
    for _ in range(5):
        started = time.perf_counter()
        _ = matrix @ matrix
        best = min(best, time.perf_counter() - started)
    expected = 2 * 512**3 / best
    # Threads, libraries and other users of the machine differ, but not by this much.
    assert expected / 30 < rate.flops_per_second < expected * 30


def test_rates_can_be_measured_under_a_transfer_guard():
    with jax.transfer_guard("disallow"):
        copies = measure_copy(num_bytes=2**20)
        measure_matmul(size=64, dtype="bfloat16")
    assert copies.num_bytes == 2**20
    one_memory = jax.default_backend() == "cpu"
    assert (copies.to_device is None) == (copies.from_device is None) == one_memory
    assert 1e8 < copies.on_device < 1e13


def test_sixteen_bits_are_suggested_where_they_are_faster():
    assert "--precision 16.32" in suggest_options(report("gpu", 1, gain=8))["precision"]
    assert suggest_options(report("gpu", 1, gain=1.1))["precision"].startswith("32.32")
    assert suggest_options(report("cpu", 1, gain=2))["precision"].startswith("32.32")


def test_replicas_are_suggested_for_several_devices_but_not_for_virtual_ones():
    assert "--num-replicas 4" in suggest_options(report("gpu", 4, gain=8))["plan"]
    assert "--num-replicas" not in suggest_options(report("cpu", 4, gain=1))["plan"]


def test_the_number_of_images_that_can_be_copied_is_estimated():
    advice = suggest_options(report("gpu", 1, gain=8, to_device=6_021_120_000))
    assert "10,000 images" in advice["transfer"]


def devices(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["devices", *args])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_the_command_shows_the_devices(capsys):
    assert devices("--measure", "False") == 0
    shown = capsys.readouterr().out
    assert "device 0" in shown and f"({jax.default_backend()})" in shown
    assert "memory" in shown and "suggested plan" in shown
    assert "FLOP" not in shown


def test_the_command_prints_json(capsys, monkeypatch):
    def rate(device, dtype):
        del device
        return MatmulRate(dtype=dtype, size=8, flops_per_second=1e9)

    monkeypatch.setattr("millrace.program.roofline.measure_matmul", rate)
    assert devices("--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["devices"]) == jax.device_count()
    assert printed["matmul"]["bfloat16"]["flops_per_second"] == 1e9
    assert printed["copy"]["on_device"] > 0
    assert {"precision", "plan"} <= set(printed["suggested"])
