"""Options of ``millrace autoencoder train``. Imports nothing heavy."""

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from millrace.apps.autoencoder.config.data import DataOptions
from millrace.apps.autoencoder.config.recipe import expand_training_options
from millrace.apps.autoencoder.config.search import SEARCHED, Searched
from millrace.apps.autoencoder.config.training import ModelOptions, TrainingOptions
from millrace.config import STORED, ConfigurationError, build
from millrace.plan import Plan, resolve_precision
from millrace.run.options import TRANSIENT, RunOptions

_MAY_CHANGE = {"may_change": True}

MOST_TRIALS = 1024
"""Bound on the models of a search; a larger number is a typo."""
LARGEST_EXPONENT = 100
"""Bound on exponents of learning rates: 2^-100 trains nothing in any precision."""
SOURCES = (
    *("data", "training_data_file", "validation_data_file", "test_data_file"),
    *("testing_on_checkpoint", "arrays", "num_users", "num_items", "num_ratings"),
)
"""Options that say which ratings to use."""
_SMALL_EXAMPLE: dict[str, Any] = {
    **{"data": "generated", "num_users": 2000, "num_items": 300},
    **{"batch_size": 16, "epochs": 20.0, "learning_rate": 0.03},
    **{"learning_rate_schedule": "0.6,0.8", "dropout_rate": 0.5, "untied_decoder": True},
    **{"no_dense_refeeding": True, "steps_per_log": 5},
}
"""What ``train`` and ``sweep`` do without any ratings: a quick look at learning."""
_REPLACES = {
    "base_learning_rate": "learning_rate",
    "detached_refeeding": "no_dense_refeeding",
    "no_dropout": "dropout_rate",
}
"""Options that contradict one of the small example."""
_EPOCHS = {"file": 160.0, "random": 2.0, "generated": 60.0, "arrays": 40.0}


def choose_example(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the small example that do not contradict those given."""
    # base_learning_rate may be 0: only options that are off contradict nothing.
    replaced = {
        _REPLACES[name]
        for name in _REPLACES.keys() & values.keys()
        if values[name] is not None and values[name] is not False
    }
    return {name: v for name, v in _SMALL_EXAMPLE.items() if name not in replaced}


def check_lengths(top: list[int]) -> None:
    """Raise unless these are lengths of rankings."""
    if not top or min(top) < 1 or len(set(top)) < len(top):
        raise ValueError(
            "top must be one or more different lengths of at least 1, got "
            f"{' '.join(map(str, top)) or 'none'}."
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Defaults of the other options."""

    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    run: RunOptions = RunOptions()
    recipe: Literal["auto", "modern", "graphcore"] = "auto"
    """What options that are not given stand for: settings for the size of your own ratings
    (modern), or the defaults of Graphcore's application (graphcore). auto is modern for a
    training file, unless it has a name of that application or there is an option of its
    learning rates or --detached-refeeding; the run says so."""
    recipe_reason: str | None = field(
        default=None,
        metadata=_MAY_CHANGE | TRANSIENT | {"hidden": True, "may_differ": True},
    )
    """The options or the file name that chose the graphcore recipe."""

    def __post_init__(self) -> None:
        self.data.check_source()
        if self.model.input_offset and self.training.refeeding != "none":
            raise ValueError(
                "input_offset needs no_dense_refeeding: a reconstruction has no offset."
            )
        self._check_objective()
        _ = self.plan, self.resolved_size  # both raise on options that do not fit

    def _check_objective(self) -> None:
        if self.training.objective == "rating":
            return
        if self.data.rows == "items":
            raise ValueError(
                "The objective ranking needs rows of users: it ranks the items of a row."
            )
        for name in ("subtract_biases", "clip_predictions", "normalize_ratings"):
            if getattr(self.data, name):
                raise ValueError(f"{name} is for the objective rating, not for ranking.")
        if self.model.input_offset:
            raise ValueError("input_offset is for the objective rating, not for ranking.")
        if self.data.positive_from > self.data.rating_range[1]:
            raise ValueError(
                f"positive_from ({self.data.positive_from:g}) is above the largest rating "
                f"of rating_range ({self.data.rating_range[1]:g}): no item would be liked."
            )

    @property
    def resolved_size(self) -> int:
        """The size of the model, after defaults."""
        return self.model.size or self.data.default_for("size", self.recipe_reason)

    @property
    def resolved_batch_size(self) -> int:
        """Rows per weight update, after defaults."""
        given = self.training.batch_size
        return given or self.data.default_for("batch_size", self.recipe_reason)

    @property
    def resolved_validation_batch_size(self) -> int:
        """Rows per validation batch, after defaults."""
        default = 128 if self.data.kind == "random" else self.resolved_batch_size
        return self.training.validation_batch_size or default

    @property
    def resolved_epochs(self) -> float:
        """Passes over the training rows, after defaults."""
        return self.training.epochs or _EPOCHS[self.data.kind]

    @property
    def plan(self) -> Plan:
        """How the runtime carries out an update."""
        training = self.training
        scaling = training.loss_scaling
        compute = resolve_precision(training.precision, training.half_type).compute
        if scaling == 1 or (scaling == "dynamic" and compute != "float16"):
            scaling = 0.0
        return Plan(
            micro_batch_size=self.resolved_batch_size,
            precision=training.precision,
            half_type=training.half_type,
            stochastic_rounding=training.precision == "16.16" and not training.no_prng,
            loss_scaling=scaling,
            fp_exceptions=training.fp_exceptions,
        )


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(TrainingConfig):
    """Train a deep autoencoder to predict ratings."""

    common_options: ClassVar = (
        *("training_data_file", "validation_data_file", "test_data_file", "data"),
        *("recipe", "objective", "positive_from", "rows"),
        *("size", "dropout_rate", "untied_decoder", "no_dense_refeeding"),
        *("epochs", "batch_size", "learning_rate", "weight_decay", "optimizer"),
        *("early_stopping", "search", "precision", "num_replicas"),
        *("run_dir", "resume", "seed", "tensorboard", "quiet", "debug"),
    )
    default_texts: ClassVar = dict.fromkeys(
        ("rows", "optimizer", "learning_rate", "precision"), "by recipe"
    )

    base_learning_rate: float = -16.0
    """Exponent of the learning rate, which is 2^EXPONENT x batch_size."""
    learning_rate: float | None = field(default=None, metadata={"aliases": ("--lr",)})
    """Learning rate at the start of the run, for any batch size; replaces
    base_learning_rate."""
    num_replicas: int = field(
        default=1, metadata=_MAY_CHANGE | {"aliases": ("--replicas",)}
    )
    """Replicas of the model, one per device, that split every batch."""
    early_stopping: int | None = None
    """Stop after this many consecutive validations without improvement."""
    top: list[int] = field(default_factory=lambda: [10])
    """Lengths k of the rankings that are measured at the end, for the objective ranking.
    The best checkpoint is chosen by NDCG@10."""
    search: int | None = field(default=None, metadata=_MAY_CHANGE)
    """Train this many models together on one device, with settings around those of the
    options, drop the worse half several times, and keep the best by validation error. It
    is for the objective rating."""
    search_over: list[Searched] = field(default_factory=list)
    """Options that a search varies: learning_rate, weight_decay, dropout_rate and
    input_dropout_rate (default: all of them)."""
    steps_per_log: int = field(default=1, metadata=_MAY_CHANGE)
    """Steps between two log lines."""
    select_devices: str = field(
        default="AUTO", metadata=_MAY_CHANGE | {"aliases": ("--select-ipus",)}
    )
    """Index of the device to use, or two indices such as 0,1 to train on the first and
    validate on the second at the same time. AUTO uses the first device."""
    multiprocessing: bool = field(default=False, metadata=_MAY_CHANGE)
    """Validate while training continues, on the second device if there is one. This uses a
    thread, not a process."""
    build_init: bool = field(default=False, metadata=_MAY_CHANGE | TRANSIENT)
    """Only write the initial weights as a checkpoint; --resume trains from there."""
    logdir: Path | None = field(
        default=None, metadata={"may_change": True, "may_differ": True, **TRANSIENT}
    )
    """Create the run directory in this folder, named after batch size, model size and
    time."""
    testing_on_checkpoint: Path | None = field(
        default=None, metadata=_MAY_CHANGE | TRANSIENT | STORED
    )
    """Do not train; validate the newest checkpoint of this run."""

    @staticmethod
    def check_given(given: dict[str, Any]) -> None:
        """Raise if the learning rate is given in two ways."""
        rate, exponent = given.get("learning_rate"), given.get("base_learning_rate")
        if rate is not None and exponent is not None:
            raise ConfigurationError(
                "Give learning_rate, which the optimizer sees, or base_learning_rate, an "
                "exponent of the rate per row, not both."
            )

    @staticmethod
    def start_from_named(named: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return a named configuration without the learning rate that a flag replaces.

        Without ratings, it means the random ones of the reference, not the small example.
        """
        named = {"data": None, "recipe": "graphcore"} | named
        rates = {"learning_rate", "base_learning_rate"}
        if all(given.get(name) is None for name in rates):
            return named
        return {name: value for name, value in named.items() if name not in rates}

    @staticmethod
    def expand_options(values: dict[str, Any]) -> dict[str, Any]:
        """Choose ratings, if none are given, and a recipe; replace ``logdir``."""
        if not any(name in values for name in SOURCES):
            example = choose_example(values)
            if values.get("objective") == "ranking":
                # The recipe of rankings chooses everything but the ratings.
                example = {name: example[name] for name in SOURCES if name in example}
            else:
                example["recipe"] = "graphcore"
            values = example | values
        values = expand_training_options(values)
        if (folder := values.get("logdir")) is None:
            return values
        if values.get("run_dir") is not None:
            raise ConfigurationError("Give logdir or run_dir, not both.")
        name = "test"
        if values.get("testing_on_checkpoint") is None:
            config = build(AutoencoderConfig, values | {"logdir": None})
            name = f"bs{config.resolved_batch_size}-rn{config.resolved_size}"
        return values | {"run_dir": folder / f"{name}-{time.strftime('%Y%m%d_%H%M%S')}"}

    def __post_init__(self) -> None:
        if self.testing_on_checkpoint is not None:
            return  # the checkpoint provides all other options
        super().__post_init__()
        for name in ("early_stopping", "steps_per_log"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        check_lengths(self.top)
        rate = self.learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"learning_rate must be more than 0, got {rate:g}.")
        if not abs(self.base_learning_rate) <= LARGEST_EXPONENT:
            raise ValueError(
                "base_learning_rate is an exponent of 2, such as -16, of at most "
                f"{LARGEST_EXPONENT}; got {self.base_learning_rate:g}."
            )
        if self.multiprocessing and self.early_stopping is not None:
            raise ValueError(
                "early_stopping waits for every validation, but multiprocessing validates "
                "while training continues. Give one of them."
            )
        if self.multiprocessing and self.num_replicas > 1:
            raise ValueError("multiprocessing is for one replica.")
        _ = self.device_indices
        self._check_search()

    def _check_search(self) -> None:
        """Raise if options do not fit a search."""
        if self.search is None:
            if self.search_over:
                raise ValueError("search_over needs search, the number of models.")
            return
        if not 2 <= self.search <= MOST_TRIALS:
            raise ValueError(f"search must be from 2 to {MOST_TRIALS}, got {self.search}.")
        if self.training.objective == "ranking":
            raise ValueError("search is for the objective rating, not for ranking.")
        if self.training.no_validation or not self.training.valid_per_epoch:
            raise ValueError(
                "search compares models by validation: it needs valid_per_epoch above 0, "
                "and no no_validation."
            )
        if self.num_replicas > 1 or self.validates_async or self.build_init:
            raise ValueError(
                "search trains all models on one device and waits for validation: it does "
                "not go with num_replicas, multiprocessing, a second device in "
                "select_devices, or build_init."
            )
        if len(set(self.search_over)) < len(self.search_over):
            raise ValueError("search_over names an option more than once.")
        if self.model.no_dropout and "dropout_rate" in self.search_over:
            raise ValueError("Give no_dropout or search_over dropout_rate, not both.")

    @property
    def searched(self) -> tuple[Searched, ...]:
        """The options that a search varies."""
        chosen = tuple(self.search_over) or SEARCHED
        without = {"dropout_rate"} if self.model.no_dropout else set()
        return tuple(name for name in chosen if name not in without)

    @property
    def plan(self) -> Plan:
        """How the runtime carries out an update."""
        self._check_replicas()
        rows = self.resolved_batch_size // self.num_replicas
        return dataclasses.replace(
            super().plan, micro_batch_size=rows, num_replicas=self.num_replicas
        )

    def _check_replicas(self) -> None:
        count = self.num_replicas
        if count < 1 or self.resolved_batch_size % count:
            raise ValueError(
                f"num_replicas must divide the batch of {self.resolved_batch_size} "
                f"{self.data.rows}, got {count}."
            )
        if count == 1:
            return
        if self.training.refeeding == "detached":
            raise ValueError(
                "detached_refeeding is for one replica: replicas do not share the "
                "reconstruction of a batch. Use joint re-feeding, or no_dense_refeeding."
            )
        if self.data.data_on_device:
            raise ValueError("data_on_device is for one replica.")
        if self.select_devices.upper() != "AUTO":
            raise ValueError("select_devices is for one replica; several use one each.")

    @property
    def initial_learning_rate(self) -> float:
        """The learning rate at the start of the run."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 2.0**self.base_learning_rate * self.resolved_batch_size

    @property
    def validates_async(self) -> bool:
        """Whether training continues during validation."""
        training, validation = self.device_indices
        apart = training != validation and self.early_stopping is None
        return self.multiprocessing or apart

    @property
    def device_indices(self) -> tuple[int, int]:
        """The devices that train and validate."""
        if self.select_devices.upper() == "AUTO":
            return 0, 0
        try:
            chosen = [int(word) for word in self.select_devices.split(",")]
            training, validation = chosen if len(chosen) == 2 else chosen * 2
            if min(chosen) < 0:
                raise ValueError
        except ValueError:
            raise ValueError(
                "select_devices must be AUTO, the index of a device, or two separated by a "
                f"comma; got {self.select_devices!r}."
            ) from None
        return training, validation
