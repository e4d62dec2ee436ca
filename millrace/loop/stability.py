"""When a measured speed is known well enough."""

import itertools
import math
import statistics

_MAX_SECONDS = 30.0
_TOLERANCE = 0.01
_MIN_BLOCKS = 5
_BLOCK_SECONDS = 0.1


class Stability:
    """Collects measurements until the standard error of their mean is below 1 %.

    Short measurements are joined to blocks, because their noise is not independent.

    Args:
        min_blocks: Number of blocks without which a figure is never stable.
        block_seconds: Length of a block.
        max_seconds: Time after which a measurement ends even if it is not stable.
    """

    def __init__(
        self,
        min_blocks: int = _MIN_BLOCKS,
        block_seconds: float = _BLOCK_SECONDS,
        max_seconds: float = _MAX_SECONDS,
    ) -> None:
        self._min_blocks = min_blocks
        self._max_seconds = max_seconds
        self._block_seconds = block_seconds
        self.rates: list[float] = []
        """Units per second of every block."""
        self.seconds = 0.0
        self.units = 0.0
        self._block = (0.0, 0.0)

    def add(self, units: float, seconds: float) -> None:
        """Add a measurement."""
        self.units += units
        self.seconds += seconds
        units, seconds = self._block[0] + units, self._block[1] + seconds
        if seconds >= self._block_seconds and seconds > 0:
            self.rates.append(units / seconds)
            units, seconds = 0.0, 0.0
        self._block = (units, seconds)

    @property
    def error(self) -> float:
        """The standard error of the mean, relative to it; infinite with one block."""
        if len(self.rates) < 2:
            return math.inf
        spread = statistics.stdev(self.rates) / math.sqrt(len(self.rates))
        return spread / statistics.fmean(self.rates)

    @property
    def is_stable(self) -> bool:
        """Whether the figure is known to about 1 %."""
        return len(self.rates) >= self._min_blocks and self.error < _TOLERANCE

    @property
    def is_done(self) -> bool:
        """Whether to stop measuring."""
        return self.is_stable or self.seconds >= self._max_seconds

    def grouped_rates(self, count: int) -> list[float]:
        """Return the means of at most `count` groups of successive blocks.

        Their spread does not grow with the number of blocks.
        """
        groups = min(count, len(self.rates))
        ends = [len(self.rates) * number // groups for number in range(groups + 1)]
        return [statistics.fmean(self.rates[a:b]) for a, b in itertools.pairwise(ends)]

    def describe(self) -> str:
        """Return how the measurement ended, as text."""
        if self.is_stable:
            return f"stable after {self.seconds:.1f} s"
        if math.isinf(self.error):
            return f"one measurement of {self.seconds:.1f} s"
        return f"±{self.error:.1%} after {self.seconds:.1f} s"

    def figures(self) -> dict[str, float | bool | None]:
        """Return the same as JSON values."""
        error = None if math.isinf(self.error) else self.error
        return {
            "stable": self.is_stable,
            "standard_error": error,
            "seconds": self.seconds,
            "blocks": len(self.rates),
        }
