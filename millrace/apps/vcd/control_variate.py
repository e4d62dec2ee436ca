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
    model_state = {"shared": jnp.float32(0.0)}
    if settings.kind == "local":
        model_state |= {LOCAL: jnp.zeros(num_samples), "updates": jnp.float32(0.0)}
    return model_state


def value(model_state: dict[str, jax.Array], index: jax.Array) -> jax.Array:
    """Return the control variate of the samples at `index`."""
    if not model_state:
        return jnp.zeros(index.shape)
    shared = jnp.broadcast_to(model_state["shared"], index.shape)
    return shared + model_state[LOCAL][index] if LOCAL in model_state else shared


def moved(
    model_state: dict[str, jax.Array],
    index: jax.Array,
    g: jax.Array,
    settings: ControlVariateSettings,
) -> dict[str, Any]:
    """Move towards the G of a minibatch, in which no sample comes twice."""
    if not model_state:
        return {}
    rate = 1.0 - settings.decay
    change = rate * (g.mean() - model_state["shared"])
    if LOCAL not in model_state:
        return {"shared": model_state["shared"] + change}
    shares = model_state["updates"] < settings.shared_updates
    own = rate * (g - value(model_state, index))
    return {
        "shared": model_state["shared"] + jnp.where(shares, change, 0.0),
        LOCAL: model_state[LOCAL]
        .at[index]
        .add(jnp.where(shares, 0.0, own), unique_indices=True),
        # Counted no further than it matters: a float counts exactly up to 2**24.
        "updates": jnp.minimum(model_state["updates"] + 1, settings.shared_updates),
    }
