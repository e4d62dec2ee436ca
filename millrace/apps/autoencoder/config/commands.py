"""Options of the commands besides ``train``. Imports nothing heavy."""

import functools
import itertools
import math
import re
import struct
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from millrace.apps.autoencoder.config import (
    LARGEST_EXPONENT,
    SOURCES,
    TrainingConfig,
    check_lengths,
    choose_example,
)
from millrace.apps.autoencoder.config.recipe import expand_training_options
from millrace.apps.autoencoder.config.training import Hyperparameters, parse_numbers
from millrace.config import STORED, ConfigurationError
from millrace.run.options import ShortRunOptions, Which

ExportFormat = Literal["safetensors", "torch", "stablehlo", "onnx"]
SplitProtocol = Literal["time", "random", "leave-one-out", "random-leave-one-out"]

_RANGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*\.{2,3}\s*(\d+(?:\.\d+)?)\s*")
"""Two numbers separated by two or three dots; neither number starts or ends with a dot."""
_MOST_MODELS = 1000
"""Bound on the models of a range; a larger one is a typo."""
_OUTPUT_SUFFIXES = (".tsv", ".txt", ".csv", ".jsonl", ".parquet")
_TOLERANCE = 1e-6
_NOT_IN_SWEEPS = ("learning_rate", "early_stopping", "steps_per_log")
"""Options of the modern recipe that a sweep does not take over."""
_RATE_FACTORS = (0.25, 0.5, 1.0, 2.0)
"""The learning rates of a sweep with the modern recipe, relative to that of the recipe."""
_DEFAULT_EXPONENTS = "12.5,13,13.5,14,14.5,15,15.5,16,16.5,17,17.5,18,18.5,19,19.5,20"


class PlannedTrial(NamedTuple):
    """A model of a sweep before it is trained."""

    label: str
    """Its name in metrics."""
    exponent: float
    """The exponent of its learning rate."""
    settings: Hyperparameters


@dataclass(frozen=True, kw_only=True)
class SweepConfig(TrainingConfig):
    """Train recommenders with different learning rates or other settings, all together."""

    common_options: ClassVar = (
        *("training_data_file", "validation_data_file", "data", "recipe", "rows"),
        *("size", "dropout_rate", "untied_decoder", "no_dense_refeeding"),
        *("epochs", "batch_size", "weight_decay", "optimizer"),
        *("learning_rates", "base_learning_rates", "dropout_rates"),
        *("input_dropout_rates", "weight_decays", "num_devices"),
        *("run_dir", "resume", "seed", "quiet", "debug"),
    )

    named_without: ClassVar = ("base_learning_rate", "learning_rate", "lr")
    """Options of named configurations that a sweep ignores, because it varies them."""

    base_learning_rates: str = _DEFAULT_EXPONENTS
    """Exponents of the learning rates without the minus sign: 16,17,18 or 16..20 means
    2^-16 and so on, times batch_size. A range has steps of 1, or num_ipus values."""
    learning_rates: list[float] = field(default_factory=list)
    """Learning rates, for any batch size, such as 0.001 0.003 0.01; replaces
    base_learning_rates."""
    dropout_rates: list[float] = field(default_factory=list)
    """Dropout rates of the code layer, such as 0.3 0.5. With this option or the next two,
    there is a model for every combination of all values (default: dropout_rate)."""
    input_dropout_rates: list[float] = field(default_factory=list)
    """Fractions of the ratings to hide from the network (default: input_dropout_rate)."""
    weight_decays: list[float] = field(default_factory=list)
    """Weight decays, such as 1e-4 1e-3 (default: weight_decay)."""
    num_ipus: int | None = field(default=None, metadata={"aliases": ("--num-trials",)})
    """Number of learning rates, which the reference trains on one IPU each."""
    num_devices: int | None = None
    """Devices to distribute the models over (default: all; one on CPU)."""
    steps_per_log: int = field(default=40, metadata={"may_change": True})
    """Steps between two log lines."""

    @staticmethod
    def start_from_named(named: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return a named configuration; without ratings, it means random ones."""
        del given
        return {"data": None, "recipe": "graphcore"} | named

    @staticmethod
    def expand_options(values: dict[str, Any]) -> dict[str, Any]:
        """Choose ratings to learn from, and rates that suit them, if none are given."""
        has_rates = bool({"learning_rates", "base_learning_rates", "num_ipus"} & {*values})
        if any(name in values for name in SOURCES):
            expanded = expand_training_options(values)
            dropped = {*_NOT_IN_SWEEPS} - {*values}
            chosen = {name: v for name, v in expanded.items() if name not in dropped}
            if not has_rates and "learning_rate" in expanded:
                rate = expanded["learning_rate"]
                chosen["learning_rates"] = [rate * factor for factor in _RATE_FACTORS]
            return chosen
        example = choose_example(values) | {"recipe": "graphcore"}
        example.pop("learning_rate", None)
        if not has_rates:
            example["learning_rates"] = [0.003, 0.01, 0.02, 0.03]
        return example | values

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.objective == "ranking":
            raise ValueError(
                "The objective ranking is for autoencoder train; a sweep predicts ratings."
            )
        for name in ("num_ipus", "num_devices", "steps_per_log"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self._check_lists()
        count = len(self.exponents)
        if self.num_ipus is not None and count != self.num_ipus:
            name = "learning_rates" if self.learning_rates else "base_learning_rates"
            raise ValueError(
                f"{name} has {count} values, but num_ipus is {self.num_ipus}. Give one "
                "value for each."
            )
        if self.num_trials > _MOST_MODELS:
            raise ValueError(
                f"The values that are given have {self.num_trials:,} combinations, more "
                f"than {_MOST_MODELS:,} models. Give fewer."
            )
        if self.num_devices is not None and self.num_devices > self.num_trials:
            raise ValueError(
                f"num_devices is {self.num_devices}, more than the {self.num_trials} "
                "models."
            )

    def _check_lists(self) -> None:
        """Raise if a list has values that are not valid, or the same more than once."""
        limits = {"weight_decays": math.inf}
        for name in ("dropout_rates", "input_dropout_rates", "weight_decays"):
            values = getattr(self, name)
            shown = " ".join(map(str, values))
            limit = limits.get(name, 1.0)
            if not all(0 <= value < limit for value in values):
                below = "" if limit == math.inf else " and below 1"
                raise ValueError(f"{name} must be at least 0{below}, got {shown}.")
            if len({struct.pack("f", value) for value in values}) < len(values):
                raise ValueError(f"{name} has the same value more than once: {shown}.")
        if self.dropout_rates and self.model.no_dropout:
            raise ValueError("Give no_dropout or dropout_rates, not both.")

    @property
    def num_trials(self) -> int:
        """The number of models: all combinations of the values that are given."""
        return math.prod(map(len, [self.exponents, *self._other_lists()]))

    def _other_lists(self) -> list[list[float | None]]:
        """Return the values besides learning rates; None for those that are not given."""
        lists = (self.weight_decays, self.dropout_rates, self.input_dropout_rates)
        return [list(values) or [None] for values in lists]

    @property
    def varies_only_rates(self) -> bool:
        """Whether the models differ in their learning rates only."""
        return self.num_trials == len(self.exponents)

    def build_trials(self, default: Hyperparameters) -> list[PlannedTrial]:
        """Return all models; values that are not given are those of `default`."""
        rates = list(zip(self.exponents, self.initial_learning_rates, strict=True))
        trials = []
        for pair, others in itertools.product(
            rates, itertools.product(*self._other_lists())
        ):
            exponent, rate = pair
            names = ("weight_decay", "dropout_rate", "input_dropout_rate")
            pairs = zip(names, others, strict=True)
            given = {name: value for name, value in pairs if value is not None}
            label = f"trial_{len(trials) + 1}"
            if self.varies_only_rates:
                label = self.label(exponent)
            settings = default._replace(learning_rate=rate, **given)
            trials.append(PlannedTrial(label, exponent, settings))
        return trials

    @functools.cached_property
    def exponents(self) -> list[float]:
        """The exponents of the learning rates, with their signs."""
        if self.learning_rates:
            return self._exponents_of_rates()
        text = self.base_learning_rates
        values = (
            self._expand_range(text)
            if ".." in text
            else parse_numbers("base_learning_rates", text)
        )
        if not values or not all(0 < value <= LARGEST_EXPONENT for value in values):
            raise ValueError(
                "base_learning_rates are given without their signs, 16 for 2^-16, above 0 "
                f"and at most {LARGEST_EXPONENT}; got {text!r}."
            )
        # Models train with float32 rates: two that round to the same one are duplicates.
        if len({struct.pack("f", 2.0**-value) for value in values}) < len(values):
            raise ValueError(
                f"base_learning_rates has the same float32 rate more than once: {text!r}."
            )
        return [-value for value in values]

    def _exponents_of_rates(self) -> list[float]:
        rates = self.learning_rates
        if self.base_learning_rates != _DEFAULT_EXPONENTS:
            raise ValueError("Give learning_rates or base_learning_rates, not both.")
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(
                f"learning_rates must be more than 0, got {' '.join(map(str, rates))}."
            )
        if len({struct.pack("f", rate) for rate in rates}) < len(rates):
            raise ValueError(
                "learning_rates has the same float32 rate more than once: "
                f"{' '.join(map(str, rates))}."
            )
        return [math.log2(rate / self.resolved_batch_size) for rate in rates]

    def label(self, exponent: float) -> str:
        """Return the name of a trial in metrics: its exponent or its learning rate.

        Twelve digits distinguish all exponents whose float32 learning rates differ.
        """
        if self.learning_rates:
            return f"lr_{2.0**exponent * self.resolved_batch_size:.8g}"
        return f"{-exponent:.12g}"

    def _expand_range(self, text: str) -> list[float]:
        if (ends := _RANGE.fullmatch(text)) is None:
            raise ValueError(f"base_learning_rates must be like 16..20, got {text!r}.")
        low, high = map(float, ends.groups())
        count = self.num_ipus or abs(high - low) + 1
        if count > _MOST_MODELS:
            raise ValueError(
                f"base_learning_rates {text} means {count:,.10g} models, more than "
                f"{_MOST_MODELS:,}. Choose a smaller range."
            )
        if count % 1:
            raise ValueError(
                f"base_learning_rates {text} is not a whole number of steps of 1. Set the "
                "number of values with num_ipus."
            )
        steps = max(1, int(count) - 1)
        return [low + (high - low) * number / steps for number in range(int(count))]

    @property
    def initial_learning_rates(self) -> list[float]:
        """The learning rates at the start of the run."""
        if self.learning_rates:
            return self.learning_rates
        return [2.0**exponent * self.resolved_batch_size for exponent in self.exponents]


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """Measure how well a trained recommender predicts ratings and ranks items."""

    checkpoint: Path = field(metadata={"positional": "RUN", **STORED})
    """Directory of a training run, its folder of checkpoints, or one checkpoint."""
    which: Which = "best"
    """Checkpoint of the run to use: the best by validation, the last, or the one after
    this number of updates."""
    training_data_file: Path | None = None
    """Known ratings to predict from (default: the training file of the run)."""
    validation_data_file: Path | None = None
    """Later ratings to predict (default: the validation file of the run)."""
    validation_batch_size: int | None = None
    """Rows per batch (default: as in training)."""
    top: list[int] = field(default_factory=lambda: [10])
    """Lengths k of the rankings: Recall@k, NDCG@k and so on."""
    relevant_rating: float | None = None
    """Smallest rating that makes an item relevant for the ranking (default:
    positive_from of the run)."""
    run: ShortRunOptions = ShortRunOptions()

    def __post_init__(self) -> None:
        check_lengths(self.top)
        if (size := self.validation_batch_size) is not None and size < 1:
            raise ValueError(f"validation_batch_size must be at least 1, got {size}.")


@dataclass(frozen=True, kw_only=True)
class RecommendConfig:
    """List the unrated items that users are likely to rate highest."""

    checkpoint: Path = field(metadata={"positional": "RUN", **STORED})
    """Directory of a training run, its folder of checkpoints, or one checkpoint."""
    which: Which = "best"
    """Checkpoint of the run to use: the best by validation, the last, or the one after
    this number of updates."""
    user: list[str] = field(default_factory=list)
    """IDs of the users, as in the ratings file."""
    all: bool = False
    """Recommend to every user with ratings."""
    top: int = 10
    """Items per user."""
    training_data_file: Path | None = None
    """Known ratings of the users (default: the training file of the run)."""
    titles: Path | None = None
    """File of item titles: lines of item ID, optional year, and title."""
    out: Path | None = field(default=None, metadata={"aliases": ("--output",)})
    """Write to this file: comma-separated for .csv, an object per line for .jsonl, Parquet
    for .parquet, otherwise tab-separated."""
    batch_size: int = 256
    """Users per batch."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        for name in ("top", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if bool(self.user) == self.all:
            raise ValueError("Give the users to recommend to: --user ID ..., or --all.")
        if self.out is not None:
            check_suffix(self.out)


def check_suffix(path: Path) -> None:
    """Raise unless recommendations can be written to a file of this name."""
    if path.suffix not in _OUTPUT_SUFFIXES:
        raise ValueError(
            f"out must end in {', '.join(_OUTPUT_SUFFIXES)}, got {path.name!r}."
        )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained recommender to a folder, for use without millrace.

    The folder gets config.json (the network, the biases, the metrics), column_ids.json
    (which item each column is), README.md, and in each format:

    safetensors: model.safetensors, the weights as float32 and the biases of the items.

    torch: model.pt, the same as a state dict for torch.load; needs no PyTorch to write.

    stablehlo: model.stablehlo, a program with weights and biases inside. It takes the
    ratings of any number of users, (users, items) with 0 where there is none, and returns
    the predicted ratings of all items. It runs on CPUs and NVIDIA GPUs with jax.export.

    onnx: model.onnx, the same program for ONNX Runtime and others.
    """

    run: Path = field(metadata={"positional": True, **STORED})
    """Directory of a run of autoencoder train, or one of its checkpoints."""
    format: list[ExportFormat] = field(default_factory=lambda: ["safetensors"])
    """Formats: safetensors, torch, stablehlo, onnx."""
    output: Path | None = field(default=None, metadata={"aliases": ("--out",)})
    """Folder to write; created if needed (default: export in the run directory)."""
    which: Which = "best"
    """Checkpoint of the run to use: the best by validation, the last, or the one after
    this number of updates."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        if not self.format:
            raise ValueError("Give a format: safetensors, torch, stablehlo, onnx.")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Split ratings into files for autoencoder train and validate.

    INPUT is a file of user, item, rating and time (text or Parquet), or the folder of a
    published dataset: the Netflix Prize (training_set/mv_*.txt or combined_data_*.txt) or
    MovieLens (u.data, ratings.dat, ratings.csv). IDs are kept. Users and items that do not
    occur in training are dropped from the other two files, and counted.

    --split time (TO in RecBole, with the ratio split RS): the earliest ratings are for
    training, the latest for test. Of ratings at the same time, the order in INPUT counts.

    --split random (RO in RecBole, with RS): by the seed, whatever the order in INPUT.

    --split leave-one-out (LS in RecBole): the last rating of each user is for test, the
    one before it for validation. Users with two ratings have none for validation, users
    with one only train. random-leave-one-out takes two at random, and needs no times.
    """

    input: Path = field(metadata={"positional": True})
    """File or folder to read; files may be gzipped."""
    output_dir: Path = Path(".")
    """Folder to write to; created if needed."""
    prefix: str | None = None
    """Prefix of the file names PREFIXtrain.txt, PREFIXvalid.txt and PREFIXtest.txt
    (default: the period and an underscore, or nothing)."""
    format: Literal["txt", "csv", "parquet"] = "txt"
    """Format of the files: tab-separated text; comma-separated with a header and times; or
    Parquet."""
    split: SplitProtocol | None = None
    """Protocol: time, random, leave-one-out or random-leave-one-out (default: time if there
    are fractions)."""
    period: Literal["3m", "6m", "1y", "full"] | None = None
    """Published split of the Netflix Prize data."""
    split_at: list[str] = field(default_factory=list)
    """One or two dates such as 2005-12-01. Training ends before the first, validation
    before the second; with one date, later ratings are assigned to validation or test at
    random."""
    fractions: list[float] = field(default_factory=list)
    """Fractions of the ratings for training, validation and test (default: 0.8 0.1 0.1 with
    --split)."""
    per_user: bool = False
    """Apply the fractions to the ratings of each user separately."""
    seed: int = 0
    """Seed for what is assigned at random."""
    no_ratings: bool = False
    """Ignore ratings. Without a header, the columns are then user, item and time."""
    rating_range: list[float] = field(default_factory=lambda: [0.5, 5.0])
    """Smallest and largest valid rating."""
    user_column: str | None = None
    """Column of user IDs: its name in the header, or its number from 1 (default: known
    names; without a header, the order is user, item, rating, time)."""
    item_column: str | None = None
    """Column of item IDs."""
    rating_column: str | None = None
    """Column of ratings."""
    time_column: str | None = None
    """Column of times: dates, or seconds or milliseconds since 1970."""
    overwrite: bool = False
    """Replace existing files."""
    quiet: bool = False
    """Print errors only."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        ways = {
            "--period": self.period is not None,
            "--split-at": bool(self.split_at),
            "--fractions or --split": bool(self.fractions) or self.split is not None,
        }
        given = [way for way, is_given in ways.items() if is_given]
        if len(given) != 1:
            raise ConfigurationError(
                f"Give one of {', '.join(ways)} to split by; "
                f"got {' and '.join(given) or 'none'}."
            )
        if len(self.split_at) > 2 or self.dates != sorted(set(self.dates)):
            raise ConfigurationError(
                "--split-at takes one or two dates, the earlier first; "
                f"got {' '.join(self.split_at)}."
            )
        self._check_fractions()
        lowest, *highest = self.rating_range or [0]
        if len(highest) != 1 or not 0 < lowest < highest[0]:
            raise ConfigurationError(
                "--rating-range takes two numbers above 0, the smaller first (0 means no "
                f"rating); got {self.rating_range}."
            )

    def _check_fractions(self) -> None:
        leaves_out = self.split in ("leave-one-out", "random-leave-one-out")
        if leaves_out and (self.fractions or self.per_user):
            raise ConfigurationError(
                f"--split {self.split} takes one rating of each user for test and one for "
                "validation: it has no --fractions, and --per-user is implied."
            )
        if self.per_user and not self.fractions and self.split is None:
            raise ConfigurationError("--per-user needs --fractions or --split.")
        if not self.fractions:
            return
        wrong_sum = abs(sum(self.fractions) - 1) > _TOLERANCE
        if len(self.fractions) != 3 or min(self.fractions) <= 0 or wrong_sum:
            raise ConfigurationError(
                "--fractions takes three numbers above 0 that sum to 1, for training, "
                f"validation and test; got {self.fractions}."
            )

    @property
    def protocol(self) -> SplitProtocol:
        """The protocol, after defaults."""
        return self.split or "time"

    @property
    def needs_times(self) -> bool:
        """Whether the split depends on times."""
        return self.protocol in ("time", "leave-one-out")

    @property
    def dates(self) -> list[date]:
        """The dates in ``split_at``."""
        try:
            return [date.fromisoformat(text) for text in self.split_at]
        except ValueError as error:
            raise ConfigurationError(
                f"--split-at takes dates such as 2005-12-01: {error}."
            ) from None

    @property
    def columns(self) -> dict[str, str]:
        """The columns that were chosen, by kind."""
        chosen = {
            "user": self.user_column,
            "item": self.item_column,
            "rating": self.rating_column,
            "time": self.time_column,
        }
        return {kind: column for kind, column in chosen.items() if column is not None}
