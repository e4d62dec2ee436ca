"""Check that all processes of a run have the same options, software and data.

Processes that are started by hand, with ``mpirun`` or by Slurm can be given different
ones. They would compile different programs, and then deadlock, crash, or train a model
that nobody asked for.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import millrace
from millrace.config import ConfigurationError, as_plain, flat_options, option_value
from millrace.distributed import coordination
from millrace.versions import versions

_MAX_DIFFERENCES = 5
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""Settings that change the compiled program."""


def check_same_start(options: Any, command: str) -> None:
    """Raise if the processes were started with different options or software."""
    check_same(
        "start",
        {"command": command, **_get_options(options), **_get_software()},
        "Start all processes with the same options and software.",
    )


def check_same_data(facts: Mapping[str, Any]) -> None:
    """Raise if the processes describe their data differently, such as its size.

    Args:
        facts: Description of the run. Paths in it may differ.
    """
    without_paths = {
        name: re.sub(r"(?<!\S)\(?/[^\s,)]+", "PATH", str(fact))
        for name, fact in facts.items()
    }
    check_same("data", without_paths, "Give all processes the same data.")


def check_same(name: str, own: Mapping[str, Any], advice: str) -> None:
    """Raise the same error in all processes if the values of one differ from process 0.

    Args:
        name: Name of the check, unique within a run.
        own: The values of this process by name, serializable as JSON.
        advice: What to do about a difference.
    """
    if coordination.num_processes() == 1:
        return
    first = coordination.broadcast(f"same-{name}", dict(own))
    differences = [
        f"{key} is {_format(own, key)} instead of {_format(first, key)}"
        for key in dict.fromkeys([*first, *own])
        if _format(own, key) != _format(first, key)
    ]
    # All processes must raise: one that went on would wait for the others forever.
    gathered = coordination.gather(f"same-{name}", differences[:_MAX_DIFFERENCES])
    for number, found in enumerate(gathered):
        if found:
            raise ConfigurationError(
                f"Process {number} differs from process 0: {'; '.join(found)}. {advice}"
            )


def _format(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else "missing"


def _get_options(options: Any) -> dict[str, Any]:
    """Return the options that must be the same in all processes.

    Paths are only compared as given or not: every machine may keep the data elsewhere.
    """
    plain = as_plain(options)
    return {
        name: "a path" if isinstance(option_value(options, name), Path) else plain[name]
        for name, option in flat_options(type(options)).items()
        if not option.metadata.get("may_differ")
        and not option.metadata.get("without_effect")
    }


def _get_software() -> dict[str, Any]:
    packages = {
        f"the version of {package}": version
        for package, version in versions().items()
        if package != "python"
    }
    settings = {name: str(getattr(jax.config, name, None)) for name in _JAX_SETTINGS}
    return packages | {"the source code of millrace": _source_digest()} | settings


def _source_digest() -> str:
    """Return a short digest of the source code of this package.

    Two checkouts can have the same version number and still compile different programs.
    """
    root = Path(millrace.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
