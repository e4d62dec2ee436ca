"""Predict the speed of training on more devices; print the tables of docs/scaling.md.

The time of an update is that measured on one device, plus the exchange of gradients. The
runtime exchanges them once per update, after the last micro-batch, so nothing hides it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from millrace.schedule.simulate import Costs, Link, ring_all_reduce_seconds, simulate
from millrace.schedule.stages import place_stages
from millrace.schedule.table import build_table

DEVICES = (1, 2, 4, 8, 16, 64, 256, 1024)


class Network(NamedTuple):
    """A network and its measured speed on one device."""

    name: str
    parameters: int
    micro_batch: int
    images_per_second: float
    """Speed on one device with this micro-batch and no accumulation."""
    measured_in: str
    """Name of the report in benchmarks/results."""

    @property
    def seconds(self) -> float:
        """Time of one micro-batch, forward and backward, with the weight update."""
        return self.micro_batch / self.images_per_second


class Cluster(NamedTuple):
    """Nodes of devices, with a fast link inside and a slower one between nodes."""

    devices_per_node: int
    inside: Link
    between: Link


NETWORKS = (
    Network("resnet50", 25_557_032, 256, 7553, "2026-11-18-image_training-NVIDIA-H200"),
    Network("cifar_resnet56", 853_018, 128, 28640, "2026-11-15-cifar_accuracy-NVIDIA-H200"),
)


class ImageFiles(NamedTuple):
    """Image files, and how fast a host has read and decoded them."""

    name: str
    images_per_second: float
    cores: int
    measured_in: str
    """Name of the report in benchmarks/results."""

    def speed_on(self, cores: int) -> float:
        """Predict the speed of a host with another number of cores for this."""
        return self.images_per_second / self.cores * cores


IMAGE_FILES = (
    ImageFiles("JPEG photographs", 8399, 16, "2026-11-18-image_training-NVIDIA-H200"),
    # One device took no more, so this is the least that eight cores can do.
    ImageFiles(
        "packed with `--short-side 256`", 7559, 8, "2026-11-18-image_training-NVIDIA-H200"
    ),
)

H200_CLUSTER = Cluster(
    # NVLink has 450 GB/s per direction; an all-reduce reaches four fifths of it.
    devices_per_node=8,
    inside=Link(bytes_per_second=360e9, latency_seconds=5e-6),
    # One network card of 400 Gbit/s per GPU; nine tenths are reached.
    between=Link(bytes_per_second=45e9, latency_seconds=15e-6),
)

BYTES_PER_GRADIENT = 4  # exchanged in float32


def all_reduce_seconds(num_bytes: float, num_devices: int, cluster: Cluster) -> float:
    """Return the time of a hierarchical all-reduce over devices that fill node after node.

    It is a reduce-scatter inside each node, an all-reduce of each part between nodes, and
    an all-gather inside each node.
    """
    within = min(num_devices, cluster.devices_per_node)
    nodes = -(-num_devices // cluster.devices_per_node)
    inside = ring_all_reduce_seconds(num_bytes, within, cluster.inside)
    return inside + ring_all_reduce_seconds(num_bytes / within, nodes, cluster.between)


def images_per_second(
    network: Network,
    num_devices: int,
    *,
    accumulation: int = 1,
    cluster: Cluster = H200_CLUSTER,
) -> float:
    """Predict the speed with one replica per device."""
    size = network.parameters * BYTES_PER_GRADIENT
    exchange = all_reduce_seconds(size, num_devices, cluster)
    seconds = accumulation * network.seconds + exchange
    return num_devices * accumulation * network.micro_batch / seconds


def pipeline_images_per_second(
    network: Network,
    num_devices: int,
    output_bytes: Sequence[float],
    *,
    accumulation: int,
    cluster: Cluster = H200_CLUSTER,
) -> float:
    """Predict the speed of replicas that are pipelines of equal stages.

    Args:
        network: Network to train.
        num_devices: A multiple of the number of stages.
        output_bytes: Bytes per micro-batch that each stage sends on; 0 for the last.
        accumulation: Micro-batches per update.
        cluster: A cluster whose nodes hold whole pipelines.
    """
    count = len(output_bytes)
    replicas = num_devices // count
    # A stage exchanges gradients with the same stage of the other pipelines.
    size = network.parameters * BYTES_PER_GRADIENT / count
    stage_cluster = cluster._replace(devices_per_node=cluster.devices_per_node // count)
    costs = Costs(
        forward=(network.seconds / 3 / count,) * count,
        backward=(network.seconds * 2 / 3 / count,) * count,
        all_reduce=(all_reduce_seconds(size, replicas, stage_cluster),) * count,
        output_bytes=tuple(output_bytes),
    )
    table = build_table("grouped", place_stages([1] * count, None), accumulation)
    seconds = simulate(table, costs, cluster.inside).seconds
    return replicas * accumulation * network.micro_batch / seconds


def shared_cores_seconds(
    alone: float, num_processes: int, num_cores: int, num_bytes: float, link: Link
) -> float:
    """Predict the time of an update by processes that share the cores of one machine.

    Args:
        alone: Seconds per update of one process with its own core.
        num_processes: Processes, each with the same work.
        num_cores: Cores, shared evenly.
        num_bytes: Bytes of gradients.
        link: Link between two processes.
    """
    turns = max(1.0, num_processes / num_cores)
    return turns * alone + ring_all_reduce_seconds(num_bytes, num_processes, link)


def format_replicas_table(devices: Sequence[int] = DEVICES) -> str:
    """Return a table of images/s and efficiency by the number of devices."""
    plans = [(network, m) for network in NETWORKS for m in (1, 8)]
    names = [f"{network.name}, accumulation {m}" for network, m in plans]
    rows = []
    for count in devices:
        cells = [str(count)]
        for network, m in plans:
            speed = images_per_second(network, count, accumulation=m)
            single = images_per_second(network, 1, accumulation=m)
            cells.append(f"{speed:,.0f} ({speed / single / count:.0%})")
        rows.append(cells)
    return _format_table(["devices", *names], rows)


_RESNET50_CUTS = (
    256 * 56 * 56 * 256 * 2,
    256 * 28 * 28 * 512 * 2,
    256 * 14 * 14 * 1024 * 2,
)
"""Bytes between the four blocks of ResNet-50, for a micro-batch of 256 in bfloat16."""


def format_pipelines_table(devices: Sequence[int] = DEVICES) -> str:
    """Return the same table for ResNet-50 in pipelines of four devices."""
    network = NETWORKS[0]
    rows = []
    for count in (number for number in devices if number >= 4):
        cells = [str(count)]
        for m in (16, 64, 256):
            speed = pipeline_images_per_second(
                network, count, (*_RESNET50_CUTS, 0), accumulation=m
            )
            ideal = count * network.images_per_second
            cells.append(f"{speed:,.0f} ({speed / ideal:.0%})")
        rows.append(cells)
    return _format_table(["devices", *(f"accumulation {m}" for m in (16, 64, 256))], rows)


def format_files_table(cores: Sequence[int] = (32, 64, 96, 128, 192)) -> str:
    """Return a table of the speed of a node that trains ResNet-50 on image files."""
    devices = H200_CLUSTER.devices_per_node
    most = images_per_second(NETWORKS[0], devices)
    rows = []
    for count in cores:
        cells = [str(count)]
        for files in IMAGE_FILES:
            # One core is left to the process of each device.
            speed = min(most, files.speed_on(count - devices))
            cells.append(f"{speed:,.0f} ({speed / most:.0%})")
        rows.append(cells)
    return _format_table(["cores", *(files.name for files in IMAGE_FILES)], rows)


def _format_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---:"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    tables = format_replicas_table, format_pipelines_table, format_files_table
    print(*(make_table() for make_table in tables), sep="\n\n")
