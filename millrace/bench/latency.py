"""How many calls a latency is taken from, and what can be said after so many.

PyTorch's process reads this file too: it imports nothing.
"""

CALLS_NEEDED = {"p50": 1, "p99": 100, "p99.9": 1000}
"""Below so many calls a percentile is hardly more than the slowest of them."""
_FEWEST = 20
_PATIENCE = 6


def latency_calls(once: float, seconds: float) -> int:
    """Return how many calls to make: for so long, or longer if that tells a percentile."""
    needed = [n for n in CALLS_NEEDED.values() if n * once <= _PATIENCE * seconds]
    return max(_FEWEST, int(seconds / once), *needed)


def supported(figures: dict[str, float], calls: int) -> dict[str, float]:
    """Return the mean and those percentiles that so many calls can tell."""
    return {n: value for n, value in figures.items() if CALLS_NEEDED.get(n, 1) <= calls}
