"""docs/scaling.md shows the tables of benchmarks/scaling.py, whose model is right."""

import re
from pathlib import Path

import pytest
import scaling
from scaling import (
    H200_CLUSTER,
    NETWORKS,
    Cluster,
    all_reduce_seconds,
    images_per_second,
    pipeline_images_per_second,
    shared_cores_seconds,
)

from millrace.schedule.simulate import Link

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scaling.md").read_text()
REPORT = "2026-11-16-launch_scaling-cpu"


def read_report(name: str) -> str:
    return (ROOT / "benchmarks/results" / f"{name}.md").read_text()


def read_rows(text: str) -> dict[str, list[str]]:
    """Return the cells of all tables by the first cell of their rows."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line[:1] == "|"]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}


@pytest.mark.parametrize(
    "table",
    [
        "format_replicas_table",
        "format_pipelines_table",
        "format_files_table",
    ],
)
def test_the_page_shows_the_tables_of_the_script(table):
    assert getattr(scaling, table)() in PAGE


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_single_device_speeds_are_those_of_the_reports(network):
    report = read_report(network.measured_in)
    assert f"{network.images_per_second:,.0f}" in report
    assert network.measured_in in PAGE


@pytest.mark.parametrize("files", scaling.IMAGE_FILES, ids=lambda files: files.name)
def test_speeds_of_image_files_are_those_of_the_report(files):
    report = read_report(files.measured_in)
    line = next(
        line for line in report.splitlines() if f"{files.images_per_second:,} " in line
    )
    assert f" {files.cores} workers" in line
    assert f"{files.images_per_second:,}" in PAGE


COMPARED = {
    "1 process, the other core idle": "1 process",
    "2 independent processes, no exchange": "2 apart, no exchange",
    "2 processes": "2 processes",
    "4 processes": "4 processes",
    "1 process with 2 virtual devices": "1 process, 2 devices",
}


def test_the_comparison_on_this_page_is_that_of_its_report():
    page, report = read_rows(PAGE), read_rows(read_report(REPORT))
    for ours, theirs in COMPARED.items():
        measured, predicted, ratio = page[ours]
        assert [measured, predicted] == report[theirs][:2]
        if predicted:
            quotient = float(measured.split()[0]) / float(predicted)
            assert float(ratio) == round(quotient, 2)
    link = re.search(r"processes: (.* GB/s) after (\d+) us", read_report(REPORT))
    assert link is not None
    assert f"{link[1]} and a latency of {link[2]} us" in PAGE


@pytest.mark.parametrize("count", [2, 4])
def test_the_predictions_of_that_report_are_those_of_the_model(count):
    rows = read_rows(read_report(REPORT))
    apart = float(rows["2 apart, no exchange"][0].split()[0]) / 1000
    link = Link(bytes_per_second=0.81e9, latency_seconds=86e-6)
    predicted = shared_cores_seconds(apart, count, 2, 301e3, link)
    shown = float(rows[f"{count} processes"][1])
    assert 1000 * predicted == pytest.approx(shown, abs=0.2)


@pytest.mark.parametrize(
    ("name", "parameters"), [(network.name, network.parameters) for network in NETWORKS]
)
def test_the_networks_have_the_given_number_of_parameters(name, parameters):
    import numpy as np

    from millrace.apps.cnn.models.catalog import build_layers
    from millrace.nn.layers import init_shapes, num_parameters

    side, classes = (32, 10) if name.startswith("cifar") else (224, 1000)
    model = build_layers(name, num_classes=classes)
    weights, _ = init_shapes(model, np.zeros((1, side, side, 3), np.float32))
    assert num_parameters(weights) == parameters


def test_the_exchange_takes_no_time_on_one_device_and_more_on_more_devices():
    assert all_reduce_seconds(1e8, 1, H200_CLUSTER) == 0
    times = [all_reduce_seconds(1e8, n, H200_CLUSTER) for n in scaling.DEVICES]
    assert times == sorted(times)


def test_the_time_of_an_all_reduce_matches_the_closed_form():
    cluster = Cluster(2, Link(bytes_per_second=10.0), Link(bytes_per_second=1.0))
    # 2 devices: each sends half of 40 bytes twice, at 10 bytes/s.
    assert all_reduce_seconds(40, 2, cluster) == pytest.approx(4.0)
    # 4 nodes: in addition, 20 bytes go around in 6 steps of 5 bytes, at 1 byte/s.
    assert all_reduce_seconds(40, 8, cluster) == pytest.approx(4.0 + 30.0)


def test_accumulation_hides_the_exchange():
    network = NETWORKS[0]
    assert images_per_second(network, 1) == pytest.approx(network.images_per_second)
    accumulated = images_per_second(network, 1024, accumulation=64)
    assert images_per_second(network, 1024) < accumulated
    assert accumulated < 1024 * network.images_per_second


def test_with_free_links_a_pipeline_loses_only_its_fill_and_drain():
    network = NETWORKS[0]
    free = Cluster(8, Link(), Link())
    speed = pipeline_images_per_second(
        network, 4, (0, 0, 0, 0), accumulation=16, cluster=free
    )
    ideal = 4 * network.images_per_second
    assert speed == pytest.approx(ideal * 16 / (16 + 3))


def test_processes_that_share_cores_take_turns():
    link = Link(bytes_per_second=100.0, latency_seconds=0.01)
    assert shared_cores_seconds(1.0, 1, 2, 100, link) == 1.0
    assert shared_cores_seconds(1.0, 2, 2, 100, link) == pytest.approx(1.0 + 1.02)
    assert shared_cores_seconds(1.0, 4, 2, 100, link) == pytest.approx(2.0 + 6 * 0.26)
