"""A run in two workers of Ray that ends when one of them is killed, and is started again.

usage: ray_run.py RUN_DIRECTORY
"""

import runpy
import socket
import sys
import time
from pathlib import Path

import ray

SCRIPT = Path(__file__).with_name("launched_run.py")


@ray.remote
class Worker:
    """One process of the run of ``launched_run.py``."""

    def find_address(self) -> str:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, number: int, coordinator: str, directory: str) -> int:
        place = ("--coordinator", coordinator, "--num-processes", "2")
        own = ("--virtual-devices", "2", "--num-replicas", "4", "--auto-resume")
        sys.argv = [str(SCRIPT), "--run-dir", directory, *own, *place]
        sys.argv += ["--process-id", str(number), "--delay", "0.1"]
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        raise AssertionError("a command ends with its status")


def start(directory: Path):
    workers = [Worker.remote() for _ in range(2)]
    coordinator = ray.get(workers[0].find_address.remote())
    return workers, [
        worker.train.remote(number, coordinator, str(directory))
        for number, worker in enumerate(workers)
    ]


def wait_for_update(directory: Path, update: int) -> None:
    path = directory / "metrics.jsonl"
    while not (path.exists() and f'"update": {update},' in path.read_text()):
        time.sleep(0.1)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    ray.init(include_dashboard=False)
    workers, results = start(directory)
    wait_for_update(directory, 9)
    ray.kill(workers[1])
    try:
        ray.get(results[0])
    except ray.exceptions.RayActorError:
        print("the other worker has ended, too")
    _, results = start(directory)
    print("statuses", ray.get(results))
    ray.shutdown()
