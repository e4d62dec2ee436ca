"""docs/scaling.md shows the tables of benchmarks/scaling.py, whose model is right."""

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


@pytest.mark.parametrize("table", ["format_replicas_table", "format_pipelines_table"])
def test_the_page_shows_the_tables_of_the_script(table):
    assert getattr(scaling, table)() in PAGE


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_single_device_speeds_are_those_of_the_reports(network):
    report = (ROOT / "benchmarks/results" / f"{network.measured_in}.md").read_text()
    assert f"{network.images_per_second:,.0f}" in report
    assert network.measured_in in PAGE


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
