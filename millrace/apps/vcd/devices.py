"""Which devices do the work, and how exactly they multiply."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from millrace.apps.vcd.config.common import DeviceOptions
from millrace.config import ConfigurationError


@contextlib.contextmanager
def chosen_devices(options: DeviceOptions) -> Iterator[list[Any]]:
    """Yield the devices to use; inside, they are where arrays are made."""
    devices = find_devices(options)
    # Arrays are made in this process; of several, each has devices of its own.
    own = [d for d in devices if d.process_index == jax.process_index()]
    precision = None if options.matmul_precision == "default" else options.matmul_precision
    with jax.default_device(own[0]), jax.default_matmul_precision(precision):
        yield devices


def find_devices(options: DeviceOptions) -> list[Any]:
    """Return all devices of the kind asked for; an accelerator's where none is."""
    try:
        devices = jax.devices(None if options.device == "auto" else options.device)
    except RuntimeError as error:
        here = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise ConfigurationError(
            f"There is no {options.device} here that JAX can use; there is: {here}."
        ) from error
    if options.only_accelerator and devices[0].platform == "cpu":
        raise ConfigurationError(
            "only_accelerator is asked for, but JAX finds none here, only the CPU."
        )
    return devices
