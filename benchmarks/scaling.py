"""How fast training would be on more devices than there are here.

``python benchmarks/scaling.py`` prints the tables of docs/scaling.md. An update takes
what it takes on one device, measured, and then the exchange of gradients, which this
runtime makes once per update, after the last micro-batch, so that nothing hides it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from millrace.schedule.simulate import Costs, Link, ring_all_reduce_seconds, simulate
from millrace.schedule.stages import place_stages
from millrace.schedule.table import build_table

DEVICES = (1, 2, 4, 8, 16, 64, 256, 1024)


class Network(NamedTuple):
    """A network as one device trains it."""

    name: str
    parameters: int
    micro_batch: int
    images_per_second: float
    """Measured on one device, with this micro-batch and no accumulation."""
    measured_in: str
    """The report, in benchmarks/results."""

    @property
    def seconds(self) -> float:
        """Of one micro-batch, forward and backward, with the weight update."""
        return self.micro_batch / self.images_per_second


class Cluster(NamedTuple):
    """Nodes of devices: a fast link inside, a slower one between each two's devices."""

    devices_per_node: int
    inside: Link
    between: Link


NETWORKS = (
    Network("resnet50", 25_557_032, 256, 7285, "2026-11-15-cnn_resnet50_gpu-NVIDIA-H200"),
    Network("cifar_resnet56", 853_018, 128, 28640, "2026-11-15-cifar_accuracy-NVIDIA-H200"),
)

H200_CLUSTER = Cluster(
    # 900 GB/s of NVLink both ways together; four fifths of one way reach an all-reduce.
    devices_per_node=8,
    inside=Link(bytes_per_second=360e9, latency_seconds=5e-6),
    # A network card of 400 Gbit/s for every GPU, of which nine tenths are reached.
    between=Link(bytes_per_second=45e9, latency_seconds=15e-6),
)

BYTES_PER_GRADIENT = 4  # they are exchanged in float32


def all_reduce_seconds(num_bytes: float, num_devices: int, cluster: Cluster) -> float:
    """Return the time of an all-reduce over devices that fill node after node.

    Inside a node the devices first add up a part each; with their like in the other
    nodes they add up those parts; then every part goes to all devices of the node.
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
    """Predict the speed of replicas, one on each device."""
    size = network.parameters * BYTES_PER_GRADIENT
    exchange = all_reduce_seconds(size, num_devices, cluster)
    seconds = accumulation * network.seconds + exchange
    return num_devices * accumulation * network.micro_batch / seconds


def piped_images_per_second(
    network: Network,
    num_devices: int,
    output_bytes: Sequence[float],
    *,
    accumulation: int,
    cluster: Cluster = H200_CLUSTER,
) -> float:
    """Predict the speed of replicas that are pipelines of equal stages.

    Args:
        network: What one device trains.
        num_devices: A multiple of the stages.
        output_bytes: What each stage hands to the next, in a micro-batch; the last: 0.
        accumulation: Micro-batches in an update.
        cluster: Whose nodes hold whole pipelines.
    """
    count = len(output_bytes)
    replicas = num_devices // count
    # The same parts of all pipelines exchange with one another.
    size = network.parameters * BYTES_PER_GRADIENT / count
    own = cluster._replace(devices_per_node=cluster.devices_per_node // count)
    costs = Costs(
        forward=(network.seconds / 3 / count,) * count,
        backward=(network.seconds * 2 / 3 / count,) * count,
        all_reduce=(all_reduce_seconds(size, replicas, own),) * count,
        output_bytes=tuple(output_bytes),
    )
    table = build_table("grouped", place_stages([1] * count, None), accumulation)
    seconds = simulate(table, costs, cluster.inside).seconds
    return replicas * accumulation * network.micro_batch / seconds


def shared_cores_seconds(
    alone: float, num_processes: int, num_cores: int, num_bytes: float, link: Link
) -> float:
    """Predict an update of processes with a core each, or fewer, on one machine.

    Args:
        alone: Seconds of an update of one process that has a core to itself.
        num_processes: Each with as much work as that one.
        num_cores: They share these evenly.
        num_bytes: Of gradients.
        link: Between two processes.
    """
    turns = max(1.0, num_processes / num_cores)
    return turns * alone + ring_all_reduce_seconds(num_bytes, num_processes, link)


def replicas_table(devices: Sequence[int] = DEVICES) -> str:
    """Return images/s and efficiency of replicas, a row for each number of devices."""
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
    return _table(["devices", *names], rows)


_RESNET50_CUTS = (
    256 * 56 * 56 * 256 * 2,
    256 * 28 * 28 * 512 * 2,
    256 * 14 * 14 * 1024 * 2,
)
"""Bytes between the four blocks of ResNet-50, for a micro-batch of 256 in bfloat16."""


def pipelines_table(devices: Sequence[int] = DEVICES) -> str:
    """Return the same of ResNet-50 in pipelines of four devices, as Graphcore had them."""
    network = NETWORKS[0]
    rows = []
    for count in (number for number in devices if number >= 4):
        cells = [str(count)]
        for m in (16, 64, 256):
            speed = piped_images_per_second(
                network, count, (*_RESNET50_CUTS, 0), accumulation=m
            )
            ideal = count * network.images_per_second
            cells.append(f"{speed:,.0f} ({speed / ideal:.0%})")
        rows.append(cells)
    return _table(["devices", *(f"accumulation {m}" for m in (16, 64, 256))], rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---:"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(replicas_table(), pipelines_table(), sep="\n\n")
