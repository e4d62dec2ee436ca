"""The leapfrog kernel: the same trajectories as XLA's, and Triton takes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.vcd import fused
from millrace.apps.vcd.model import init_params, log_joint
from millrace.apps.vcd.sampler import leapfrog, start

pytestmark = pytest.mark.slow


def problem(num_pixels, z_dim, num_hidden, num_chains):
    """A decoder, pictures, and chains that have just begun."""
    params = init_params(
        jax.random.key(0), num_pixels=num_pixels, z_dim=z_dim, num_hidden=num_hidden
    )
    drawn = np.random.default_rng(0).integers(0, 2, (num_chains, num_pixels))
    x = jnp.asarray(drawn, jnp.float32)
    z, r = jax.random.normal(jax.random.key(1), (2, num_chains, z_dim))
    return params["decoder"], x, start(log_joint(params["decoder"], x), z), r


def test_trajectories_are_those_of_the_plain_leapfrog():
    decoder, x, chain, r = problem(60, 3, 70, 37)  # nothing is a power of two
    size = jnp.float32(0.05)

    @jax.jit
    def both(chain, r):
        follow = fused.follower(3, interpret=True)(decoder, x)
        target = log_joint(decoder, x)
        plain = functools.partial(leapfrog, target, num_steps=3)
        return plain(chain, r, size), follow(chain, r, size)

    (one, r1), (other, r2) = both(chain, r)
    np.testing.assert_allclose(other.position, one.position, atol=1e-5)
    np.testing.assert_allclose(other.log_density, one.log_density, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(other.gradient, one.gradient, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(r2, r1, rtol=1e-3, atol=1e-4)
    assert np.abs(one.position - chain.position).max() > 0.1


@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="it writes Triton only where it finds a GPU"
)
def test_the_kernel_can_be_written_in_triton(dtype):
    """As far as that can be told without a GPU."""
    decoder, x, chain, r = problem(784, 10, 200, 100)
    decoder = jax.tree.map(lambda w: w.astype(dtype), decoder)

    def run(decoder, x, chain, r):
        return fused.follower(2)(decoder, x)(chain, r, jnp.float32(0.1))

    traced = jax.jit(run).trace(decoder, x, chain, r)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call") >= 2 and "triton" in text
