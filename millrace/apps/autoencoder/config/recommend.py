"""What ``millrace autoencoder recommend`` can be told. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path

from millrace.apps.autoencoder.config.evaluate import Which

FORMATS = (".tsv", ".txt", ".csv")


@dataclass(frozen=True, kw_only=True)
class RecommendConfig:
    """List the items that users have not rated and are likely to rate best."""

    checkpoint: Path
    """The directory of a training run, or one of its checkpoints."""
    which: Which = "best"
    """Which checkpoint of the run: the one validated best, or the newest."""
    user: list[str] = field(default_factory=list)
    """The users, as the ratings call them."""
    all: bool = False
    """Recommend to every user who has rated something."""
    top: int = 10
    """Items for each user."""
    training_data_file: Path | None = None
    """What the users have rated (default: what the run was trained on)."""
    titles: Path | None = None
    """File with what items are called: lines of identifier, perhaps year, and title."""
    out: Path | None = None
    """Write to this file, with tabs, or with commas if its name ends in .csv."""
    batch_size: int = 256
    """Users at a time."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        for name in ("top", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if bool(self.user) == self.all:
            raise ValueError("Give the users to recommend to (--user ID ...), or --all.")
        if self.out is not None and self.out.suffix not in FORMATS:
            raise ValueError(
                f"out must end in {', '.join(FORMATS)}, got {self.out.name!r}."
            )
