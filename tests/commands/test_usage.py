"""Pages of applications, suggestions for typos and named configurations."""

import shlex

import pytest

from millrace.cli import main
from millrace.commands.configs import describe_configs
from millrace.commands.registry import APPLICATIONS, COMMANDS
from millrace.commands.usage import format_unknown_command, suggest_commands
from millrace.config.command_line import _build_parser


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("cnn trian", ["cnn train"]),
        ("trian", ["cnn train", "vcd train", "autoencoder train"]),
        ("recommend", ["autoencoder recommend"]),
        ("cnn recommend", ["autoencoder recommend"]),
        ("train cnn", ["cnn train"]),
        ("autoencodr sweep", ["autoencoder sweep"]),
        ("benhc", ["bench"]),
        ("frobnicate", []),
    ],
)
def test_the_nearest_command_is_suggested(typed, suggested):
    assert suggest_commands(typed.split()) == suggested


def test_a_message_names_all_suggestions():
    assert format_unknown_command(["trian", "--x"]) == (
        "Unknown command 'trian'. Did you mean 'cnn train', 'vcd train' or "
        "'autoencoder train'?"
    )
    assert format_unknown_command(["cnn", "frobnicate"]) == (
        "Unknown command 'cnn frobnicate'. See millrace cnn --help."
    )
    assert format_unknown_command(["--versio"]) == (
        "Unknown option --versio. Did you mean --version?"
    )
    assert format_unknown_command(["--frob"]) == (
        "Unknown option --frob. See millrace --help."
    )


@pytest.mark.parametrize("application", APPLICATIONS)
def test_examples_of_an_application_are_valid_commands(application):
    for example in APPLICATIONS[application].examples:
        program, first, second, *args = shlex.split(example, comments=True)
        assert program == "millrace" and first == application
        command = COMMANDS[f"{first} {second}"]
        path = command.named_configs_path()
        parser = _build_parser(command.load_config_type(), program, path)
        assert parser.parse_known_args(args)[1] == []


@pytest.mark.parametrize("application", ["cnn", "vcd", "autoencoder"])
def test_configurations_are_listed_with_a_description(application, capsys):
    path = COMMANDS[f"{application} train"].named_configs_path()
    assert path is not None
    described = describe_configs(path)
    with pytest.raises(SystemExit) as ended:
        main([application, "configs"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for name, text in described.items():
        assert len(text) > 8 and f"  {name} " in shown
        assert text in " ".join(shown.split())  # over several lines, but complete
    assert f"millrace {application} train --config" in shown


def test_a_configuration_is_printed_with_its_inherited_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["cnn", "configs", "resnet8_test_lars"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "model_name: cifar_resnet8" in shown and "optimizer: lars" in shown
    assert "# millrace cnn train --config resnet8_test_lars" in shown


def test_an_unknown_configuration_is_a_mistake_with_a_suggestion(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["cnn", "configs", "digits_dmo"])
    assert ended.value.code == 2
    assert "Did you mean digits_demo?" in capsys.readouterr().err
