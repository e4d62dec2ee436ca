"""How far values are apart, and whether a ratio means anything beside that."""

from collections.abc import Mapping
from typing import Any

_SMALLEST = 0.01
"""A change that is never more than noise: repeats within a call agree better than calls."""


def spread_of(speeds: Mapping[str, Any]) -> float:
    """Return how far the lowest and the highest value are apart, as a part."""
    return (speeds["highest"] - speeds["lowest"]) / speeds["median"]


def noise_of(*speeds: Mapping[str, Any]) -> float:
    """Return how far these values are apart, added up, as a part."""
    return max(_SMALLEST, sum(map(spread_of, speeds)))


def peer_speeds(peer: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Return a peer's median, lowest and highest value; None without values."""
    values = (peer or {}).get("samples_per_second")
    if not peer or not values:
        return None
    return {"median": peer["median"], "lowest": min(values), "highest": max(values)}


def fastest(peers: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the peer with the highest median, if any has one."""
    measured = [peer for peer in peers.values() if peer.get("median")]
    return max(measured, key=lambda peer: peer["median"], default=None)


def ratio_noise(entry: Mapping[str, Any]) -> float | None:
    """Return the noise of an entry and of its fastest peer; None if it is not known."""
    theirs = peer_speeds(fastest(entry.get("peers") or {}))
    return None if theirs is None else noise_of(entry["samples_per_second"], theirs)


def is_uncertain(entry: Mapping[str, Any]) -> bool:
    """Return whether a ratio is nearer to 1 than the values of the two are apart."""
    ratio, noise = entry.get("ratio"), ratio_noise(entry)
    return bool(ratio) and noise is not None and abs(ratio - 1) <= noise
