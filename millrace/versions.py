"""Versions of this package and of the libraries that results depend on."""

import platform
import sys
from importlib import metadata

_PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


def _own_version() -> str:
    """Return the version of this package, which need not be installed."""
    return sys.modules["millrace"].__version__


def versions() -> dict[str, str]:
    """Return the versions of what the results depend on."""
    found = {"python": platform.python_version(), "millrace": _own_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
