"""Malicious configuration files are refused quickly, with a one-line message."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace import cli
from millrace.config import ConfigurationError, configure, load_yaml, parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every kind."""

    num_epochs: int = 1
    seed: int = 0
    base_rate: float = 0.1
    validation: bool = True
    name: str = ""
    model_name: Literal["small", "large"] = "small"
    pipeline_splits: list[str] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    place: Path | None = None


LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
CHAIN = "a0: &a0 " + "[" * 30 + "]" * 30 + "\n"
CHAIN += "".join(f"a{i}: &a{i} {'[' * 30}*a{i - 1}{']' * 30}\n" for i in range(1, 20))

# Whole files, and the line in the message.
FILES = {
    "laughs": (LAUGHS + "it: {num_epochs: *a11}\n", 5),
    "laughs in a value": (LAUGHS + "it: {model_name: *a11}\n", 5),
    "laughs in keys": (LAUGHS + "it: {*a11 : 1}\n", 5),
    "merged laughs": (
        "a0: &a0 {x: 1}\n"
        + "".join(
            f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
        )
        + "it: *a11\n",
        5,
    ),
    "long text many times": (
        f"t: &t {'x' * 50_000}\nit:\n  model_name: [{', '.join(['*t'] * 9_000)}]\n",
        3,
    ),
    "depth through aliases": (CHAIN + "it: {num_epochs: *a19}\n", 2),
    "deep lists": ("it: {num_epochs: " + "[" * 100_000 + "]" * 100_000 + "}", 1),
    "deep mappings": ("it: " + "{a: " * 40_000 + "}" * 40_000, 1),
    "deep blocks": ("it:\n" + "".join(" " * i + "a:\n" for i in range(1, 600)), 40),
    "deep dashes": ("it: \n  num_epochs:\n    " + "- " * 50_000 + "1", 3),
    "deep question marks": ("? " * 50_000, 1),
    "contains itself": ("it: &it\n  num_epochs: *it\n", 2),
    "a list in itself": ("it:\n  num_epochs: &a [*a]\n", 2),
    "merges itself": ("it: &it\n  <<: *it\n", 2),
    "unknown alias": ("it:\n  num_epochs: *nobody\n", 2),
    "many values": ("it: [" + "1, " * 60_000 + "]", 1),
    "same key twice": ("it:\n  num_epochs: 3\n  num_epochs: 4\n", 3),
    "same entry twice": ("it: {}\nother: {}\nit: {}\n", 3),
    "tagged int": ("it:\n  num_epochs: !!int foo\n", 2),
    "tagged float": ("it:\n  base_rate: !!float foo\n", 2),
    "tagged bool": ("it:\n  validation: !!bool foo\n", 2),
    "tagged sexagesimal": ("it:\n  num_epochs: !!int 1:30\n", 2),
    "timestamp": ("it:\n  num_epochs: !!timestamp 2001-99-99\n", 2),
    "binary": ("it:\n  model_name: !!binary abc\n", 2),
    "set": ("it:\n  num_epochs: !!set {a, b}\n", 2),
    "omap": ("it:\n  num_epochs: !!omap [a: 1]\n", 2),
    "own tag": ("it:\n  num_epochs: !mine 3\n", 2),
    "python": ("it:\n  num_epochs: !!python/object/apply:os.getpid []\n", 2),
    "tagged mapping": ("it: !!map [1, 2]\n", 1),
    "list as a key": ("it:\n  [1, 2]: 3\n", 2),
    "bad merge": ("it:\n  <<: 3\n", 2),
    "NUL": ('it:\n  model_name: "a\\0b"\n', 2),
    "control character": ("it:\n  model_name: a\x07b\n", 2),
    "unclosed": ("it:\n  num_epochs: [1\n", 3),
    "bad escape": ('it:\n  model_name: "\\q"\n', 2),
    "far escape": ('it:\n  model_name: "\\UFFFFFFFF"\n', 2),
    "tab": ("it:\n\tnum_epochs: 3\n", 2),
    "two documents": ("it: {}\n---\nit: {}\n", 2),
    "directive": ("%YAML 9.9\n---\nit: {}\n", 1),
    "an endless anchor": ("it: *" + "a" * 200_000 + " \n", 1),
    "a key without end": ("it: {" + "k" * 200_000 + ": 1}\n", 1),
    "not UTF-8": (b"it:\n  num_epochs: \xff\n", 2),
}

# Options of an entry, and a part of the message.
OPTIONS = {
    "num_epochs: 1:30": "'1:30'",
    "num_epochs: 0x10": "'0x10'",
    "num_epochs: 2001-99-99": "'2001-99-99'",
    "num_epochs: " + "9" * 400: "fits in 64 bits",
    "num_epochs: " + "9" * 5000: "is not a valid int",
    f"num_epochs: '{'9' * 5000}'": "9...9",
    "base_rate: " + "9" * 400: "fits in 64 bits",
    "base_rate: 1:30.5": "'1:30.5'",
    "num_epochs: .inf": "inf",
    "num_epochs: 1e400": "'1e400'",
    "num_epochs: 99999999999999999999": "fits in 64 bits",
    "validation: " + "[" + "x, " * 3000 + "]": "...",
    "model_name: {" + ", ".join(f"k{i}: v" for i in range(3000)) + "}": "...",
    "model_name: " + "x" * 20_000: "...",
    "=: 3": "Unknown option =",
    "on: 3": "Unknown option on",
    "k" * 900 + ": 1": "Unknown option kkk",
}


def message_of(path: Path) -> str:
    began = time.process_time()
    with pytest.raises(ConfigurationError) as caught:
        parse(Options, ["--config", "it"], program="x", named_configs=path)
    assert time.process_time() - began < 5
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize(("content", "line"), FILES.values(), ids=FILES)
def test_a_hostile_file_is_refused_quickly_with_its_line(content, line, tmp_path):
    path = tmp_path / "bad.yml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"{path}, line {line}" in message_of(path)


@pytest.mark.parametrize(("text", "expected"), OPTIONS.items(), ids=range(len(OPTIONS)))
def test_a_hostile_option_is_refused_with_its_file_and_line(text, expected, tmp_path):
    path = tmp_path / "bad.yml"
    path.write_text(f"other: {{}}\nit:\n  {text}\n")
    message = message_of(path)
    assert f"{path}, line 3" in message
    assert expected in message


def test_a_hostile_file_is_status_2_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "bad.yml"
    path.write_text("it: &it\n  num_epochs: *it\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["cnn", "train", "--config", "it", "--config-path", str(path)])
    assert ended.value.code == 2
    assert f"millrace: {path}, line 2" in capsys.readouterr().err


def test_a_file_that_is_too_long_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "long.yml"
    path.write_text("# filler\n" * 400_000)
    assert "longer than 250,000 characters" in message_of(path)
    assert "longer than 250,000 characters" in message_of(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("010", "010"),
        ("1:30", "1:30"),
        ("0o10", "0o10"),
        ("2001-01-01", "2001-01-01"),
        ("12", 12),
        ("-3", -3),
        ("0", 0),
        ("1.5", 1.5),
        ("1.0e-05", 1e-5),
        ("-.inf", float("-inf")),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("=", "="),
        ('"\\ud83d\\ude00"', "\N{GRINNING FACE}"),
    ],
)
def test_only_plain_decimal_numbers_are_numbers(text, expected, tmp_path):
    path = tmp_path / "values.yml"
    path.write_text(f"value: {text}\n")
    found = load_yaml(path)["value"]
    assert (found, type(found)) == (expected, type(expected))


def test_an_integer_with_a_leading_zero_means_the_same_as_on_the_command_line(tmp_path):
    path = tmp_path / "runs.yml"
    path.write_text("it:\n  num_epochs: 010\n  name: 010\n")
    config, _ = parse(Options, ["-c", "it"], program="x", named_configs=path)
    assert (config.num_epochs, config.name) == (10, "010")
    assert parse(Options, ["--num-epochs", "010"], program="x")[0].num_epochs == 10


def test_anchors_and_merged_entries_still_work_and_keep_their_lines(tmp_path):
    path = tmp_path / "runs.yml"
    path.write_text("base: &base\n  num_epochs: 3\n  seed: x\nit:\n  <<: *base\n")
    assert f"{path}, line 3: --seed must be an integer" in message_of(path)
    path.write_text(path.read_text() + "  seed: 4\n")
    config, _ = parse(Options, ["-c", "it"], program="x", named_configs=path)
    assert (config.num_epochs, config.seed) == (3, 4)


def test_json_may_be_indented_with_tabs(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{\n\t"num_epochs": 3,\n\t"base_rate": 1e-3\n}')
    config, _ = parse(Options, ["-c", str(path)], program="x", named_configs=path)
    assert (config.num_epochs, config.base_rate) == (3, 1e-3)
    path.write_text('{\n\t"num_epochs": "x"\n}')
    with pytest.raises(ConfigurationError, match=r"mine\.json, line 2: --num-epochs"):
        parse(Options, ["-c", str(path)], program="x", named_configs=path)


TOKENS = """it: - [ ] { } : ? &a *a , ' " # | > % @ ~ \\ null yes --- <<: 1:30 010 1e999
    .nan num_epochs base_rate pipeline_splits params place !!int !!str !!seq !!float !x
    2001-99-99"""
PIECES = st.sampled_from(
    [*TOKENS.split(), " ", "\n", "\n  ", "\t", "\0", "\ud800", "\ufeff"]
)


@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pieces=st.lists(PIECES | st.text(max_size=4), max_size=25))
def test_no_text_crashes_the_parser(pieces, tmp_path):
    path = tmp_path / "fuzz.yml"
    path.write_bytes(("it:\n  " + "".join(pieces)).encode("utf-8", "surrogatepass"))
    try:
        configure(Options, {"config": "it"}, path)
    except ConfigurationError as error:
        assert "\n" not in str(error)
