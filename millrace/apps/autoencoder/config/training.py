"""Options of training. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from millrace.plan import HalfType, PrecisionName

Refeeding = Literal["none", "joint", "detached"]
"""What happens to the reconstruction of a batch: nothing; it is a second term of the same
loss, differentiated through both passes; or, as in the paper, it is a constant new example
with its own update."""

Size = Literal[128, 256, 512]

Objective = Literal["rating", "ranking"]
"""What a model learns: to predict ratings, or to rank the items a user will like."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Training."""

    objective: Objective = "rating"
    """What the model learns: the ratings (squared error), or which items a user will like
    (a multinomial likelihood over all items). Ranking is for recommend; it has rows of
    users."""
    epochs: float | None = field(default=None, metadata={"may_grow": True})
    """Passes over the training rows (default: 60; 160 in the graphcore recipe, 2 for
    random ratings). With --resume, a larger value extends the run."""
    batch_size: int | None = None
    """Rows per weight update (default: 64, fewer for small data; in the graphcore recipe,
    depends on the name of the training file)."""
    batches_per_step: int = 250
    """Batches per step, which runs on the device without returning to the host; at most
    one epoch."""
    validation_batch_size: int | None = None
    """Rows per validation batch (default: batch_size; 128 for random ratings)."""
    no_validation: bool = False
    """Skip validation even if there are validation ratings."""
    valid_per_epoch: float = 1.0
    """Validations and checkpoints per epoch; 0 means only at the end."""
    no_dense_refeeding: bool = False
    """Train on known ratings only, without re-feeding the reconstruction."""
    detached_refeeding: bool = False
    """Re-feed as in the paper: the reconstruction is a new example with its own update
    after each batch. By default it is a second term of the same loss."""
    optimizer: Literal["Momentum", "SGD", "Adam"] = "Momentum"
    """Optimizer; the momentum is 0.9 (default: Momentum; Adam to rank items in the modern
    recipe)."""
    weight_decay: float = 1e-4
    """L2 weight decay, added to every gradient (default: 1e-4; in the modern recipe, less
    for more ratings)."""
    gradient_clipping: bool = False
    """Clip every gradient to between -1 and 1."""
    learning_rate_decay: str = "1,0.1,0.01"
    """Comma-separated factors on the learning rate, applied in order."""
    learning_rate_schedule: str = "0.5,0.75"
    """Comma-separated fractions of the run at which the next factor takes effect, or
    cosine: the rate falls to 0 along half a cosine."""
    precision: PrecisionName = "16.16"
    """Bits of computation and of weights."""
    half_type: HalfType = "float16"
    """16-bit floating-point type that --precision refers to."""
    no_prng: bool = False
    """Round 16-bit weights to nearest instead of stochastically."""
    loss_scaling: float | Literal["dynamic"] = "dynamic"
    """Loss scale, 1 for none; dynamic adapts it in float16 and uses none in other types. A
    sweep uses a fixed scale instead of dynamic, and each model skips its own updates that
    overflow."""
    fp_exceptions: bool = False
    """Stop at the first loss or gradient that is not finite."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "batches_per_step", "validation_batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be more than 0, got {self.epochs:g}.")
        for name in ("valid_per_epoch", "weight_decay"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value:g}.")
        if self.no_dense_refeeding and self.detached_refeeding:
            raise ValueError("Give no_dense_refeeding or detached_refeeding, not both.")
        if self.objective == "ranking" and self.detached_refeeding:
            raise ValueError(
                "detached_refeeding is for the objective rating: a ranking has no ratings "
                "to feed again."
            )
        if self.loss_scaling == 0:
            raise ValueError("loss_scaling must be 1 (none) or a larger factor, got 0.")
        self._check_decay()

    def _check_decay(self) -> None:
        if self.has_cosine_schedule:
            return
        factors, switches = self.decay_factors, self.decay_switches
        if len(factors) != len(switches) + 1:
            raise ValueError(
                "learning_rate_decay must have one number more than "
                f"learning_rate_schedule; got {len(factors)} and {len(switches)}."
            )
        if switches != sorted(switches) or not all(0 <= s <= 1 for s in switches):
            raise ValueError(
                "learning_rate_schedule must be increasing fractions from 0 to 1; "
                f"got {self.learning_rate_schedule}."
            )

    @property
    def has_cosine_schedule(self) -> bool:
        """Whether the learning rate falls along a cosine instead of in steps."""
        return self.learning_rate_schedule.strip() == "cosine"

    @property
    def decay_factors(self) -> list[float]:
        """The factors on the learning rate."""
        return parse_numbers("learning_rate_decay", self.learning_rate_decay)

    @property
    def decay_switches(self) -> list[float]:
        """The fractions of the run at which the next factor takes effect."""
        return parse_numbers("learning_rate_schedule", self.learning_rate_schedule)

    @property
    def refeeding(self) -> Refeeding:
        """What happens to the reconstruction of a batch; a ranking is not fed again."""
        if self.no_dense_refeeding or self.objective == "ranking":
            return "none"
        return "detached" if self.detached_refeeding else "joint"


def parse_numbers(option: str, text: str) -> list[float]:
    """Parse comma-separated numbers; an empty text has none."""
    try:
        numbers = [float(word) for word in text.split(",")] if text.strip() else []
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{option} must be comma-separated numbers, got {text!r}.")
    return numbers


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model."""

    size: Size | None = None
    """Width of the first layer, which sets the widths of the others (default: 128; in the
    graphcore recipe, depends on the name of the training file)."""
    no_selu: bool = False
    """Use linear layers without SELU activations."""
    no_dropout: bool = False
    """Disable dropout of the code layer."""
    dropout_rate: float | None = None
    """Dropout rate of the code layer (default: 0.65 for size 128, else 0.8)."""
    input_dropout_rate: float = 0.0
    """Fraction of the ratings in each row to hide from the network, which still learns to
    predict all of them."""
    input_offset: float = 0.0
    """Added to each rating that the network sees, not to what it predicts: next to biases,
    a rating of 0 would look like none at all (default: 2 in the modern recipe with rows of
    items)."""
    zero_output_layer: bool = False
    """Start with a last layer of zeros: before the first update, the model predicts the
    biases. Needs untied_decoder."""
    untied_decoder: bool = False
    """Give the decoder its own weights, as in the paper, instead of the transposed encoder
    weights."""

    def __post_init__(self) -> None:
        for name in ("dropout_rate", "input_dropout_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {rate:g}.")
        if not math.isfinite(self.input_offset):
            raise ValueError(f"input_offset must be a number, got {self.input_offset}.")
        if self.zero_output_layer and not self.untied_decoder:
            raise ValueError(
                "zero_output_layer needs untied_decoder: a tied layer is the first as well."
            )
        if (rate := self.dropout_rate) and self.no_dropout:
            raise ValueError(
                f"Give no_dropout or dropout_rate, not both; got dropout_rate {rate:g}."
            )


class Hyperparameters(NamedTuple):
    """What models that are trained together in one program may differ in."""

    learning_rate: float
    """The learning rate at the start of the run."""
    weight_decay: float
    dropout_rate: float
    """Dropout rate of the code layer."""
    input_dropout_rate: float


class Steps(NamedTuple):
    """The length of a run."""

    batches_per_step: int
    total: int
    per_validation: int
    """Steps between validations; 0 for only one at the end."""
    batches_per_epoch: int
    """Batches after which the rows are shuffled again."""
    updates_per_batch: int
    """2 if the reconstruction has its own update, else 1."""

    @property
    def num_batches(self) -> int:
        """Batches in the whole run."""
        return self.total * self.batches_per_step

    @property
    def updates_per_step(self) -> int:
        """Weight updates per step."""
        return self.batches_per_step * self.updates_per_batch

    @property
    def total_updates(self) -> int:
        """Weight updates in the whole run."""
        return self.total * self.updates_per_step
