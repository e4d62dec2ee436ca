"""Options of ``millrace devices``. Imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """Say what devices are here, how fast they are, and how to train on them."""

    measure: bool = True
    """Multiply matrices and copy arrays, to see how fast that is (some seconds)."""
    json: bool = False
    """Print JSON, for other programs."""
    virtual_devices: int | None = None
    """Divide the CPU into this many devices, as training does with the same option."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        if self.virtual_devices is not None and self.virtual_devices < 1:
            raise ValueError(
                f"virtual_devices must be at least 1, got {self.virtual_devices}."
            )
