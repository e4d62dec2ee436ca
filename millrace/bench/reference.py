"""Entries of a ``benchmarks.yml`` of Graphcore's examples. Imports nothing heavy."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.commands.scripts import SCRIPTS, find_script
from millrace.config import ConfigurationError, did_you_mean, parse, shown
from millrace.distributed.environment import find_num_replicas
from millrace.distributed.options import LaunchConfig, split_command

_KEYS = {"cmd", "description", "env", "parameters"}
_IGNORED = {
    # How to read figures from the output, which are measured here instead.
    *("data", "derived", "output"),
    # Where Graphcore keeps the program, and what it does around it.
    *("location", "reference_directory", "requirements_file", "requirements_path"),
    *("pre_run_commands", "additional_dir_tracking", "generated", "notebook"),
}
REFERENCE = "a benchmarks.yml of Graphcore's examples"
NOTICE = (
    "Throughput and latency are measured directly: data, derived and output of the spec "
    "are not used."
)


def is_reference(values: Any) -> bool:
    """Whether an entry of a spec has the keys of Graphcore's, not ours."""
    if not isinstance(values, Mapping) or "command" in values:
        return False
    return bool((values.keys() - {"env"}) & (_KEYS | _IGNORED))


def read_reference(name: str, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries, as our spec has them, that an entry of Graphcore's means.

    One without a command only holds options for others, and yields nothing. One with
    parameters means a variant for each of their values.
    """
    for key in values:
        if key not in _KEYS | _IGNORED:
            known = sorted(_KEYS | _IGNORED)
            raise ConfigurationError(f"unknown option {key}.{did_you_mean(key, known)}")
    if not values.get("cmd"):
        return
    about = " ".join(str(values.get("description", "")).split())
    env = {str(key): str(value) for key, value in (values.get("env") or {}).items()}
    for suffix, chosen in _variants(values.get("parameters")):
        command = _fill(str(values["cmd"]), chosen)
        yield {
            "name": name + suffix,
            "command": translate_command(shlex.split(command)),
            "about": about,
            "env": env,
            "reference": REFERENCE,
        }


def _variants(parameters: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the suffix of the name and the values of each variant.

    Parameters are a mapping of lists, all of whose combinations are meant, or a list whose
    first item has the names and whose others have the values.
    """
    if not parameters:
        yield "", {}
        return
    if isinstance(parameters, Mapping):
        names, rows = (
            list(parameters),
            itertools.product(*map(_as_list, parameters.values())),
        )
    elif isinstance(parameters, list) and all(isinstance(p, list) for p in parameters):
        names, rows = parameters[0], iter(parameters[1:])
    else:
        raise ConfigurationError(
            f"parameters must be a mapping of lists, or a list of lists; got "
            f"{shown(parameters)}."
        )
    for row in rows:
        if len(row) != len(names):
            raise ConfigurationError(
                f"each list of parameters after the first has a value for each of "
                f"{', '.join(map(str, names))}; got {shown(row)}."
            )
        chosen = dict(zip(map(str, names), row, strict=True))
        yield "".join(f"_{key}_{value}" for key, value in chosen.items()), chosen


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _fill(command: str, chosen: Mapping[str, Any]) -> str:
    if not chosen:
        return command
    try:
        return command.format(**chosen)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigurationError(
            f"cannot fill in the parameters of cmd: {error}"
        ) from error


def translate_command(words: Sequence[str]) -> str:
    """Return the command that measures the same as a command line of Graphcore's.

    A benchmark is one process, so the replicas that poprun would start become an option.
    """
    replicas: list[str] = []
    if words and words[0] == "poprun":
        own, words = split_command(words[1:])
        launch, _ = parse(LaunchConfig, own, program="poprun")
        count = launch.num_replicas or launch.num_instances
        if find_num_replicas(words) is None:
            replicas = ["--replicas", str(count)]
    found = find_script(words) if words else None
    if found is None or SCRIPTS[found.script].command in ("bench", "launch"):
        programs = [name for name in SCRIPTS if name.endswith(".py")]
        raise ConfigurationError(
            f"cmd must run one of {', '.join(programs)}; got {shlex.join(words)[:80]}."
        )
    return shlex.join([found.script, *found.arguments, *replicas])
