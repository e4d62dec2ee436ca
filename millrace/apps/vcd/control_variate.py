"""The control variate: a moving average of G, one for all samples or one for each.

Its value before an update is what the update's gradient uses.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

ControlVariateName = Literal["local", "global", "none"]

LOCAL = "local"
"""The name of the table that has a row for each training sample."""


class ControlVariateSettings(NamedTuple):
    """Which kind, and how slowly it moves."""

    kind: ControlVariateName = "local"
    decay: float = 0.9
    shared_updates: int = 3000
    """Updates during which a local one is still the same for all samples."""


def init(settings: ControlVariateSettings, num_samples: int) -> dict[str, jax.Array]:
    """Return the values before the first update.

    A sample's own value is kept as its difference from the shared one, which stands still
    once samples have their own. So a minibatch touches only its rows of the table, and
    the changes of several replicas can be added up.
    """
    if settings.kind == "none":
        return {}
    carried = {"shared": jnp.float32(0.0)}
    if settings.kind == "local":
        carried |= {LOCAL: jnp.zeros(num_samples), "updates": jnp.float32(0.0)}
    return carried


def value(carried: dict[str, jax.Array], index: jax.Array) -> jax.Array:
    """Return the control variate of the samples at `index`."""
    if not carried:
        return jnp.zeros(index.shape)
    shared = jnp.broadcast_to(carried["shared"], index.shape)
    return shared + carried[LOCAL][index] if LOCAL in carried else shared


def moved(
    carried: dict[str, jax.Array],
    index: jax.Array,
    g: jax.Array,
    settings: ControlVariateSettings,
) -> dict[str, Any]:
    """Move towards the G of a minibatch, in which no sample comes twice."""
    if not carried:
        return {}
    rate = 1.0 - settings.decay
    change = rate * (g.mean() - carried["shared"])
    if LOCAL not in carried:
        return {"shared": carried["shared"] + change}
    shares = carried["updates"] < settings.shared_updates
    own = rate * (g - value(carried, index))
    return {
        "shared": carried["shared"] + jnp.where(shares, change, 0.0),
        LOCAL: carried[LOCAL]
        .at[index]
        .add(jnp.where(shares, 0.0, own), unique_indices=True),
        # Counted no further than it matters: a float counts exactly up to 2**24.
        "updates": jnp.minimum(carried["updates"] + 1, settings.shared_updates),
    }
