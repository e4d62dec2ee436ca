"""What the recommender can be told about training. Imports nothing heavy."""

import math
from dataclasses import dataclass
from typing import Literal

from millrace.precision import HalfType, PrecisionName


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """How it is trained."""

    batch_size: int | None = None
    """Rows per weight update (default: by the name of the training file; 64 where
    ratings are made up)."""
    no_dense_refeeding: bool = False
    """Learn from the known ratings only, not from the reconstruction as well."""
    detached_refeeding: bool = False
    """Re-feed as in the paper: the reconstruction is a new example, with an update of
    its own after the batch's. Otherwise it is a second term of the batch's loss."""
    optimizer: Literal["Momentum", "SGD"] = "Momentum"
    """Optimizer; the momentum is 0.9."""
    weight_decay: float = 1e-4
    """Added to every gradient: this times the weight."""
    gradient_clipping: bool = False
    """Keep every gradient between -1 and 1."""
    learning_rate_decay: str = "1,0.1,0.01"
    """Factors on the learning rate, one after the other."""
    learning_rate_schedule: str = "0.5,0.75"
    """When the next factor comes, as shares of the run."""
    precision: PrecisionName = "16.16"
    """Bits of computation and of weights: 16.16, 16.32 or 32.32."""
    half_type: HalfType = "float16"
    """The 16-bit type that precision means."""
    no_prng: bool = False
    """Round 16-bit weights to the nearest, not up or down at random."""
    loss_scaling: float | Literal["dynamic"] = "dynamic"
    """Factor on the loss while differentiating (1: none), or "dynamic": as much as float16
    can take, and none in other types. A sweep then has a fixed one, and each model leaves
    out an update that overflows."""
    fp_exceptions: bool = False
    """Stop at the first loss or gradient that is not a finite number."""

    def check_recipe_options(self) -> None:
        """Raise on what cannot be, or does not go together."""
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay:g}.")
        if self.no_dense_refeeding and self.detached_refeeding:
            raise ValueError(
                "no_dense_refeeding leaves re-feeding out, and detached_refeeding says how "
                "to do it. Give one of them."
            )
        if self.loss_scaling == 0:
            raise ValueError("loss_scaling must be 1 (none) or a larger factor, got 0.")
        factors, switches = self.decay_factors, self.decay_switches
        if len(factors) != len(switches) + 1:
            raise ValueError(
                "learning_rate_decay must have one number more than "
                f"learning_rate_schedule; got {len(factors)} and {len(switches)}."
            )
        if switches != sorted(switches) or not all(0 <= s <= 1 for s in switches):
            raise ValueError(
                "learning_rate_schedule must be rising shares of the run, from 0 to 1; "
                f"got {self.learning_rate_schedule}."
            )

    @property
    def decay_factors(self) -> list[float]:
        """The factors on the learning rate."""
        return numbers("learning_rate_decay", self.learning_rate_decay)

    @property
    def decay_switches(self) -> list[float]:
        """The shares of the run after which the next factor comes."""
        return numbers("learning_rate_schedule", self.learning_rate_schedule)

    @property
    def refeeding(self) -> Literal["none", "joint", "detached"]:
        """What becomes of a batch's reconstruction."""
        if self.no_dense_refeeding:
            return "none"
        return "detached" if self.detached_refeeding else "joint"


def numbers(name: str, text: str) -> list[float]:
    """Read numbers with commas between; an empty text has none."""
    try:
        found = [float(word) for word in text.split(",")] if text.strip() else []
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{name} must be numbers with commas between, got {text!r}.")
    return found
