"""Batch arithmetic: samples per weight update, and updates per epoch."""

from typing import NamedTuple

from millrace.config import ConfigurationError


class Batching(NamedTuple):
    """Resolved batch sizes: micro-batch x accumulation x replicas = global batch."""

    micro_batch_size: int
    num_replicas: int
    gradient_accumulation_count: int

    @property
    def global_batch_size(self) -> int:
        """Samples per weight update."""
        return self.samples_per_step * self.gradient_accumulation_count

    @property
    def samples_per_step(self) -> int:
        """Samples that all replicas process in one forward and backward pass."""
        return self.micro_batch_size * self.num_replicas

    def updates_per_epoch(self, dataset_size: int) -> int:
        """Return the whole weight updates per epoch; leftover samples are dropped."""
        if dataset_size < self.global_batch_size:
            raise ConfigurationError(
                f"The dataset has {dataset_size} samples, fewer than one weight update "
                f"needs ({self.global_batch_size} = micro batch {self.micro_batch_size}"
                f" x replicas {self.num_replicas} x accumulation "
                f"{self.gradient_accumulation_count}). Lower one of them."
            )
        return dataset_size // self.global_batch_size


def resolve_batching(
    *,
    micro_batch_size: int,
    num_replicas: int = 1,
    gradient_accumulation_count: int | None = None,
    global_batch_size: int | None = None,
) -> Batching:
    """Compute the accumulation count from the global batch, or the reverse.

    A global batch that is not divisible is an error that names the nearest ones that are:
    nobody should train with another batch size unknowingly.
    """
    given = {
        "micro_batch_size": micro_batch_size,
        "num_replicas": num_replicas,
        "gradient_accumulation_count": gradient_accumulation_count,
        "global_batch_size": global_batch_size,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}.")
    if gradient_accumulation_count is not None and global_batch_size is not None:
        raise ConfigurationError(
            "Set gradient_accumulation_count or global_batch_size, not both; got "
            f"{gradient_accumulation_count} and {global_batch_size}."
        )
    step = micro_batch_size * num_replicas
    if global_batch_size is not None:
        if global_batch_size % step:
            below = global_batch_size // step * step
            nearest = f"{below} or {below + step}" if below else f"{step}"
            raise ConfigurationError(
                f"global_batch_size ({global_batch_size}) is not a multiple of "
                f"micro_batch_size x num_replicas ({micro_batch_size} x {num_replicas}"
                f" = {step}). The nearest multiples: {nearest}."
            )
        gradient_accumulation_count = global_batch_size // step
    return Batching(micro_batch_size, num_replicas, gradient_accumulation_count or 1)
