"""Processes of one run must be given the same: options, software and data.

Whoever starts them by hand, or with ``mpirun`` or Slurm, can give each of them something
else. The programs they compile would then differ: they would wait for one another for
ever, crash, or train something that nobody has asked for.
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

_MOST_NAMED = 5
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""Settings that change what is compiled, whatever the options."""


def check_same_start(options: Any, command: str) -> None:
    """Refuse processes that were started with different options or software."""
    refuse_differences(
        "start",
        {"command": command, **_options(options), **_software()},
        "Start all processes with the same options and the same software.",
    )


def check_same_data(facts: Mapping[str, Any]) -> None:
    """Refuse processes that see different data, which differs at least in its size.

    Args:
        facts: What a run says about itself before it starts. Paths in it may differ.
    """
    without_paths = {
        name: re.sub(r"(?<!\S)\(?/[^\s,)]+", "PATH", str(fact))
        for name, fact in facts.items()
    }
    refuse_differences("data", without_paths, "Give all processes the same data.")


def refuse_differences(name: str, own: Mapping[str, Any], advice: str) -> None:
    """Raise the same error in all processes if one of them has other values than the first.

    Args:
        name: What the values are about, for the store.
        own: This process's values by name; JSON must be able to hold them.
        advice: What to do about a difference.
    """
    if coordination.num_processes() == 1:
        return
    first = coordination.broadcast(f"same-{name}", dict(own))
    differing = [
        f"{key} is {_shown(own, key)} there and {_shown(first, key)} in process 0"
        for key in dict.fromkeys([*first, *own])
        if _shown(own, key) != _shown(first, key)
    ]
    every = coordination.gather(f"same-{name}", differing[:_MOST_NAMED])
    for number, found in enumerate(every):
        if found:
            raise ConfigurationError(
                f"Process {number} differs from process 0: {'; '.join(found)}. {advice}"
            )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else "missing"


def _options(options: Any) -> dict[str, Any]:
    """Return the options that must be the same; of a path, whether there is one.

    The same data may have another path on every machine.
    """
    plain = as_plain(options)
    return {
        name: "a path" if isinstance(option_value(options, name), Path) else plain[name]
        for name, option in flat_options(type(options)).items()
        if not option.metadata.get("may_differ")
        and not option.metadata.get("without_effect")
    }


def _software() -> dict[str, Any]:
    packages = {
        f"the version of {package}": version
        for package, version in versions().items()
        if package != "python"
    }
    settings = {name: str(getattr(jax.config, name, None)) for name in _JAX_SETTINGS}
    return packages | {"the source code of millrace": _source_digest()} | settings


def _source_digest() -> str:
    """Return a short digest of the package's code, which changes between versions."""
    root = Path(millrace.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
