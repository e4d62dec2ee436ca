"""What the recommender can be told about its model. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

Size = Literal[128, 256, 512]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model."""

    size: Size | None = None
    """Width of the first layer, which decides the others: 128, 256 or 512 (default: by
    the name of the training file; 128 where ratings are made up)."""
    no_selu: bool = False
    """Leave out the activations: every layer is linear."""
    no_dropout: bool = False
    """Drop nothing of the code in training."""
    dropout_rate: float | None = None
    """Share of the code that is dropped (default: 0.65 for size 128, otherwise 0.8)."""
    input_dropout_rate: float = 0.0
    """Share of a row's ratings that the network does not see while it learns to foretell
    all of them, as it will have to."""
    untied_decoder: bool = False
    """Give the decoder weights of its own, as in the paper, instead of the encoder's."""

    def check_model_options(self) -> None:
        """Raise on what cannot be, or does not go together."""
        for name in ("dropout_rate", "input_dropout_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {rate:g}.")
        if (rate := self.dropout_rate) and self.no_dropout:
            raise ValueError(
                f"Give no_dropout or a dropout_rate, not both; got dropout_rate {rate:g}."
            )
