"""The model: a Gaussian latent z, binary pixels x, a decoder, and two encoders for q(z|x).

Weights are plain dictionaries. The first names of their paths are the scopes that have
learning rates of their own: ``encoder/mean``, ``encoder/std`` and ``decoder``.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Tree = dict[str, Any]

Target = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""``position (chains, z_dim) -> (log density (chains,), gradient (chains, z_dim))``."""

SMALLEST_STD = 1e-4
_LOG_2_PI = math.log(2 * math.pi)


class Gaussian(NamedTuple):
    """A normal distribution with independent dims, one row per sample."""

    mean: jax.Array
    """(..., z_dim)."""
    std: jax.Array
    """(..., z_dim)."""

    def at(self, noise: jax.Array) -> jax.Array:
        """Transform standard normal noise into samples."""
        return self.mean + self.std * noise

    def scaled_distance(self, z: jax.Array) -> jax.Array:
        """Return half the squared distance from the mean, in standard deviations."""
        return 0.5 * jnp.square((z - self.mean) / self.std).sum(-1)

    def log_density(self, z: jax.Array) -> jax.Array:
        """Return the log density of each row of `z`."""
        log_scale = (jnp.log(self.std) + 0.5 * _LOG_2_PI).sum(-1)
        return -self.scaled_distance(z) - log_scale

    def entropy(self) -> jax.Array:
        """Return the entropy of each row."""
        return (jnp.log(self.std) + 0.5 * (_LOG_2_PI + 1)).sum(-1)


class Model(NamedTuple):
    """The functions of a model that the objective and the evaluation need."""

    encode: Callable[[Any, jax.Array], Gaussian]
    """``(encoder weights, x) -> q(z|x)``."""
    log_likelihood: Callable[[Any, jax.Array, jax.Array], jax.Array]
    """``(decoder weights, x, z) -> log p(x|z)``, differentiable in the weights."""
    log_joint: Callable[[Any, jax.Array], Target]
    """``(decoder weights, x) -> target``: log p(x, z) and its gradient in z."""


@functools.partial(jax.jit, static_argnames=("num_pixels", "z_dim", "num_hidden"))
def init_params(
    key: jax.Array, *, num_pixels: int, z_dim: int, num_hidden: int = 200
) -> Tree:
    """Draw weights and biases as the reference implementations do."""
    mean_key, std_key, decoder_key = jax.random.split(key, 3)
    hidden = (num_hidden, num_hidden)
    return {
        "encoder": {
            "mean": _init_mlp(mean_key, (num_pixels, *hidden, z_dim)),
            "std": _init_mlp(std_key, (num_pixels, *hidden, z_dim)),
        },
        "decoder": _init_mlp(decoder_key, (z_dim, *hidden, num_pixels)),
    }


def _init_mlp(key: jax.Array, sizes: tuple[int, ...]) -> Tree:
    layers = {}
    last = len(sizes) - 2
    for index, num_in in enumerate(sizes[:-1]):
        num_out = sizes[index + 1]
        # By fan-out, and 1 for the last layer, as in the published code.
        std = 1.0 if index == last else num_out**-0.5
        key, own = jax.random.split(key)
        drawn = std * jax.random.normal(own, (num_in + 1, num_out))
        layers["output" if index == last else f"hidden{index + 1}"] = {
            "kernel": drawn[:-1],
            "bias": drawn[-1],
        }
    return layers


def bernoulli_vae() -> Model:
    """Return the model of the paper; the weights determine its sizes."""
    return Model(encode, log_likelihood, log_joint)


def encode(
    encoder: Tree,
    x: jax.Array,  # (samples, pixels)
) -> Gaussian:
    """Return q(z|x); its standard deviations are above 1e-4."""
    mean, _ = _mlp(encoder["mean"], x)
    activation, _ = _mlp(encoder["std"], x)
    return Gaussian(mean, jnp.logaddexp(activation, SMALLEST_STD))


def decode(
    decoder: Tree,
    z: jax.Array,  # (..., z_dim)
) -> jax.Array:
    """Return the logits of all pixels."""
    logits, _ = _mlp(decoder, z)
    return logits


def log_likelihood(
    decoder: Tree,
    x: jax.Array,  # (samples, pixels)
    z: jax.Array,  # (..., samples, z_dim)
) -> jax.Array:
    """Return log p(x|z) of each sample, summed over its pixels."""
    return _bernoulli(decode(decoder, z), x)


def log_joint(
    decoder: Tree,
    x: jax.Array,  # (samples, pixels)
) -> Target:
    """Return the target of the chains: log p(x, z) as a function of z.

    The gradient is written out: it needs only the signs of the activations, which the
    forward pass has. If a caller ignores the log density, the compiler drops whatever
    only the density needs.
    """

    def target(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, hidden = _mlp(decoder, z)
        gradient = _times_transposed(x - jax.nn.sigmoid(logits), decoder["output"])
        for name in reversed(hidden):
            gradient = jnp.where(hidden[name] > 0, gradient, 0.0)
            gradient = _times_transposed(gradient, decoder[name])
        return _bernoulli(logits, x) + log_prior(z), gradient - z

    return target


def log_prior(z: jax.Array) -> jax.Array:
    """Return the log density of each row of `z` under the standard normal prior."""
    return -0.5 * (jnp.square(z) + _LOG_2_PI).sum(-1)


def _bernoulli(logits: jax.Array, x: jax.Array) -> jax.Array:
    return -jax.nn.softplus((1 - 2 * x) * logits).sum(-1)


def _mlp(layers: Tree, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the output, and the activations of the hidden layers by name."""
    hidden = {}
    for name, layer in layers.items():
        if name != "output":
            x = hidden[name] = jax.nn.relu(_dense(x, layer))
    return _dense(x, layers["output"]), hidden


def _dense(x: jax.Array, layer: Tree) -> jax.Array:
    return _product(x, layer["kernel"], 0) + layer["bias"].astype(jnp.float32)


def _times_transposed(x: jax.Array, layer: Tree) -> jax.Array:
    return _product(x, layer["kernel"], 1)


def _product(x: jax.Array, kernel: jax.Array, dim: int) -> jax.Array:
    """Multiply in the type of the weights, which may have 16 bits, into float32."""
    contracted = (((x.ndim - 1,), (dim,)), ((), ()))
    return lax.dot_general(
        x.astype(kernel.dtype), kernel, contracted, preferred_element_type=jnp.float32
    )
