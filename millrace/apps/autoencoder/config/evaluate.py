"""What ``millrace autoencoder validate`` can be told. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millrace.run.options import RunOptions

Which = Literal["best", "newest"]


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(RunOptions):
    """Measure how well a trained recommender foretells ratings and ranks items."""

    checkpoint: Path
    """The directory of a training run, or one of its checkpoints."""
    which: Which = "best"
    """Which checkpoint of the run: the one validated best, or the newest."""
    training_data_file: Path | None = None
    """What the users had rated before (default: what the run was trained on)."""
    validation_data_file: Path | None = None
    """What they rated afterwards, to foretell (default: what the run was validated
    with)."""
    validation_batch_size: int | None = None
    """Rows at a time (default: as in training)."""
    top: int = 10
    """Items that Recall@k and NDCG@k look at."""
    relevant_rating: float = 4.0
    """The rating from which an item was worth recommending."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume:
            raise ValueError("resume is for training: a validation is short, repeat it.")
        if self.top < 1:
            raise ValueError(f"top must be at least 1, got {self.top}.")
        size = self.validation_batch_size
        if size is not None and size < 1:
            raise ValueError(f"validation_batch_size must be at least 1, got {size}.")
