"""``--help`` of every command is short; ``--help-all`` is complete."""

import dataclasses

import pytest

from millrace.commands.registry import COMMANDS
from millrace.config import ConfigurationError, common_options, flat_options, format_help
from millrace.config.building import flag
from millrace.config.help import SHOWN_ALIASES, group_options

TWO_SCREENS = 100


def get_help(name: str, *, full: bool) -> str:
    command = COMMANDS[name]
    path = command.named_configs_path()
    return format_help(command.load_config_type(), f"millrace {name}", path, full=full)


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_on_two_screens(name):
    lines = get_help(name, full=False).splitlines()
    assert len(lines) <= TWO_SCREENS
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_entries_close_their_parentheses_and_have_one_default(name):
    lines = get_help(name, full=False).splitlines()
    text = "\n".join(line.strip() if line.startswith(" " * 20) else line for line in lines)
    for entry in text.split("\n  "):
        assert entry.count("(") == entry.count(")"), entry
        assert entry.count("(default:") <= 1, entry


def test_arguments_and_paragraphs_come_before_options():
    text = get_help("cnn export", full=False)
    assert "without millrace.\n\nThe folder" in text
    assert text.index("\narguments:\n  RUN ") < text.index("\noptions:\n")


def test_help_of_training_is_short_and_says_how_to_see_more():
    text = get_help("cnn train", full=False)
    assert len(text.splitlines()) <= 90
    assert text.splitlines()[-1].startswith("--help-all shows all 1")
    for option in ("--num-epochs, --epochs INT", "--model", "--config NAME", "--resume"):
        assert option in text
    assert "--half-partials" not in text


@pytest.mark.parametrize("name", COMMANDS)
def test_common_options_exist(name):
    config_type = COMMANDS[name].load_config_type()
    listed = getattr(config_type, "common_options", ())
    assert set(listed) == common_options(config_type) or not listed
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("name", ["cnn train", "autoencoder train", "vcd train"])
def test_options_have_the_same_usual_names_in_every_application(name):
    options = flat_options(COMMANDS[name].load_config_type())
    names = {flag(option) for option in options}
    names |= {a for entry in options.values() for a in entry.metadata.get("aliases", ())}
    assert {"--epochs", "--learning-rate", "--lr", "--batch-size"} <= names


@pytest.mark.parametrize(
    "name", ["cnn validate", "autoencoder validate", "vcd evaluate", "vcd sample"]
)
def test_commands_that_do_not_train_offer_no_resume(name):
    assert "--resume" not in get_help(name, full=False)
    known = flat_options(COMMANDS[name].load_config_type())
    required = {n: "a" for n, o in known.items() if o.default is dataclasses.MISSING}
    given = required | {"resume": True, "run_dir": "b"}
    with pytest.raises(ConfigurationError, match="Only training can be resumed"):
        COMMANDS[name].configure(given, name=name)


def test_help_does_not_show_defaults_that_a_recipe_replaces():
    text = " ".join(get_help("autoencoder train", full=False).split())
    assert "Bits of computation and of weights. (default: by recipe)" in text
    assert "(default: Momentum)" not in text


def test_every_shown_alias_belongs_to_an_option():
    aliases = {
        alias
        for command in COMMANDS.values()
        for option in flat_options(command.load_config_type()).values()
        for alias in option.metadata.get("aliases", ())
    }
    assert set(SHOWN_ALIASES) <= aliases


@pytest.mark.parametrize("name", COMMANDS)
def test_all_options_are_in_the_full_help(name):
    text = get_help(name, full=True)
    for option, entry in flat_options(COMMANDS[name].load_config_type()).items():
        if entry.metadata.get("hidden"):
            assert f"{flag(option)} " not in text
        elif not entry.metadata.get("positional"):
            assert f"  {flag(option)}" in text or f", {flag(option)}" in text, option


def test_texts_name_other_options_as_flags():
    text = " ".join(get_help("cnn train", full=True).split())
    for said in [
        "Apply --weight-decay and --l2-regularization to kernels",
        "what is found in --dataset-path, otherwise",
        "Same as --norm-layer batch_norm",  # a value
        "lars: momentum, weight_decay, eeta",  # keys of a dictionary
    ]:
        assert said in text
    sweep = " ".join(get_help("autoencoder train", full=True).split())
    assert "learning_rate, weight_decay, dropout_rate and" in sweep  # values


def test_options_without_effect_come_last():
    groups = group_options(COMMANDS["cnn train"].load_config_type())
    *others, last = groups
    assert "without effect" in last and "nanoo" in groups[last]
    effects = [option.metadata for title in others for option in groups[title].values()]
    assert not any(metadata.get("without_effect") for metadata in effects)


def test_a_user_application_shows_few_options_of_its_sections():
    from dataclasses import dataclass

    from millrace.plan import Plan
    from millrace.run.options import RunOptions

    @dataclass(frozen=True, kw_only=True)
    class Mine:
        """Mine."""

        width: int = 3
        """Width of the network."""
        plan: Plan = Plan()
        run: RunOptions = RunOptions()

    shown = common_options(Mine)
    assert {"width", "micro_batch_size", "run_dir"} <= shown
    assert not {"wandb_tags", "device_mapping"} & shown
