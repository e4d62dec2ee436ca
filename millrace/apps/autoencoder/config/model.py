"""Options of the model. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

Size = Literal[128, 256, 512]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model."""

    size: Size | None = None
    """Width of the first layer, which sets the widths of the others (default: depends
    on the name of the training file; 128 for synthetic ratings)."""
    no_selu: bool = False
    """Use linear layers without SELU activations."""
    no_dropout: bool = False
    """Disable dropout of the code layer."""
    dropout_rate: float | None = None
    """Dropout rate of the code layer (default: 0.65 for size 128, else 0.8)."""
    input_dropout_rate: float = 0.0
    """Fraction of the ratings in each row to hide from the network, which still learns to
    predict all of them."""
    untied_decoder: bool = False
    """Give the decoder its own weights, as in the paper, instead of the transposed encoder
    weights."""

    def __post_init__(self) -> None:
        for name in ("dropout_rate", "input_dropout_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {rate:g}.")
        if (rate := self.dropout_rate) and self.no_dropout:
            raise ValueError(
                f"Give no_dropout or dropout_rate, not both; got dropout_rate {rate:g}."
            )
