"""Hostile settings: eight virtual devices, and every warning an error."""

import os

# Before JAX is imported: the device count cannot be changed afterwards.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # Compiling takes most of the time here, and what is compiled is small.
        "--xla_backend_optimization_level=0",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
