"""``millrace cnn configs``: list the named configurations of an application, or print one.

The comment above an entry of the YAML file is its description.
"""

import re
import shutil
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from millrace.config import ConfigurationError, did_you_mean, load_named, load_yaml

_KEY = re.compile(r"^([\w.-]+):")
_SHOWN_OPTIONS = {
    "model_name": "{}",
    "dataset": "on {}",
    "training_data_file": "on {}",
    "objective": "objective {}",
    "optimizer": "with {}",
    "size": "size {}",
    "num_epochs": "{} epochs",
    "num_replicas": "{} replicas",
}
"""Options that describe an entry without a comment."""
_MAX_WIDTH, _MIN_TEXT_WIDTH = 120, 24


@dataclass(frozen=True, kw_only=True)
class ConfigsConfig:
    """List the named configurations for --config, or print one of them."""

    name: str | None = field(default=None, metadata={"positional": True})
    """Configuration to print (default: list all)."""


def show_configs(config: ConfigsConfig, path: Path, command: str) -> None:
    """Print the configurations in a YAML file.

    Args:
        config: The options.
        path: The YAML file.
        command: The command that uses them, such as ``cnn train``.
    """
    described = describe_configs(path)
    if config.name is None:
        print(_format_list(described, command))
        return
    if config.name not in described:
        raise ConfigurationError(
            f"There is no configuration {config.name[:80]}."
            + (
                did_you_mean(config.name, described)
                or f" millrace {command.split()[0]} configs lists them."
            )
        )
    options = load_named(path, config.name)
    print(f"# {described[config.name]}")
    print(f"# millrace {command} --config {config.name}")
    print(yaml.safe_dump(options, sort_keys=False, default_flow_style=None), end="")


def _format_list(described: dict[str, str], command: str) -> str:
    width = max(map(len, described)) + 2
    columns = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    lines = [
        textwrap.fill(
            text,
            max(columns - 1, width + _MIN_TEXT_WIDTH),
            initial_indent=f"  {name:<{width}}",
            subsequent_indent=" " * (width + 2),
            break_on_hyphens=False,
        )
        for name, text in described.items()
    ]
    first, application = next(iter(described)), command.split()[0]
    return "\n".join(
        [
            f"Named configurations of millrace {command}:",
            *lines,
            "",
            f"Train with one:  millrace {command} --config {first}",
            f"Print one:       millrace {application} configs {first}",
            "Options on the command line override those of the configuration.",
        ]
    )


def describe_configs(path: Path) -> dict[str, str]:
    """Return one line on each entry of a YAML file of named configurations."""
    comments = _read_comments(path.read_text())
    return {
        str(name): comments.get(str(name)) or _describe_options(entry or {})
        for name, entry in load_yaml(path).items()
    }


def _read_comments(text: str) -> dict[str, str]:
    """Return the first sentence of the comment directly above each top-level key."""
    comments, lines = {}, []
    for line in text.splitlines():
        if line.startswith("#"):
            lines.append(line.lstrip("# "))
        elif (key := _KEY.match(line)) and lines:
            first = re.match(r"(.+?[.])(?= [A-Z]|$)", joined := " ".join(lines))
            comments[key[1]] = (first[1] if first else joined).rstrip(".")
            lines = []
        else:
            lines = []
    return comments


def _describe_options(entry: dict[str, Any]) -> str:
    values = [
        text.format(entry[name]) for name, text in _SHOWN_OPTIONS.items() if name in entry
    ]
    text = ", ".join(values) or "all defaults"
    return text[0].upper() + text[1:] if text.startswith(("on ", "with ")) else text
