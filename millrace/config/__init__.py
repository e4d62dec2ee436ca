"""Build frozen dataclasses from named YAML configurations and command-line flags.

A configuration is a dataclass, and its sections are dataclasses too; the docstring under a
field is its help text. Flags override the named YAML entry, which overrides the defaults of
the dataclass. A value that does not fit raises a ``ConfigurationError`` before anything is
compiled.
"""

from millrace.config.building import (
    Defaults,
    Option,
    as_plain,
    build,
    configure,
    flag,
    flat_options,
    option_name,
    option_value,
    plain_defaults,
    replace_options,
)
from millrace.config.checks import (
    ConfigurationError,
    check_keys,
    did_you_mean,
    number,
    one_of,
    shown,
)
from millrace.config.command_line import parse
from millrace.config.files import load_named, load_yaml, writing
from millrace.config.help import common_options, field_docs, format_help
from millrace.config.runs import STORED, open_run
from millrace.config.spelling import as_typed

__all__ = [
    "STORED",
    "ConfigurationError",
    "Defaults",
    "Option",
    "as_plain",
    "as_typed",
    "build",
    "check_keys",
    "common_options",
    "configure",
    "did_you_mean",
    "field_docs",
    "flag",
    "flat_options",
    "format_help",
    "load_named",
    "load_yaml",
    "number",
    "one_of",
    "open_run",
    "option_name",
    "option_value",
    "parse",
    "plain_defaults",
    "replace_options",
    "shown",
    "writing",
]
