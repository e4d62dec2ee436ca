"""Named YAML configurations and flags are built into checked, frozen dataclasses."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from millrace.apps.cnn.config import CnnConfig
from millrace.commands.registry import COMMANDS
from millrace.config import (
    ConfigurationError,
    as_plain,
    build,
    field_docs,
    flat_options,
    load_yaml,
    number,
    option_value,
    parse,
    plain_defaults,
    replace_options,
)

TRUE = ["true", "True", "TRUE", "t", "1", "yes", "Yes", "y", "on", "ON"]
FALSE = ["false", "False", "FALSE", "f", "0", "no", "No", "n", "off", "OFF"]


@dataclass(frozen=True, kw_only=True)
class Base:
    """Options of every model."""

    num_replicas: int = 1
    """Copies of the model."""


@dataclass(frozen=True, kw_only=True)
class Train(Base):
    """Train a model."""

    model_name: Literal["small", "large"] = "small"
    """Model to train."""
    learning_rate: float = 0.1
    """Step size, at most
    100 % of it."""
    logs_per_epoch: float = 1.0
    validation: bool = True
    """Whether to validate."""
    pipeline_splits: list[str] = field(default_factory=list)
    """Layers to split at."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the optimizer."""
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    """Options of the optimizer."""
    dataset_path: Path | None = None
    """Folder of the dataset."""
    loss_scaling: float | Literal["dynamic"] = 0.0
    """Factor on the loss."""
    title: str = "untitled"
    """Title of the report."""
    weight_decay: float = field(default=0.0, metadata={"aliases": ("--l2",)})
    """Decay of the weights."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}.")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.yml"
    path.write_text(
        """
common: &common
  num_replicas: 4
  learning-rate: 0.5
first:
  <<: *common
  model_name: large
  validation: off
empty:
"""
    )
    return path


def train(*args: str, named_configs: Path | None = None) -> Train:
    config, _ = parse(Train, args, program="train", named_configs=named_configs)
    return config


def refusal(*args: str, named_configs: Path | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        train(*args, named_configs=named_configs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def entry(folder: Path, text: str) -> Path:
    path = folder / "entry.yml"
    path.write_text("it:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
    return path


# Where a value comes from


def test_without_options_the_dataclass_has_its_defaults():
    assert train() == Train()


def test_an_entry_overrides_the_defaults_and_a_flag_overrides_the_entry(runs):
    config = train(
        "--config", "first", "--learning-rate", "0.25", "--title=t_x", named_configs=runs
    )
    assert config.model_name == "large"  # entry
    assert config.num_replicas == 4  # entry, through a YAML merge key
    assert config.validation is False  # entry
    assert config.learning_rate == 0.25  # flag over entry
    assert config.title == "t_x"  # flag over default
    assert config.loss_scaling == 0.0  # default


def test_flags_override_the_entry_in_any_order(runs):
    before = train("--num-replicas", "2", "--config", "first", named_configs=runs)
    assert before.num_replicas == 2


def test_only_values_that_were_set_are_returned_as_given(runs):
    args = ["--config", "first", "--title", "x"]
    _, given = parse(Train, args, program="train", named_configs=runs)
    assert set(given) == {
        "num_replicas",
        "learning_rate",
        "model_name",
        "validation",
        "title",
    }


def test_an_empty_entry_means_the_defaults(runs):
    assert train("--config", "empty", named_configs=runs) == Train()


def test_config_path_takes_the_entry_from_another_file(runs, tmp_path):
    other = tmp_path / "other.yml"
    other.write_text("first: {num_replicas: 7}\n")
    args = ("--config", "first", "--config-path", str(other))
    assert train(*args, named_configs=runs).num_replicas == 7


# Spellings of options


def test_an_option_may_be_abbreviated_if_that_is_unambiguous():
    assert train("--model", "large").model_name == "large"
    assert train("--pipeline", "a", "b").pipeline_splits == ["a", "b"]


def test_an_ambiguous_abbreviation_lists_the_options_it_could_be():
    message = refusal("--l", "1")
    assert "--learning-rate" in message
    assert "--logs-per-epoch" in message


def test_option_names_may_have_underscores_or_hyphens(runs):
    assert train("--num_replicas", "3").num_replicas == 3
    assert train("--dataset_path=/my_data").dataset_path == Path("/my_data")
    args = ("--config", "first", "--config_path", str(runs))
    assert train(*args, named_configs=runs).num_replicas == 4


def test_an_alias_works_as_an_option_and_as_a_yaml_key(tmp_path):
    assert train("--l2", "0.01").weight_decay == 0.01
    path = entry(tmp_path, "l2: 0.02")
    assert train("--config", "it", named_configs=path).weight_decay == 0.02


def test_a_bare_boolean_option_is_true():
    @dataclass(frozen=True, kw_only=True)
    class Switch:
        wandb: bool = False
        quiet: bool = False

    config, _ = parse(Switch, ["--wandb", "--quiet", "no"], program="switch")
    assert config == Switch(wandb=True, quiet=False)
    config, _ = parse(Switch, ["--quiet", "--wandb"], program="switch")
    assert config == Switch(wandb=True, quiet=True)


@pytest.mark.parametrize(
    ("word", "meaning"), [*((w, True) for w in TRUE), *((w, False) for w in FALSE)]
)
def test_every_spelling_of_true_and_false_is_accepted(word, meaning, tmp_path):
    assert train("--validation", word).validation is meaning
    assert train(f"--validation={word}").validation is meaning
    path = entry(tmp_path, f"validation: {word}")
    assert train("--config", "it", named_configs=path).validation is meaning


def test_a_list_is_several_arguments_or_a_yaml_list_or_one_value(tmp_path):
    assert train("--betas", "0.8", "0.99", "--title", "x").betas == [0.8, 0.99]
    assert train("--pipeline-splits").pipeline_splits == []
    for text, expected in [
        ("betas: [1e-1, 0.5]", [0.1, 0.5]),
        ("betas:\n- 1\n- 2", [1.0, 2.0]),
        ("betas: 0.7", [0.7]),
    ]:
        path = entry(tmp_path, text)
        assert train("--config", "it", named_configs=path).betas == expected


def test_a_dictionary_is_yaml_on_the_command_line_too(tmp_path):
    expected = {"momentum": 0.9, "eps": 1e-5, "nesterov": True, "name": "lars"}
    text = "{momentum: 0.9, eps: 1e-5, nesterov: true, name: lars}"
    assert train("--optimizer-params", text).optimizer_params == expected
    path = entry(tmp_path, f"optimizer_params: {text}")
    found = train("--config", "it", named_configs=path).optimizer_params
    assert found == expected
    assert isinstance(found["eps"], float)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{values: [1e-3, 2e-3]}", {"values": [1e-3, 2e-3]}),
        ("{decay: {rate: 1e-4}}", {"decay": {"rate": 1e-4}}),
        ("{stages: [{rate: 1e-4}]}", {"stages": [{"rate": 1e-4}]}),
    ],
)
def test_numbers_without_a_dot_are_numbers_anywhere_in_a_dictionary(text, expected):
    assert train("--optimizer-params", text).optimizer_params == expected


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "0.00001"])
def test_a_small_number_needs_no_dot_in_yaml(text, tmp_path):
    path = entry(tmp_path, f"learning_rate: {text}")
    rate = train("--config", "it", named_configs=path).learning_rate
    assert isinstance(rate, float)
    assert rate == pytest.approx(1e-5)


def test_fractions_are_numbers(tmp_path):
    assert train("--logs-per-epoch", "1/3").logs_per_epoch == 1 / 3
    path = entry(tmp_path, "logs_per_epoch: 1/4")
    assert train("--config", "it", named_configs=path).logs_per_epoch == 0.25


def test_an_integer_is_accepted_as_a_float_but_not_the_reverse(tmp_path):
    path = entry(tmp_path, "learning_rate: 2\nnum_replicas: 4.0")
    config = train("--config", "it", named_configs=path)
    assert (config.learning_rate, config.num_replicas) == (2.0, 4)
    assert isinstance(config.learning_rate, float)
    assert isinstance(config.num_replicas, int)
    message = refusal("--config", "it", named_configs=entry(tmp_path, "num_replicas: 4.5"))
    where = f"{tmp_path / 'entry.yml'}, line 2"
    assert message == f"{where}: --num-replicas must be an integer, got 4.5."


def test_negative_numbers_are_values_not_options():
    assert train("--learning-rate", "-0.5").learning_rate == -0.5
    assert train("--learning-rate=-1e-5").learning_rate == -1e-5


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_an_optional_option_can_be_set_to_none(word):
    assert train("--dataset-path", word).dataset_path is None


def test_an_option_of_several_types_uses_the_one_that_fits():
    assert train("--loss-scaling", "128").loss_scaling == 128.0
    assert train("--loss-scaling", "dynamic").loss_scaling == "dynamic"


def test_a_choice_may_be_written_in_any_case():
    assert train("--model-name", "Large").model_name == "large"


def test_a_precision_that_yaml_parses_as_a_number_is_still_a_precision(tmp_path):
    path = entry(tmp_path, "precision: 16.32\nmicro_batch_size: 2")
    config, _ = parse(CnnConfig, ["--config", "it"], program="x", named_configs=path)
    assert config.plan.precision == "16.32"


# Values of the wrong type


@pytest.mark.parametrize(
    ("args", "option", "value"),
    [
        (["--num-replicas", "four"], "--num-replicas", "'four'"),
        (["--num-replicas", "2.5"], "--num-replicas", "'2.5'"),
        (["--num-replicas="], "--num-replicas", "''"),
        (["--learning-rate", "fast"], "--learning-rate", "'fast'"),
        (["--logs-per-epoch", "1/0"], "--logs-per-epoch", "'1/0'"),
        (["--logs-per-epoch", "1/2/3"], "--logs-per-epoch", "'1/2/3'"),
        (["--validation", "maybe"], "--validation", "'maybe'"),
        (["--betas", "0.9", "x"], "--betas", "'x'"),
        (["--optimizer-params", "[1, 2]"], "--optimizer-params", "'[1, 2]'"),
        (["--optimizer-params", "{a: "], "--optimizer-params", "'{a: '"),
        (["--loss-scaling", "auto"], "--loss-scaling", "'auto'"),
        (["--model-name", "tiny"], "--model-name", "'tiny'"),
        (["--dataset-path", "a" * 256], "--dataset-path", "aaa...aaa"),
        (["--dataset-path", "a/" * 2048], "--dataset-path", "a/a...a/a"),
        (["--num-replicas", "9" * 400], "--num-replicas", "999...999"),
        (["--num-replicas", "9" * 5000], "--num-replicas", "999...999"),
        (["--loss-scaling", "9" * 5000 + "x"], "--loss-scaling", "999...999"),
    ],
)
def test_a_flag_of_the_wrong_type_is_refused_with_option_and_value(args, option, value):
    message = refusal(*args)
    assert option in message
    assert value in message
    assert "functools" not in message
    assert "object at 0x" not in message


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("num_replicas: four", "--num-replicas", "'four'"),
        ("num_replicas: true", "--num-replicas", "True"),
        ("num_replicas: [1, 2]", "--num-replicas", "[1, 2]"),
        ("num_replicas: null", "--num-replicas", "None"),
        ("num_replicas: .inf", "--num-replicas", "inf"),
        ("learning_rate: {a: 1}", "--learning-rate", "{'a': 1}"),
        ("learning_rate: yes", "--learning-rate", "True"),
        ("validation: 2", "--validation", "2"),
        ("title: [a]", "--title", "['a']"),
        ("title: null", "--title", "None"),
        ("betas: [1, b]", "--betas", "'b'"),
        ("optimizer_params: 3", "--optimizer-params", "3"),
        ("dataset_path: {a: 1}", "--dataset-path", "{'a': 1}"),
    ],
)
def test_a_yaml_value_of_the_wrong_type_is_refused_with_option_and_value(
    text, option, value, tmp_path
):
    message = refusal("--config", "it", named_configs=entry(tmp_path, text))
    assert option in message
    assert value in message


def test_a_wrong_choice_lists_the_choices_and_suggests_the_nearest(tmp_path):
    path = entry(tmp_path, "model_name: larrge")
    message = refusal("--config", "it", named_configs=path)
    assert "small, large" in message
    assert "Did you mean large?" in message


def test_an_option_without_its_value_is_named():
    assert refusal("--num-replicas") == "--num-replicas needs a value."
    assert refusal("--weight-decay") == "--weight-decay needs a value."


@pytest.mark.parametrize(
    ("args", "unknown", "nearest"),
    [
        (["--learning-raet", "1"], "--learning-raet", "--learning-rate"),
        (["--replicas=2"], "--replicas", "--num-replicas"),
        (["--modle_name", "small"], "--modle-name", "--model-name"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(args, unknown, nearest):
    message = refusal(*args)
    assert f"Unknown option {unknown}" in message
    assert f"Did you mean {nearest}?" in message


@pytest.mark.parametrize("word", ["\n", "x" * 5000, "--x\u2028y", "\x1b[31m"])
def test_an_unknown_argument_is_shown_in_one_short_line(word):
    message = refusal(word)
    assert message.isprintable() and len(message) < 300


def test_an_option_without_a_similar_one_points_to_the_help():
    assert refusal("--zzzzz", "1").endswith("See train --help.")


def test_an_argument_that_belongs_to_no_option_is_refused():
    assert "stray" in refusal("--num-replicas", "2", "stray")


def test_an_unknown_yaml_key_suggests_the_nearest(tmp_path):
    path = entry(tmp_path, "learning_raet: 1")
    message = refusal("--config", "it", named_configs=path)
    error = "Unknown option learning_raet. Did you mean learning_rate?"
    assert message == f"{path}, line 2: {error}"


def test_a_value_the_dataclass_refuses_is_a_configuration_error():
    assert refusal("--num-replicas", "0") == "num_replicas must be at least 1, got 0."


@pytest.mark.parametrize(
    ("limits", "value", "expected"),
    [
        ({}, -1, "x must be a number of at least 0, got -1."),
        ({"at_least": 1}, 0.5, "x must be a number of at least 1, got 0.5."),
        ({"below": 1}, 1, "x must be a number of at least 0 and below 1, got 1."),
        ({"at_least": -math.inf}, "a", "x must be a number, got 'a'."),
        ({"at_least": -math.inf, "below": 2}, math.nan, "x must be a number and below 2"),
        ({}, True, "x must be a number of at least 0, got True."),
        ({}, math.inf, "x must be a number of at least 0, got inf."),
        ({}, "9" * 5000, "...9"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_the_range(limits, value, expected):
    with pytest.raises(ConfigurationError) as caught:
        number("x", value, **limits)
    assert expected in str(caught.value)


def test_a_number_in_its_range_is_a_float():
    assert number("x", 0) == 0 and isinstance(number("x", 0), float)
    assert number("x", -3, at_least=-math.inf) == -3
    assert number("x", 0.5, at_least=0.5, below=0.6) == 0.5


def test_a_missing_required_option_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Needy:
        dataset_path: Path

    with pytest.raises(ConfigurationError, match=r"dataset[-_]path"):
        parse(Needy, [], program="needy")


def test_building_from_values_checks_names_and_types():
    assert build(Train, {"num_replicas": "2"}).num_replicas == 2
    with pytest.raises(ConfigurationError, match=r"title\?"):
        build(Train, {"tilte": "x"})


# Files that are not valid configurations


def test_an_unknown_name_lists_the_existing_entries(runs):
    message = refusal("--config", "firts", named_configs=runs)
    assert "--config firts" in message
    assert str(runs) in message
    assert "common, empty, first" in message


def test_entries_may_be_named_by_numbers(tmp_path):
    path = tmp_path / "numbers.yml"
    path.write_text("50: {num_replicas: 5}\nlarge: {num_replicas: 6}\n")
    message = refusal("--config", "51", named_configs=path)
    assert "50" in message
    assert "large" in message
    assert train("--config", "50", named_configs=path).num_replicas == 5


def test_a_missing_file_is_named_with_the_reason(tmp_path, runs):
    path = str(tmp_path / "none.yml")
    message = refusal("--config", "a", "--config-path", path, named_configs=runs)
    assert path in message
    assert "No such file" in message


def test_a_folder_is_not_a_configuration_file(tmp_path, runs):
    args = ("--config", "a", "--config-path", str(tmp_path))
    assert "directory" in refusal(*args, named_configs=runs).lower()


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "", "3"])
def test_a_file_without_a_mapping_is_refused(text, tmp_path):
    path = tmp_path / "list.yml"
    path.write_text(text)
    assert str(path) in (message := refusal("--config", "a", named_configs=path))
    assert "mapping" in message


def test_an_entry_that_is_not_a_mapping_is_refused(tmp_path):
    path = tmp_path / "scalar.yml"
    path.write_text("it: 3\n")
    message = refusal("--config", "it", named_configs=path)
    assert "it" in message
    assert "mapping" in message


@pytest.mark.parametrize("content", [b"it: {a: [}", b"a: b: c", b"\xff\xfe\x00bad\x80"])
def test_a_file_that_is_not_yaml_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "broken.yml"
    path.write_bytes(content)
    assert str(path) in refusal("--config", "it", named_configs=path)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {}']",
        "!!python/object/apply:builtins.open ['{}', 'w']",
        "!!python/name:os.system",
    ],
)
def test_yaml_that_would_run_code_is_refused_and_not_run(tag, tmp_path):
    trace = tmp_path / "ran"
    harmful = tag.format(trace)
    path = entry(tmp_path, f"title: {harmful}")
    assert "plain YAML" in refusal("--config", "it", named_configs=path)
    refusal("--optimizer-params", f"{{a: {harmful}}}")
    assert not trace.exists()


def test_a_command_without_named_configurations_has_no_config_option():
    assert "Unknown option --config" in refusal("--config", "first")


# Options that stand for others


@dataclass(frozen=True, kw_only=True)
class Shorthands(Train):
    """Train with options that stand for others."""

    fast: bool | None = field(default=None, metadata={"stands_for": ("model_name",)})
    """Use the small model."""
    compress: Literal["gzip", "xz"] | None = field(default=None, metadata={"bare": "xz"})
    """Compression of the output."""

    @staticmethod
    def expand_options(values: dict[str, Any]) -> dict[str, Any]:
        if values.get("fast"):
            return values | {"model_name": "small", "title": "fast"}
        return values


def shorthands(*args: str, **options: Any) -> Shorthands:
    return parse(Shorthands, args, program="shorthands", **options)[0]


def test_an_option_is_expanded_after_it_is_parsed():
    assert shorthands("--fast").title == "fast"
    assert build(Shorthands, {"fast": "yes"}).title == "fast"
    assert shorthands().title == "untitled"


def test_a_flag_overrides_an_entry_that_stands_for_the_same_option(tmp_path):
    path = entry(tmp_path, "{fast: true}")
    assert shorthands("--config", "it", named_configs=path).title == "fast"
    config = shorthands("--config", "it", "--model-name", "large", named_configs=path)
    assert (config.title, config.model_name) == ("untitled", "large")
    path = entry(tmp_path, "{model_name: large}")
    config = shorthands("--config", "it", "--fast", named_configs=path)
    assert (config.title, config.model_name) == ("fast", "small")


def test_an_option_may_have_a_meaning_without_a_value():
    assert shorthands("--compress", "--fast").compress == "xz"
    assert shorthands("--compress", "gzip").compress == "gzip"
    assert shorthands().compress is None


# Help and records


def test_docstrings_under_fields_are_the_help(capsys, runs):
    with pytest.raises(SystemExit) as left:
        train("--help-all", named_configs=runs)
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Train a model." in text
    assert "--num-replicas INT Copies of the model. (default: 1)" in text
    assert "Step size, at most 100 % of it. (default: 0.1)" in text
    assert "--model-name {small,large} Model to train. (default: small)" in text
    assert "--validation [BOOL]" in text
    assert "--weight-decay NUMBER Decay of the weights." in text  # aliases are not shown
    assert "runs.yml" in text


def test_help_shows_the_types_of_an_option(capsys):
    @dataclass(frozen=True, kw_only=True)
    class Choices:
        """Choose."""

        maybe: int | None = None
        either: float | Literal["dynamic"] = 0.0
        several: int | str | None = None
        callback: str | Callable[[], int] = "x"
        places: list[int | list[int]] | None = None

    with pytest.raises(SystemExit):
        parse(Choices, ["--help"], program="x")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--maybe INT" in shown
    assert "--either NUMBER|{dynamic}" in shown
    assert "--several INT|TEXT" in shown
    assert "--callback TEXT" in shown
    assert "--places [INT|VALUE ...]" in shown
    assert "None" not in shown and "NoneType" not in shown


def test_help_shows_the_options_of_the_command_first_and_the_others_by_topic(capsys):
    with pytest.raises(SystemExit):
        train("--help")
    text = capsys.readouterr().out
    assert text.startswith("usage: train [options]\n")
    own, base = text.split("Options of every model:")
    assert "--model-name" in own
    assert "--num-replicas" not in own
    assert "--num-replicas" in base


def test_every_option_of_the_cnn_has_help():
    docs = field_docs(CnnConfig)
    names = flat_options(CnnConfig)
    assert {name for name in names if not docs.get(name, "").strip()} == set()


def test_a_configuration_can_be_written_and_read_again(tmp_path):
    config = train(
        "--betas",
        "1e-5",
        "0.5",
        "--optimizer-params",
        "{eps: 1e-8}",
        "--dataset-path",
        "/a",
    )
    plain = as_plain(config)
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(plain))
    assert build(Train, load_yaml(path)) == config


# Files of the applications

APPS = Path(str(resources.files("millrace") / "apps"))
ENTRIES = [
    pytest.param(command, path, name, id=f"{title.replace(' ', '-')}-{name}")
    for title, command in COMMANDS.items()
    if (path := command.named_configs_path()) is not None
    for name in load_yaml(path)
]


def test_every_file_of_named_configurations_belongs_to_a_command():
    files = set(APPS.glob("*/runs.yml"))
    assert files
    assert files == {param.values[1] for param in ENTRIES}


@pytest.mark.parametrize(("command", "path", "name"), ENTRIES)
def test_every_named_configuration_loads(command, path, name):
    config_type = command.load_config_type()
    args = ["--config", name]
    config, _ = parse(config_type, args, program="x", named_configs=path)
    assert isinstance(config, config_type)


@pytest.mark.parametrize(
    "line",
    [
        "--model digits_cnn --num-epochs 6 --micro-batch-size 8 --precision 16.16",
        "--validation False --logs-per-epoch 0.3333333333333333333",
        "--gradient-accumulation 8",  # as in all examples of "Periodic host events"
    ],
)
def test_the_reference_spelling_of_cnn_options_is_accepted(line):
    parse(CnnConfig, line.split(), program="x")


def test_the_spelling_of_the_tensorflow_1_programs_is_accepted():
    line = "--data-dir there --batch-size 3 --replicas 2 --epochs 5"
    config, _ = parse(CnnConfig, line.split(), program="x")
    names = ("dataset_path", "micro_batch_size", "num_replicas", "num_epochs")
    found = [option_value(config, name) for name in names]
    assert found == [Path("there"), 3, 2, 5]


@pytest.mark.parametrize(
    "option", ["logs_per_epoch", "ckpts_per_epoch", "validations_per_epoch"]
)
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_an_impossible_rate_of_events_is_refused_by_name(option, value):
    args = [f"--{option}={value}"]
    with pytest.raises(ConfigurationError, match=f"{option}.*got {value}"):
        parse(CnnConfig, args, program="x")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weight_decay", "-0.1"),
        ("weight_decay", "nan"),
        ("l2_regularization", "inf"),
        ("bn_momentum", "1.0"),
        ("bn_momentum", "nan"),
        ("dbn_replica_group_size", "0"),
        ("weight_updates_per_epoch", "0"),
        ("label_smoothing", "1"),
        ("label_smoothing", "nan"),
        ("num_epochs", "0"),
        ("keep_checkpoints", "0"),
        ("virtual_devices", "0"),
        ("seed", "-1"),
        ("validation_micro_batch_size", "0"),
    ],
)
def test_an_invalid_number_is_refused_by_name_and_value(option, value):
    with pytest.raises(ConfigurationError, match=rf"{option}.*got {value}"):
        parse(CnnConfig, [f"--{option}={value}"], program="x")


def test_resume_without_a_run_directory_names_what_is_missing():
    with pytest.raises(ConfigurationError, match=r"--resume RUN"):
        parse(CnnConfig, ["--resume"], program="x")


# Sections


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data to train on."""

    source: str = field(default="digits", metadata={"aliases": ("--dataset",)})
    """Name of the dataset."""
    workers: int = 3
    """Number of readers."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers must be 0 or more, got {self.workers}.")


@dataclass(frozen=True, kw_only=True)
class Sectioned:
    """A configuration with a section."""

    title: str = "untitled"
    """Title of the report."""
    data: Data = Data(workers=7)
    epochs: list[int] = field(default_factory=list)
    """Epochs to validate."""


def sectioned(*args: str) -> Sectioned:
    return parse(Sectioned, args, program="sectioned")[0]


def test_options_of_sections_are_flat_on_the_command_line():
    assert sectioned("--workers", "4", "--title", "x") == Sectioned(
        title="x", data=Data(workers=4)
    )


def test_a_configuration_sets_the_defaults_of_its_sections():
    assert sectioned("--dataset", "mnist").data == Data(source="mnist", workers=7)
    assert as_plain(sectioned()) == {
        "title": "untitled",
        "source": "digits",
        "workers": 7,
        "epochs": [],
    }
    assert plain_defaults(Sectioned)["workers"] == 7


def test_a_section_that_refuses_a_value_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="workers must be 0 or more, got -1"):
        sectioned("--workers", "-1")


def test_yaml_is_flat_and_accepts_aliases_of_sections(tmp_path):
    path = tmp_path / "runs.yml"
    path.write_text("it:\n  dataset: mnist\n  title: x\n")
    config, _ = parse(Sectioned, ["--config", "it"], program="x", named_configs=path)
    assert (config.data.source, config.title) == ("mnist", "x")


def test_options_of_any_section_can_be_replaced():
    before = sectioned("--workers", "4")
    after = replace_options(before, title="x", source="mnist")
    assert after == Sectioned(title="x", data=Data(source="mnist", workers=4))
    assert option_value(after, "workers") == 4
    with pytest.raises(ConfigurationError, match="workers must be"):
        replace_options(before, workers=-2)


def test_help_has_a_heading_for_each_section(capsys):
    with pytest.raises(SystemExit):
        sectioned("--help")
    shown = capsys.readouterr().out
    assert "Data to train on:" in shown
    assert shown.index("--title") < shown.index("--epochs") < shown.index("--source")
    assert "Number of readers. (default: 7)" in shown


def test_two_options_with_one_name_are_an_error():
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        workers: int = 1
        data: Data = Data()

    with pytest.raises(ConfigurationError, match=r"two options workers, one of .* in data"):
        flat_options(Twice)
