"""Options of the commands: those of the reference, defaults, and mistakes."""

import shlex
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import SweepConfig, ValidateConfig
from millrace.config import (
    ConfigurationError,
    as_plain,
    build,
    load_named,
    load_yaml,
    parse,
)

RUNS = Path(str(resources.files("millrace.apps.autoencoder") / "runs.yml"))

SEED_COMMANDS = [
    "",
    "--training-data-file netflix_data/3m_train.txt "
    "--validation-data-file netflix_data/3m_valid.txt --size 128",
    "--training-data-file netflix_data/6m_train.txt "
    "--validation-data-file netflix_data/6m_valid.txt --size 256",
    "--training-data-file netflix_data/1y_train.txt --validation-data-file "
    "netflix_data/1y_valid.txt --size 256 --batch-size 32 --validation-batch-size 32",
    "--training-data-file netflix_data/full_train.txt --validation-data-file "
    "netflix_data/full_valid.txt --size 512 --batch-size 8 --validation-batch-size 8",
]

EVERY_OPTION = """
--training-data-file a.txt --validation-data-file b.txt --pipeline-num-parallel 32
--size 256 --batch-size 32 --validation-batch-size 16 --no-selu --no-dropout
--no-dense-refeeding --precision 16.32 --no-prng --weight-decay 0 --loss-scaling 1
--gradient-clipping --optimizer SGD --base-learning-rate -15
--learning-rate-decay 1,0.5 --learning-rate-schedule 0.4 --epochs 3 --select-ipus 0,1
--valid-per-epoch 0.5 --steps-per-log 2 --no-validation --multiprocessing --build-init
--batches-per-step 100 --logdir logs --testing-on-checkpoint weights
"""


def read(args, config_type=AutoencoderConfig):
    return parse(config_type, shlex.split(args), program="x", named_configs=RUNS)[0]


@pytest.mark.parametrize("args", SEED_COMMANDS)
def test_commands_of_the_reference_are_accepted(args):
    assert read(args).training.precision == "16.16"


def test_every_option_of_the_reference_is_accepted():
    _, given = parse(AutoencoderConfig, shlex.split(EVERY_OPTION), program="x")
    assert len(given) == EVERY_OPTION.count("--")
    config = read(EVERY_OPTION)
    assert config.initial_learning_rate == 2.0**-15 * 32
    assert config.run.run_dir.parent == Path("logs")
    assert config.run.run_dir.name.startswith("test-")
    assert config.device_indices == (0, 1)
    config = read(EVERY_OPTION.replace("--testing-on-checkpoint weights", ""))
    assert config.run.run_dir.name.startswith("bs32-rn256-")


def test_testing_on_a_checkpoint_needs_no_other_options():
    config = read("--testing-on-checkpoint runs/a --validation-data-file mine.txt")
    assert config.data.validation_data_file == Path("mine.txt")


@pytest.mark.parametrize(
    ("name", "batch", "size"),
    [("3m", 64, 128), ("6m", 64, 256), ("1y", 32, 256), ("full", 8, 512)],
)
def test_batch_and_size_default_to_the_settings_for_the_file_name(name, batch, size):
    config = read(f"--training-data-file data/{name}_train.txt")
    assert (config.resolved_batch_size, config.resolved_size) == (batch, size)
    assert config.resolved_validation_batch_size == batch
    assert config.resolved_epochs == 160
    config = read(f"--training-data-file data/{name}_train.txt.gz --size 128")
    assert (config.resolved_batch_size, config.resolved_size) == (batch, 128)
    config = read(f"--training-data-file {name}_train.txt --validation-batch-size 7")
    assert config.resolved_validation_batch_size == 7


def test_random_ratings_use_the_settings_of_the_reference():
    config = read("--data random")
    assert (config.data.kind, config.resolved_epochs) == ("random", 2)
    assert (config.resolved_batch_size, config.resolved_size) == (64, 128)
    assert config.resolved_validation_batch_size == 128


def test_without_ratings_a_small_example_is_generated():
    config = read("--epochs 3")
    assert (config.data.kind, config.data.num_users) == ("generated", 2000)
    assert (config.resolved_epochs, config.initial_learning_rate) == (3, 0.03)
    assert read("--num-ratings 500").data.kind == "random"
    # A run from before: its options are all in its file.
    assert build(AutoencoderConfig, as_plain(AutoencoderConfig())).data.kind == "random"


def test_the_learning_rate_is_that_of_the_optimizer():
    config = read("--data random --lr 0.005 --batch-size 8")
    assert config.initial_learning_rate == 0.005
    config = read("--data random --base-learning-rate -12 --batch-size 8")
    assert config.initial_learning_rate == 2**-12 * 8
    with pytest.raises(ConfigurationError, match=r"^Give learning_rate, .* not both"):
        read("--lr 0.005 --base-learning-rate -12")


def test_a_sweep_takes_learning_rates_or_exponents():
    words = "--data random --batch-size 8 --learning-rates 0.001 0.003"
    config, _ = parse(SweepConfig, words.split(), program="x")
    assert config.initial_learning_rates == [0.001, 0.003]
    np.testing.assert_allclose(8 * 2.0 ** np.array(config.exponents), [0.001, 0.003])
    assert [config.label(x) for x in config.exponents] == ["lr_0.001", "lr_0.003"]
    for more, message in (
        ("0.001", "the same float32 rate more than once"),
        ("0", "learning_rates must be more than 0"),
        ("--base-learning-rates 16,17", "Give learning_rates or base_learning_rates"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            parse(SweepConfig, f"{words} {more}".split(), program="x")


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("32.32", ("float32", "float32")),
        ("16.32", ("float16", "float32")),
        ("16.16", ("float16", "float16")),
    ],
)
def test_a_precision_gives_the_types_of_computation_and_weights(name, types):
    plan = read(f"--data random --precision {name}").plan
    assert (plan.types.compute, plan.types.weights) == types
    assert plan.stochastic_rounding == (name == "16.16")
    assert not read(f"--data random --precision {name} --no-prng").plan.stochastic_rounding


def test_loss_scaling_is_dynamic_in_float16_only():
    args = "--data random --size 128 --batch-size 8 "
    assert read(args).plan.loss_scaling == "dynamic"
    for other in ("--precision 32.32", "--precision 16.32 --half-type bfloat16"):
        assert read(args + other).plan.loss_scaling == 0


@pytest.mark.parametrize("name", load_yaml(RUNS))
def test_every_named_configuration_is_complete(name):
    config = build(AutoencoderConfig, load_named(RUNS, name))
    kind, _, period = name.partition("_")
    if kind == "netflix":  # as in the commands of the reference
        default = read(f"--training-data-file {config.data.training_data_file}")
        assert config.resolved_size == default.resolved_size
        assert config.resolved_batch_size == default.resolved_batch_size
    if kind == "paper":
        assert config.data.training_data_file == Path(f"netflix_data/{period}_train.txt")
        assert (config.training.refeeding, config.model.untied_decoder) == (
            "detached",
            True,
        )
        assert (config.initial_learning_rate, config.resolved_batch_size) == (0.005, 128)
    assert config.data.rows == ("items" if kind == "movielens" else "users")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "--training-data-file mine.txt --recipe graphcore",
            "a default only for files called 3m_train.txt",
        ),
        (
            "--training-data-file mine.txt --batch-size 8 --base-learning-rate -12",
            "size must be given for mine.txt: the graphcore recipe, chosen by "
            "--base-learning-rate, has a default only for files called 3m_train.txt",
        ),
        (
            "--training-data-file mine.txt --detached-refeeding",
            "chosen by --detached-refeeding, has a default only",
        ),
        (
            "--data generated --detached-refeeding --recipe modern",
            "The modern recipe trains without re-feeding. Leave out --detached-refeeding",
        ),
        ("--training-data-file nope.txt", "There is no file nope.txt."),
        ("--size 100", "--size must be one of 128, 256, 512; got '100'"),
        ("--validation-data-file b.txt", "Give a training_data_file as well"),
        ("--data generated --training-data-file a.txt", "the ratings are synthetic"),
        ("--rows films", "--rows must be one of users, items; got 'films'"),
        ("--data file", "data file needs a training_data_file"),
        ("--data generated --num-ratings 5", "num_ratings is for random ratings"),
        ("--rating-range 5 1", "the smallest and the largest rating"),
        ("--no-dropout --dropout-rate 0.5", "not both"),
        ("--dropout-rate 1", "below 1"),
        ("--no-dense-refeeding --detached-refeeding", "not both"),
        ("--learning-rate-decay 1,x", "comma-separated numbers"),
        ("--learning-rate-decay 1,0.1", "one number more than learning_rate_schedule"),
        ("--learning-rate-schedule 0.9,0.5", "increasing fractions from 0 to 1"),
        ("--select-ipus first", "select_devices must be AUTO"),
        ("--precision 8.8", "16.16, 16.32, 32.32"),
        ("--batch-size 0", "batch_size must be at least 1"),
        ("--epochs 0", "epochs must be more than 0"),
        ("--base-learning-rate 2000", "an exponent of 2, such as -16"),
        ("--base-learning-rate nan", "an exponent of 2, such as -16"),
        ("--multiprocessing --early-stopping 2", "waits for every validation"),
        ("--multiprocessing --num-replicas 2", "multiprocessing is for one replica"),
        ("--early-stopping 0", "early_stopping must be at least 1"),
        ("--logdir a --run-dir b", "not both"),
        ("--base-learning-rates 16", "Unknown option"),
    ],
)
def test_a_mistake_is_explained(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigurationError) as caught:
        read(args)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("args", "exponents"),
    [
        ("", [-12.5 - number / 2 for number in range(16)]),
        ("--num-ipus 1 --base-learning-rates 16", [-16]),
        ("--num-ipus 2 --base-learning-rates 16,17", [-16, -17]),
        ("--base-learning-rates 16,17,18.5", [-16, -17, -18.5]),
        ("--base-learning-rates 16..20", [-16, -17, -18, -19, -20]),
        ("--base-learning-rates 16..17 --num-ipus 3", [-16, -16.5, -17]),
        ("--base-learning-rates 20..18", [-20, -19, -18]),
        ("--base-learning-rates 16...20", [-16, -17, -18, -19, -20]),
        ("--base-learning-rates 16.5..18.5", [-16.5, -17.5, -18.5]),
        ("--base-learning-rates 16..20 --num-ipus 1", [-16]),
    ],
)
def test_learning_rates_of_a_sweep_are_parsed_like_the_reference(args, exponents):
    config = read(f"--training-data-file 3m_train.txt {args}", SweepConfig)
    assert config.exponents == exponents
    assert config.initial_learning_rates == [64 * 2.0**e for e in exponents]


@pytest.mark.parametrize("name", load_yaml(RUNS))
def test_a_sweep_accepts_every_named_configuration(name):
    trained = as_plain(read(f"--config {name}"))
    swept = as_plain(read(f"--config {name} --base-learning-rates 12,13", SweepConfig))
    own = {"base_learning_rates", "learning_rates", "num_ipus", "num_devices"}
    own |= {"weight_decays", "dropout_rates", "input_dropout_rates"}
    assert set(swept) - set(trained) == own
    named = set(load_named(RUNS, name)) - {"learning_rate", "base_learning_rate"}
    assert named <= set(swept)
    assert {n: swept[n] for n in named} == {n: trained[n] for n in named}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--num-ipus 3 --base-learning-rates 16,17", "has 2 values, but num_ipus is 3"),
        (
            f"--training-data-file {__file__} --num-ipus 2",
            "the graphcore recipe, chosen by --num-ipus, has a default only for files",
        ),
        ("--base-learning-rates=-16", "without their signs"),
        ("--base-learning-rates 16..x", "must be like 16..20, got '16..x'"),
        ("--base-learning-rates 16,16", "more than once"),
        ("--base-learning-rates 10,10.00000001", "the same float32 rate more than once"),
        ("--base-learning-rates 16..18.5", "Set the number of values with num_ipus"),
        ("--base-learning-rates 1..1000000000", "means 1,000,000,000 models"),
        ("--base-learning-rates 1..1e308", "must be like 16..20, got '1..1e308'"),
        ("--base-learning-rates 1..2 --num-ipus 1001", "means 1,001 models"),
        ("--base-learning-rates 16....20", "must be like 16..20, got '16....20'"),
        ("--base-learning-rates 16...2...20", "must be like 16..20"),
        ("--base-learning-rates 16,17..20", "must be like 16..20"),
        ("--base-learning-rates ..20", "must be like 16..20, got '..20'"),
        ("--base-learning-rates 1000", "at most 100; got '1000'"),
        ("--base-learning-rates 16,1e9", "at most 100; got '16,1e9'"),
        ("--base-learning-rates 16..", "must be like 16..20, got '16..'"),
        ("--base-learning-rates 16,17 --num-devices 3", "more than the 2 models"),
        ("--dropout-rates 0.5 1", "dropout_rates must be at least 0 and below 1"),
        ("--input-dropout-rates=-0.1", "input_dropout_rates must be at least 0 and"),
        ("--weight-decays 1e-3 nan", "weight_decays must be at least 0, got 0.001 nan"),
        ("--weight-decays 1e-3 0.001", "weight_decays has the same value more than once"),
        ("--dropout-rates 0.5 --no-dropout", "no_dropout or dropout_rates, not both"),
        (
            f"--data random --dropout-rates {' '.join(f'0.{n:03d}' for n in range(70))}",
            "have 1,120 combinations",
        ),
        ("--valid-per-epoch=-1", "valid_per_epoch must be 0 or more, got -1"),
    ],
)
def test_a_mistake_in_a_sweep_is_explained(args, message):
    with pytest.raises(ConfigurationError) as caught:
        read(args, SweepConfig)
    assert message in str(caught.value)


@pytest.mark.parametrize("config_type", [AutoencoderConfig, SweepConfig])
def test_the_small_example_leaves_room_for_options_that_contradict_its_own(config_type):
    assert read("", config_type).model.dropout_rate == 0.5
    config = read("--no-dropout --detached-refeeding", config_type)
    assert config.data.kind == "generated"
    assert config.model.no_dropout and config.training.detached_refeeding


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--quiet --verbose", "quiet and verbose are opposites"),
        ("--top 0", "lengths of at least 1, got 0"),
    ],
)
def test_a_mistake_in_a_validation_is_explained(args, message):
    with pytest.raises(ConfigurationError, match=message):
        read(f"--checkpoint run {args}", ValidateConfig)


def test_help_lists_options_by_section(capsys):
    with pytest.raises(SystemExit):
        parse(AutoencoderConfig, ["--help"], program="x", named_configs=RUNS)
    _, *groups = capsys.readouterr().out.split("\n\n")
    titles = {group.split("\n")[0]: group for group in groups}
    for title, option in {
        "options:": "--learning-rate",
        "Ratings:": "--data {file,random,generated}",
        "Model:": "--size {128,256,512}",
        "Training:": "--batch-size INT",
    }.items():
        assert option in titles[title]
