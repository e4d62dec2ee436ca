"""Hostile settings: eight virtual devices, and every warning an error."""

import os

# Before JAX is imported: the device count cannot be changed afterwards.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
