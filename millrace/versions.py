"""Versions of this package and of the libraries that results depend on."""

import platform
import sys
from importlib import metadata

_PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and its main dependencies."""
    # Not from the metadata: the package need not be installed.
    own_version = sys.modules["millrace"].__version__
    found = {"python": platform.python_version(), "millrace": own_version}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
