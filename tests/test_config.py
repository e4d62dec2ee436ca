"""Named YAML configurations and flags become checked, frozen dataclasses."""

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
    """Options of every mill."""

    num_replicas: int = 1
    """Copies of the model."""


@dataclass(frozen=True, kw_only=True)
class Mill(Base):
    """Grind some corn."""

    model_name: Literal["stone", "roller"] = "stone"
    """Which mill."""
    learning_rate: float = 0.1
    """Step size, at most
    100 % of it."""
    logs_per_epoch: float = 1.0
    validation: bool = True
    """Whether to weigh the flour."""
    pipeline_splits: list[str] = field(default_factory=list)
    """Layers to split at."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Of the optimizer."""
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    """Options of the optimizer."""
    dataset_path: Path | None = None
    """Where the corn is."""
    loss_scaling: float | Literal["dynamic"] = 0.0
    """Factor on the loss."""
    title: str = "flour"
    """Name on the sack."""
    weight_decay: float = field(default=0.0, metadata={"aliases": ("--l2",)})
    """Pull towards zero."""

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
small:
  <<: *common
  model_name: roller
  validation: off
empty:
"""
    )
    return path


def mill(*words: str, named_configs: Path | None = None) -> Mill:
    config, _ = parse(Mill, words, program="mill", named_configs=named_configs)
    return config


def refusal(*words: str, named_configs: Path | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        mill(*words, named_configs=named_configs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def entry(folder: Path, text: str) -> Path:
    path = folder / "entry.yml"
    path.write_text("it:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
    return path


# Where a value comes from


def test_without_options_the_dataclass_has_its_own_values():
    assert mill() == Mill()


def test_a_named_entry_replaces_the_defaults_and_a_flag_replaces_the_entry(runs):
    config = mill(
        "--config", "small", "--learning-rate", "0.25", "--title=t_x", named_configs=runs
    )
    assert config.model_name == "roller"  # entry
    assert config.num_replicas == 4  # entry, through a YAML merge key
    assert config.validation is False  # entry
    assert config.learning_rate == 0.25  # flag over entry
    assert config.title == "t_x"  # flag over default
    assert config.loss_scaling == 0.0  # default


def test_flags_win_wherever_they_stand(runs):
    before = mill("--num-replicas", "2", "--config", "small", named_configs=runs)
    assert before.num_replicas == 2


def test_only_what_was_asked_for_is_reported_as_given(runs):
    words = ["--config", "small", "--title", "rye"]
    _, given = parse(Mill, words, program="mill", named_configs=runs)
    assert set(given) == {
        "num_replicas",
        "learning_rate",
        "model_name",
        "validation",
        "title",
    }


def test_an_entry_without_options_is_the_defaults(runs):
    assert mill("--config", "empty", named_configs=runs) == Mill()


def test_config_path_takes_the_entry_from_another_file(runs, tmp_path):
    other = tmp_path / "other.yml"
    other.write_text("small: {num_replicas: 7}\n")
    words = ("--config", "small", "--config-path", str(other))
    assert mill(*words, named_configs=runs).num_replicas == 7


# How options may be written


def test_an_option_may_be_cut_short_where_that_is_clear():
    assert mill("--model", "roller").model_name == "roller"
    assert mill("--pipeline", "a", "b").pipeline_splits == ["a", "b"]


def test_an_option_cut_too_short_names_the_ones_it_could_be():
    message = refusal("--l", "1")
    assert "--learning-rate" in message
    assert "--logs-per-epoch" in message


def test_underscores_in_option_names_are_as_good_as_hyphens(runs):
    assert mill("--num_replicas", "3").num_replicas == 3
    assert mill("--dataset_path=/my_data").dataset_path == Path("/my_data")
    words = ("--config", "small", "--config_path", str(runs))
    assert mill(*words, named_configs=runs).num_replicas == 4


def test_an_alias_serves_as_an_option_and_as_a_yaml_key(tmp_path):
    assert mill("--l2", "0.01").weight_decay == 0.01
    path = entry(tmp_path, "l2: 0.02")
    assert mill("--config", "it", named_configs=path).weight_decay == 0.02


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
def test_every_spelling_of_true_and_false_is_understood(word, meaning, tmp_path):
    assert mill("--validation", word).validation is meaning
    assert mill(f"--validation={word}").validation is meaning
    path = entry(tmp_path, f"validation: {word}")
    assert mill("--config", "it", named_configs=path).validation is meaning


def test_lists_are_several_words_or_a_yaml_list_or_one_value(tmp_path):
    assert mill("--betas", "0.8", "0.99", "--title", "x").betas == [0.8, 0.99]
    assert mill("--pipeline-splits").pipeline_splits == []
    for text, expected in [
        ("betas: [1e-1, 0.5]", [0.1, 0.5]),
        ("betas:\n- 1\n- 2", [1.0, 2.0]),
        ("betas: 0.7", [0.7]),
    ]:
        path = entry(tmp_path, text)
        assert mill("--config", "it", named_configs=path).betas == expected


def test_a_dictionary_is_yaml_on_the_command_line_too(tmp_path):
    expected = {"momentum": 0.9, "eps": 1e-5, "nesterov": True, "name": "lars"}
    text = "{momentum: 0.9, eps: 1e-5, nesterov: true, name: lars}"
    assert mill("--optimizer-params", text).optimizer_params == expected
    path = entry(tmp_path, f"optimizer_params: {text}")
    found = mill("--config", "it", named_configs=path).optimizer_params
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
def test_numbers_without_a_dot_are_numbers_at_every_depth_of_a_dictionary(text, expected):
    assert mill("--optimizer-params", text).optimizer_params == expected


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "0.00001"])
def test_a_small_number_needs_no_dot_in_yaml(text, tmp_path):
    path = entry(tmp_path, f"learning_rate: {text}")
    rate = mill("--config", "it", named_configs=path).learning_rate
    assert isinstance(rate, float)
    assert rate == pytest.approx(1e-5)


def test_fractions_are_numbers(tmp_path):
    assert mill("--logs-per-epoch", "1/3").logs_per_epoch == 1 / 3
    path = entry(tmp_path, "logs_per_epoch: 1/4")
    assert mill("--config", "it", named_configs=path).logs_per_epoch == 0.25


def test_whole_numbers_may_stand_where_fractions_are_wanted_but_not_the_reverse(tmp_path):
    path = entry(tmp_path, "learning_rate: 2\nnum_replicas: 4.0")
    config = mill("--config", "it", named_configs=path)
    assert (config.learning_rate, config.num_replicas) == (2.0, 4)
    assert isinstance(config.learning_rate, float)
    assert isinstance(config.num_replicas, int)
    message = refusal("--config", "it", named_configs=entry(tmp_path, "num_replicas: 4.5"))
    where = f"{tmp_path / 'entry.yml'}, line 2"
    assert message == f"{where}: --num-replicas takes a whole number, got 4.5."


def test_negative_numbers_are_values_not_options():
    assert mill("--learning-rate", "-0.5").learning_rate == -0.5
    assert mill("--learning-rate=-1e-5").learning_rate == -1e-5


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_an_option_that_may_be_nothing_is_switched_off_by_none(word):
    assert mill("--dataset-path", word).dataset_path is None


def test_one_of_several_types_takes_whichever_fits():
    assert mill("--loss-scaling", "128").loss_scaling == 128.0
    assert mill("--loss-scaling", "dynamic").loss_scaling == "dynamic"


def test_a_choice_may_be_written_in_any_case():
    assert mill("--model-name", "Roller").model_name == "roller"


def test_a_precision_that_yaml_reads_as_a_number_is_still_a_precision(tmp_path):
    path = entry(tmp_path, "precision: 16.32\nmicro_batch_size: 2")
    config, _ = parse(CnnConfig, ["--config", "it"], program="x", named_configs=path)
    assert config.plan.precision == "16.32"


# What does not fit


@pytest.mark.parametrize(
    ("words", "option", "value"),
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
        (["--model-name", "wind"], "--model-name", "'wind'"),
        (["--dataset-path", "a" * 256], "--dataset-path", "aaa...aaa"),
        (["--dataset-path", "a/" * 2048], "--dataset-path", "a/a...a/a"),
        (["--num-replicas", "9" * 400], "--num-replicas", "999...999"),
        (["--num-replicas", "9" * 5000], "--num-replicas", "999...999"),
        (["--loss-scaling", "9" * 5000 + "x"], "--loss-scaling", "999...999"),
    ],
)
def test_a_flag_of_the_wrong_type_is_refused_with_option_and_value(words, option, value):
    message = refusal(*words)
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
    path = entry(tmp_path, "model_name: rolller")
    message = refusal("--config", "it", named_configs=path)
    assert "stone, roller" in message
    assert "Did you mean roller?" in message


def test_an_option_without_its_value_is_refused_by_name():
    assert "--num-replicas" in refusal("--num-replicas")


@pytest.mark.parametrize(
    ("words", "unknown", "nearest"),
    [
        (["--learning-raet", "1"], "--learning-raet", "--learning-rate"),
        (["--replicas=2"], "--replicas", "--num-replicas"),
        (["--modle_name", "stone"], "--modle-name", "--model-name"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(words, unknown, nearest):
    message = refusal(*words)
    assert f"There is no option {unknown}" in message
    assert f"Did you mean {nearest}?" in message


@pytest.mark.parametrize("word", ["\n", "x" * 5000, "--x\u2028y", "\x1b[31m"])
def test_an_unknown_word_is_shown_in_one_short_line(word):
    message = refusal(word)
    assert message.isprintable() and len(message) < 300


def test_an_option_like_no_other_points_to_the_help():
    assert refusal("--zzzzz", "1").endswith("See mill --help.")


def test_a_word_that_belongs_to_no_option_is_refused():
    assert "stray" in refusal("--num-replicas", "2", "stray")


def test_an_unknown_yaml_key_suggests_the_nearest(tmp_path):
    path = entry(tmp_path, "learning_raet: 1")
    message = refusal("--config", "it", named_configs=path)
    said = "There is no option learning_raet. Did you mean learning_rate?"
    assert message == f"{path}, line 2: {said}"


def test_a_value_the_dataclass_refuses_is_a_configuration_error():
    assert refusal("--num-replicas", "0") == "num_replicas must be at least 1, got 0."


@pytest.mark.parametrize(
    ("limits", "value", "said"),
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
def test_a_number_out_of_its_range_is_refused_with_the_range(limits, value, said):
    with pytest.raises(ConfigurationError) as caught:
        number("x", value, **limits)
    assert said in str(caught.value)


def test_a_number_in_its_range_is_a_float():
    assert number("x", 0) == 0 and isinstance(number("x", 0), float)
    assert number("x", -3, at_least=-math.inf) == -3
    assert number("x", 0.5, at_least=0.5, below=0.6) == 0.5


def test_an_option_that_must_be_given_is_missed_by_name():
    @dataclass(frozen=True, kw_only=True)
    class Needy:
        dataset_path: Path

    with pytest.raises(ConfigurationError, match=r"dataset[-_]path"):
        parse(Needy, [], program="needy")


def test_building_from_values_checks_names_and_types_as_well():
    assert build(Mill, {"num_replicas": "2"}).num_replicas == 2
    with pytest.raises(ConfigurationError, match=r"title\?"):
        build(Mill, {"tilte": "x"})


# Files that are not what they should be


def test_an_unknown_name_lists_the_entries_there_are(runs):
    message = refusal("--config", "smal", named_configs=runs)
    assert "--config smal" in message
    assert str(runs) in message
    assert "common, empty, small" in message


def test_entries_named_by_numbers_can_be_listed_and_chosen(tmp_path):
    path = tmp_path / "numbers.yml"
    path.write_text("50: {num_replicas: 5}\nlarge: {num_replicas: 6}\n")
    message = refusal("--config", "51", named_configs=path)
    assert "50" in message
    assert "large" in message
    assert mill("--config", "50", named_configs=path).num_replicas == 5


def test_a_missing_file_is_named_with_the_reason(tmp_path, runs):
    path = str(tmp_path / "none.yml")
    message = refusal("--config", "a", "--config-path", path, named_configs=runs)
    assert path in message
    assert "No such file" in message


def test_a_folder_is_not_a_configuration_file(tmp_path, runs):
    words = ("--config", "a", "--config-path", str(tmp_path))
    assert "directory" in refusal(*words, named_configs=runs).lower()


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "", "3"])
def test_a_file_without_a_mapping_is_refused(text, tmp_path):
    path = tmp_path / "list.yml"
    path.write_text(text)
    assert str(path) in (message := refusal("--config", "a", named_configs=path))
    assert "mapping" in message


def test_an_entry_that_is_no_mapping_is_refused(tmp_path):
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
def test_yaml_that_would_run_code_is_refused_and_runs_none(tag, tmp_path):
    trace = tmp_path / "ran"
    harmful = tag.format(trace)
    path = entry(tmp_path, f"title: {harmful}")
    assert "plain YAML" in refusal("--config", "it", named_configs=path)
    refusal("--optimizer-params", f"{{a: {harmful}}}")
    assert not trace.exists()


def test_a_command_without_named_configurations_has_no_option_for_them():
    assert "There is no option --config" in refusal("--config", "small")


# Options that stand for others


@dataclass(frozen=True, kw_only=True)
class Miller(Mill):
    """Grind in other words."""

    coarse: bool | None = field(default=None, metadata={"stands_for": ("model_name",)})
    """model_name stone."""
    corn: Literal["rye", "oats"] | None = field(default=None, metadata={"bare": "oats"})
    """What is ground."""

    @staticmethod
    def expand_options(values: dict[str, Any]) -> dict[str, Any]:
        if values.get("coarse"):
            return values | {"model_name": "stone", "title": "grits"}
        return values


def miller(*words: str, **options: Any) -> Miller:
    return parse(Miller, words, program="miller", **options)[0]


def test_an_option_is_translated_after_its_words_are_read():
    assert miller("--coarse").title == "grits"
    assert build(Miller, {"coarse": "yes"}).title == "grits"
    assert miller().title == "flour"


def test_a_flag_wins_over_a_named_option_that_stands_for_the_same(tmp_path):
    path = entry(tmp_path, "{coarse: true}")
    assert miller("--config", "it", named_configs=path).title == "grits"
    other = miller("--config", "it", "--model-name", "roller", named_configs=path)
    assert (other.title, other.model_name) == ("flour", "roller")
    path = entry(tmp_path, "{model_name: roller}")
    found = miller("--config", "it", "--coarse", named_configs=path)
    assert (found.title, found.model_name) == ("grits", "stone")


def test_an_option_may_mean_something_when_nothing_follows_it():
    assert miller("--corn", "--coarse").corn == "oats"
    assert miller("--corn", "rye").corn == "rye"
    assert miller().corn is None


# Help and records


def test_docstrings_under_fields_are_the_help(capsys, runs):
    with pytest.raises(SystemExit) as left:
        mill("--help", named_configs=runs)
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Grind some corn." in text
    assert "--num-replicas INT Copies of the model. (default: 1)" in text
    assert "Step size, at most 100 % of it. (default: 0.1)" in text
    assert "--model-name {stone,roller} Which mill. (default: stone)" in text
    assert "--validation [BOOL]" in text
    assert "--weight-decay NUMBER Pull towards zero." in text  # one spelling is enough
    assert "runs.yml" in text


def test_the_help_says_what_an_option_of_several_types_takes(capsys):
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


def test_the_help_has_the_commands_own_options_first_and_the_others_by_topic(capsys):
    with pytest.raises(SystemExit):
        mill("--help")
    text = capsys.readouterr().out
    assert text.startswith("usage: mill [options]\n")
    own, base = text.split("Options of every mill:")
    assert "--model-name" in own
    assert "--num-replicas" not in own
    assert "--num-replicas" in base


def test_every_option_of_the_cnn_has_help():
    docs = field_docs(CnnConfig)
    names = flat_options(CnnConfig)
    assert {name for name in names if not docs.get(name, "").strip()} == set()


def test_a_configuration_survives_being_written_down_and_read_again(tmp_path):
    config = mill(
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
    assert build(Mill, load_yaml(path)) == config


# The applications' own files

APPS = Path(str(resources.files("millrace") / "apps"))
ENTRIES = [
    pytest.param(command, path, name, id=f"{words.replace(' ', '-')}-{name}")
    for words, command in COMMANDS.items()
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
    words = ["--config", name]
    config, _ = parse(config_type, words, program="x", named_configs=path)
    assert isinstance(config, config_type)


@pytest.mark.parametrize(
    "words",
    [
        "--model digits_cnn --num-epochs 6 --micro-batch-size 8 --precision 16.16",
        "--validation False --logs-per-epoch 0.3333333333333333333",
        "--gradient-accumulation 8",  # as in all examples of "Periodic host events"
    ],
)
def test_the_references_spelling_of_cnn_options_is_understood(words):
    parse(CnnConfig, words.split(), program="x")


@pytest.mark.parametrize(
    "option", ["logs_per_epoch", "ckpts_per_epoch", "validations_per_epoch"]
)
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_rate_of_events_that_cannot_be_is_refused_by_its_name(option, value):
    words = [f"--{option}={value}"]
    with pytest.raises(ConfigurationError, match=f"{option}.*got {value}"):
        parse(CnnConfig, words, program="x")


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
def test_a_number_the_cnn_cannot_use_is_refused_by_name_and_value(option, value):
    with pytest.raises(ConfigurationError, match=rf"{option}.*got {value}"):
        parse(CnnConfig, [f"--{option}={value}"], program="x")


def test_resume_without_a_run_directory_says_what_is_missing():
    with pytest.raises(ConfigurationError, match=r"resume needs run_dir"):
        parse(CnnConfig, ["--resume"], program="x")


# Sections


@dataclass(frozen=True, kw_only=True)
class Grain:
    """What is ground."""

    kind: str = field(default="wheat", metadata={"aliases": ("--cereal",)})
    """Its name."""
    sacks: int = 3
    """How much there is."""

    def __post_init__(self) -> None:
        if self.sacks < 0:
            raise ValueError(f"sacks must be 0 or more, got {self.sacks}.")


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order, with sections."""

    customer: str = "anybody"
    """Who pays."""
    grain: Grain = Grain(sacks=7)
    days: list[int] = field(default_factory=list)
    """When."""


def order(*words: str) -> Order:
    return parse(Order, words, program="order")[0]


def test_options_of_sections_are_flat_on_the_command_line():
    assert order("--sacks", "4", "--customer", "me") == Order(
        customer="me", grain=Grain(sacks=4)
    )


def test_a_section_keeps_what_the_configuration_makes_its_default():
    assert order("--cereal", "rye").grain == Grain(kind="rye", sacks=7)
    assert as_plain(order()) == {
        "customer": "anybody",
        "kind": "wheat",
        "sacks": 7,
        "days": [],
    }
    assert plain_defaults(Order)["sacks"] == 7


def test_a_section_that_refuses_a_value_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="sacks must be 0 or more, got -1"):
        order("--sacks", "-1")


def test_yaml_is_flat_and_knows_aliases_of_sections(tmp_path):
    path = tmp_path / "orders.yml"
    path.write_text("it:\n  cereal: oats\n  customer: them\n")
    found, _ = parse(Order, ["--config", "it"], program="order", named_configs=path)
    assert (found.grain.kind, found.customer) == ("oats", "them")


def test_options_are_replaced_in_whichever_section_they_are():
    before = order("--sacks", "4")
    after = replace_options(before, customer="you", kind="rye")
    assert after == Order(customer="you", grain=Grain(kind="rye", sacks=4))
    assert option_value(after, "sacks") == 4
    with pytest.raises(ConfigurationError, match="sacks must be"):
        replace_options(before, sacks=-2)


def test_help_has_a_heading_for_each_section(capsys):
    with pytest.raises(SystemExit):
        order("--help")
    shown = capsys.readouterr().out
    assert "What is ground:" in shown
    assert shown.index("--customer") < shown.index("--days") < shown.index("--kind")
    assert "How much there is. (default: 7)" in shown


def test_two_options_of_one_name_are_a_mistake_of_ours():
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        sacks: int = 1
        grain: Grain = Grain()

    with pytest.raises(AssertionError, match="Twice has more than one sacks"):
        flat_options(Twice)
