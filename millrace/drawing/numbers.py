"""Numbers as a reader wants them: short, with the digits that matter."""

import json
import math
from typing import Any


def text_of(value: Any) -> str:
    """Write a value of a table."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def duration(seconds: float) -> str:
    """Write a time in the units one would say it in."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{seconds / 60:.1f} minutes"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def byte_size(count: float) -> str:
    """Write an amount of memory."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from about `low` to about `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * f for f in (1, 2, 2.5, 5, 10) if size * f >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two positive numbers, or 1, 2, 5 of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, -(-(last - first) // 5))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [f * 10.0**power for power in range(first, last + 1, step) for f in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def tick_text(value: float) -> str:
    """Write a tick: 12k, 0.05, 1e-6."""
    size = abs(value)
    if size >= 1e15 or (0 < size < 1e-3):
        return f"{value:.3g}"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.6g}{letter}"
    return f"{value:.6g}"
