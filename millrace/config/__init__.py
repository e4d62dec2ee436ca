"""Turn named YAML configurations and command-line flags into frozen dataclasses.

A configuration is a dataclass whose fields carry their help as a docstring. Values
come from the dataclass, then from the named YAML entry, then from the flags; whatever
does not fit is a ``ConfigurationError`` before anything is compiled.
"""

from millrace.config.building import as_plain, build, configure, plain_defaults
from millrace.config.checks import (
    ConfigurationError,
    check_keys,
    did_you_mean,
    number,
    one_of,
    shown,
)
from millrace.config.command_line import field_docs, parse
from millrace.config.files import load_named, load_yaml, writing

__all__ = [
    "ConfigurationError",
    "as_plain",
    "build",
    "check_keys",
    "configure",
    "did_you_mean",
    "field_docs",
    "load_named",
    "load_yaml",
    "number",
    "one_of",
    "parse",
    "plain_defaults",
    "shown",
    "writing",
]
