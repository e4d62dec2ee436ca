"""A model whose posterior, likelihood and divergence are known in closed form.

x = W z + b + s e, where z and e are standard normal, so everything is Gaussian.
"""

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.vcd.model import Gaussian, Model, log_prior

S = 0.7
W = np.array([[1.0, -0.5], [0.3, 0.8], [-0.6, 0.4]], np.float64)
B = np.array([0.2, -0.1, 0.4], np.float64)
X = np.array([0.9, -0.7, 0.3], np.float64)
Z_DIM = W.shape[1]

DECODER = {"w": jnp.asarray(W, jnp.float32), "b": jnp.asarray(B, jnp.float32)}


def log_likelihood(decoder, x, z):
    error = x - (z @ decoder["w"].T + decoder["b"])
    return -0.5 * (jnp.square(error / S) + jnp.log(2 * jnp.pi * S**2)).sum(-1)


def log_joint(decoder, x):
    def target(z):
        def total(z):
            each = log_likelihood(decoder, x, z) + log_prior(z)
            return each.sum(), each

        gradient, each = jax.grad(total, has_aux=True)(z)
        return each, gradient

    return target


MODEL = Model(
    encode=lambda encoder, x: Gaussian(encoder["mean"], encoder["std"]),
    log_likelihood=log_likelihood,
    log_joint=log_joint,
)


def posterior() -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the precision of p(z|x)."""
    precision = np.eye(Z_DIM) + W.T @ W / S**2
    return np.linalg.solve(precision, W.T @ (X - B) / S**2), precision


def log_marginal() -> float:
    """Return log p(x)."""
    covariance = W @ W.T + S**2 * np.eye(len(X))
    error = X - B
    _, log_determinant = np.linalg.slogdet(2 * np.pi * covariance)
    return float(-0.5 * (error @ np.linalg.solve(covariance, error) + log_determinant))
