"""Initial weights follow their distribution and depend only on key and path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from millrace.nn.initializers import Init, init_tree

KEY = jax.random.key(5)
SHAPE = (300, 100)  # not a whole number of blocks


@pytest.mark.parametrize(
    ("kind", "distribution"),
    [
        ("normal", scipy.stats.norm()),
        ("truncated_normal", scipy.stats.truncnorm(-2, 2, scale=1 / 0.87962566)),
        ("uniform", scipy.stats.uniform(-1, 2)),
    ],
)
def test_weights_follow_their_distribution(kind, distribution):
    sampled = init_tree({"w": Init(kind, SHAPE, 0.1)}, KEY)["w"]
    assert sampled.shape == SHAPE and sampled.dtype == jnp.float32
    numbers = np.asarray(sampled).ravel() / 0.1
    assert scipy.stats.kstest(numbers, distribution.cdf).pvalue > 1e-3
    assert len(np.unique(numbers)) > 0.99 * numbers.size  # blocks differ


def test_a_weight_depends_only_on_key_and_path():
    one, other = (Init("normal", shape, 1.0) for shape in ((3, 700), (40, 40)))
    alone = init_tree({"b": other}, KEY)
    both = init_tree({"a": one, "b": other, "c": other}, KEY)
    np.testing.assert_array_equal(alone["b"], both["b"])
    assert np.corrcoef(both["b"].ravel(), both["c"].ravel())[0, 1] < 0.1
    assert not np.array_equal(init_tree({"b": other}, jax.random.key(6))["b"], alone["b"])


def test_other_leaves_are_kept():
    tree = {"a": jnp.arange(3.0), "b": Init("uniform", (), 2.0)}
    sampled = init_tree(tree, KEY)
    np.testing.assert_array_equal(sampled["a"], tree["a"])
    assert sampled["b"].shape == () and abs(float(sampled["b"])) <= 2
