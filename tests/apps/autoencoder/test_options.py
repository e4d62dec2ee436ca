"""What the commands can be told: the reference's options, and mistakes."""

import shlex
from importlib import resources
from pathlib import Path

import pytest

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.evaluate import ValidateConfig
from millrace.apps.autoencoder.config.sweep import SweepConfig
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


def read(words, config_type=AutoencoderConfig):
    return parse(config_type, shlex.split(words), program="x", named_configs=RUNS)[0]


@pytest.mark.parametrize("words", SEED_COMMANDS)
def test_the_seeds_commands_are_understood(words):
    assert read(words).precision == "16.16"


def test_every_option_of_the_reference_is_understood():
    _, given = parse(AutoencoderConfig, shlex.split(EVERY_OPTION), program="x")
    assert len(given) == EVERY_OPTION.count("--")
    config = read(EVERY_OPTION)
    assert config.first_learning_rate == 2.0**-15 * 32
    assert config.run_dir.parent == Path("logs")
    assert config.run_dir.name.startswith("test-")
    assert config.device_numbers == (0, 1)
    config = read(EVERY_OPTION.replace("--testing-on-checkpoint weights", ""))
    assert config.run_dir.name.startswith("bs32-rn256-")


def test_a_test_needs_to_know_nothing_that_the_checkpoint_knows():
    config = read("--testing-on-checkpoint runs/a --validation-data-file mine.txt")
    assert config.validation_data_file == Path("mine.txt")


@pytest.mark.parametrize(
    ("name", "batch", "size"),
    [("3m", 64, 128), ("6m", 64, 256), ("1y", 32, 256), ("full", 8, 512)],
)
def test_batch_and_size_follow_from_the_files_name(name, batch, size):
    config = read(f"--training-data-file data/{name}_train.txt")
    assert (config.resolved_batch_size, config.resolved_size) == (batch, size)
    assert config.resolved_validation_batch_size == batch
    assert config.resolved_epochs == 160
    config = read(f"--training-data-file data/{name}_train.txt.gz --size 128")
    assert (config.resolved_batch_size, config.resolved_size) == (batch, 128)


def test_random_ratings_have_the_references_settings():
    config = read("")
    assert (config.data_kind, config.resolved_epochs) == ("random", 2)
    assert (config.resolved_batch_size, config.resolved_size) == (64, 128)
    assert config.resolved_validation_batch_size == 128


def test_a_loss_is_scaled_dynamically_in_float16_alone():
    words = "--size 128 --batch-size 8 "
    assert read(words).plan.loss_scaling == "dynamic"
    for other in ("--precision 32.32", "--precision 16.32 --half-type bfloat16"):
        assert read(words + other).plan.loss_scaling == 0


@pytest.mark.parametrize("name", load_yaml(RUNS))
def test_every_named_configuration_is_whole(name):
    config = build(AutoencoderConfig, load_named(RUNS, name))
    kind, _, period = name.partition("_")
    if kind == "netflix":  # what the reference's commands say
        default = read(f"--training-data-file {config.training_data_file}")
        assert config.resolved_size == default.resolved_size
        assert config.resolved_batch_size == default.resolved_batch_size
    if kind == "paper":
        assert config.training_data_file == Path(f"netflix_data/{period}_train.txt")
        assert (config.refeeding, config.untied_decoder) == ("detached", True)
        assert (config.first_learning_rate, config.resolved_batch_size) == (0.005, 128)
    assert config.rows == ("items" if kind == "movielens" else "users")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--training-data-file mine.txt", "known only for files called 3m_train.txt"),
        ("--training-data-file mine.txt --batch-size 8", "size must be given for mine.txt"),
        ("--training-data-file nope.txt", "There is no training_data_file nope.txt."),
        ("--size 100", "--size must be one of 128, 256, 512; got '100'"),
        ("--validation-data-file b.txt", "Give a training_data_file as well"),
        ("--data generated --training-data-file a.txt", "the ratings are made up"),
        ("--rows films", "--rows must be one of users, items; got 'films'"),
        ("--data file", "data file needs a training_data_file"),
        ("--data generated --num-ratings 5", "num_ratings is for random ratings"),
        ("--rating-range 5 1", "the smallest and the largest rating"),
        ("--no-dropout --dropout-rate 0.5", "not both"),
        ("--dropout-rate 1", "below 1"),
        ("--no-dense-refeeding --detached-refeeding", "Give one of them"),
        ("--learning-rate-decay 1,x", "numbers with commas between"),
        ("--learning-rate-decay 1,0.1", "one number more than learning_rate_schedule"),
        ("--learning-rate-schedule 0.9,0.5", "rising shares"),
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
def test_a_mistake_is_named(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigurationError) as caught:
        read(words)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "exponents"),
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
def test_a_sweeps_learning_rates_are_read_as_the_seed_says(words, exponents):
    config = read(f"--training-data-file 3m_train.txt {words}", SweepConfig)
    assert config.exponents == exponents
    assert config.first_learning_rates == [64 * 2.0**e for e in exponents]


@pytest.mark.parametrize("name", load_yaml(RUNS))
def test_a_sweep_goes_through_learning_rates_for_a_named_configuration(name):
    trained = as_plain(read(f"--config {name}"))
    swept = as_plain(read(f"--config {name} --base-learning-rates 12,13", SweepConfig))
    ours = {"base_learning_rates", "num_ipus", "num_devices"}
    assert set(swept) - set(trained) == ours
    told = set(load_named(RUNS, name)) - {"learning_rate", "base_learning_rate"}
    assert told <= set(swept)
    assert {n: swept[n] for n in told} == {n: trained[n] for n in told}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-ipus 3 --base-learning-rates 16,17", "has 2 values, but num_ipus is 3"),
        ("--base-learning-rates=-16", "without their signs"),
        ("--base-learning-rates 16..x", "must be like 16..20, got '16..x'"),
        ("--base-learning-rates 16,16", "more than once"),
        ("--base-learning-rates 10,10.00000001", "more than once, in 32 bits"),
        ("--base-learning-rates 16..18.5", "say how many values"),
        ("--base-learning-rates 1..1000000000", "stands for 1,000,000,000 models"),
        ("--base-learning-rates 1..1e308", "must be like 16..20, got '1..1e308'"),
        ("--base-learning-rates 1..2 --num-ipus 1001", "stands for 1,001 models"),
        ("--base-learning-rates 16....20", "must be like 16..20, got '16....20'"),
        ("--base-learning-rates 16...2...20", "must be like 16..20"),
        ("--base-learning-rates 16,17..20", "must be like 16..20"),
        ("--base-learning-rates ..20", "must be like 16..20, got '..20'"),
        ("--base-learning-rates 1000", "at most 100; got '1000'"),
        ("--base-learning-rates 16,1e9", "at most 100; got '16,1e9'"),
        ("--base-learning-rates 16..", "must be like 16..20, got '16..'"),
        ("--base-learning-rates 16,17 --num-devices 3", "more than the 2 learning rates"),
        ("--valid-per-epoch=-1", "valid_per_epoch must be 0 or more, got -1"),
    ],
)
def test_a_mistake_in_a_sweep_is_named(words, said):
    with pytest.raises(ConfigurationError) as caught:
        read(words, SweepConfig)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--quiet --verbose", "quiet and verbose are opposites"),
        ("--top 0", "top must be at least 1, got 0"),
    ],
)
def test_a_mistake_in_a_validation_is_named(words, said):
    with pytest.raises(ConfigurationError, match=said):
        read(f"--checkpoint run {words}", ValidateConfig)
