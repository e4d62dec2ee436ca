import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from millrace.nn.drawing import Draw, draw_tree

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
def test_numbers_are_of_their_distribution(kind, distribution):
    drawn = draw_tree({"w": Draw(kind, SHAPE, 0.1)}, KEY)["w"]
    assert drawn.shape == SHAPE and drawn.dtype == jnp.float32
    numbers = np.asarray(drawn).ravel() / 0.1
    assert scipy.stats.kstest(numbers, distribution.cdf).pvalue > 1e-3
    assert len(np.unique(numbers)) > 0.99 * numbers.size  # blocks differ


def test_a_weight_depends_on_its_path_and_on_nothing_else():
    one, other = (Draw("normal", shape, 1.0) for shape in ((3, 700), (40, 40)))
    alone = draw_tree({"b": other}, KEY)
    both = draw_tree({"a": one, "b": other, "c": other}, KEY)
    np.testing.assert_array_equal(alone["b"], both["b"])
    assert np.corrcoef(both["b"].ravel(), both["c"].ravel())[0, 1] < 0.1
    assert not np.array_equal(draw_tree({"b": other}, jax.random.key(6))["b"], alone["b"])


def test_what_is_not_to_be_drawn_stays():
    tree = {"a": jnp.arange(3.0), "b": Draw("uniform", (), 2.0)}
    drawn = draw_tree(tree, KEY)
    np.testing.assert_array_equal(drawn["a"], tree["a"])
    assert drawn["b"].shape == () and abs(float(drawn["b"])) <= 2
