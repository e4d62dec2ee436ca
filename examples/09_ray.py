"""Train one run in two workers of Ray, with the weights of a single process.

pip install '.[ray]'. A worker is a process of the run. On a cluster, Ray places the workers
on its machines, and the run directory must be on a file system that all of them share.
"""

import os
import socket

import jax
import ray

import millrace as mr

NUM_WORKERS = 2
OPTIONS = {
    "config": "digits_demo",
    "num_epochs": 2,
    "weight_updates_per_epoch": 4,
    "num_replicas": 4,
    "quiet": True,
}


@ray.remote
class Worker:
    """One process of the run."""

    def find_address(self) -> str:
        """Return the address of this machine with a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, number: int, coordinator: str) -> None:
        """Train as process `number`."""
        mr.cnn.train(
            **OPTIONS,
            run_dir=os.path.abspath("runs/ray"),
            virtual_devices=4 // NUM_WORKERS,  # without it, the GPUs that Ray assigns
            process_id=number,
            num_processes=NUM_WORKERS,
            coordinator=coordinator,
        )


ray.init(include_dashboard=False)
workers = [Worker.remote() for _ in range(NUM_WORKERS)]
coordinator = ray.get(workers[0].find_address.remote())
ray.get([worker.train.remote(n, coordinator) for n, worker in enumerate(workers)])
ray.shutdown()

mr.cnn.train(**OPTIONS, run_dir="runs/alone", virtual_devices=4)
two, one = (
    jax.tree.leaves(mr.cnn.load(f"runs/{name}").params) for name in ("ray", "alone")
)
difference = max(abs(a - b).max() for a, b in zip(two, one, strict=True))
print(f"{NUM_WORKERS} workers of Ray: the weights of one process within {difference:.0e}")
assert difference < 1e-6
