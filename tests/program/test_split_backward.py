"""The two parts of a backward pass give the gradients of the whole, and share no work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.program.split_backward import BackwardResults, SplitBackward

LAYERS, WIDTH = 3, 4


def make_inputs():
    rng = np.random.default_rng(0)
    weights = [
        rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)
    ]
    x, gradient = rng.standard_normal((2, 5, WIDTH)).astype(np.float32)
    return [*weights, x, gradient]


def network(weights, x):
    for w in weights:
        x = jax.jit(jax.nn.relu)(x @ w)
    return x


def backward(*values, run=network, sends=True):
    *weights, x, gradient = values
    _, pull = jax.vjp(run, weights, x)
    of_weights, of_x = pull(gradient)
    return BackwardResults(of_x if sends else (), of_weights, of_x)


def split(function, values):
    return SplitBackward(function, values, num_kept=len(values) - 1)


def run_in_parts(parts, values):
    sent, deferred = jax.jit(parts.pass_on)(values)
    return sent, jax.jit(parts.compute_weights)(values[:-1], deferred)


def count(function, *values, name="dot_general"):
    return str(jax.make_jaxpr(function)(*values)).count(name)


@pytest.mark.parametrize("sends", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_parts_give_the_gradients_of_the_whole(sends, checkpointed):
    values = make_inputs()
    run = jax.checkpoint(network, prevent_cse=False) if checkpointed else network

    def whole(*values):
        return backward(*values, run=run, sends=sends)

    expected = jax.jit(whole)(*values)
    sent, weights = run_in_parts(split(whole, values), values)
    for got, right in ((sent, jax.tree.leaves(expected.sent)), (weights, expected.weights)):
        for a, b in zip(got, right, strict=True):
            np.testing.assert_array_equal(a, b)


def test_every_product_is_computed_once():
    values = make_inputs()
    for sends in (True, False):
        parts = split(lambda *v, s=sends: backward(*v, sends=s), values)
        sent, deferred = parts.pass_on(values)
        assert len(sent) == sends
        assert count(parts.compute_weights, values, deferred) == LAYERS
        # Neither part computes the gradient of an input that nobody waits for.
        gradients = LAYERS if sends else LAYERS - 1
        assert count(parts.pass_on, values) == LAYERS + gradients


def test_only_gradients_and_activations_are_deferred():
    """One gradient and one input per layer; the input of the first is there anyway."""
    parts = split(backward, make_inputs())
    shapes = [place.shape for place in parts.layout.slices]
    assert shapes == [(5, WIDTH)] * (2 * LAYERS - 1)


def test_activations_are_computed_again_from_kept_products():
    """As with recomputation, so that only gradients have to be kept between the parts."""

    def function(w1, w2, w3, x, product1, product2, gradient):
        hidden1, hidden2 = jax.nn.relu(product1), jax.nn.relu(product2)
        gradient2 = (gradient @ w3.T) * (product2 > 0)
        gradient1 = (gradient2 @ w2.T) * (product1 > 0)
        weights = x.T @ gradient1, hidden1.T @ gradient2, hidden2.T @ gradient
        return BackwardResults(gradient1 @ w1.T, weights, gradient1 @ w1.T)

    w1, w2, w3, x, gradient = make_inputs()
    values = [w1, w2, w3, x, x @ w1, x @ w2, gradient]
    parts = SplitBackward(function, values, num_kept=6)
    assert [place.shape for place in parts.layout.slices] == [(5, WIDTH)] * LAYERS
    _, weights = run_in_parts(parts, values)
    for a, b in zip(weights, jax.jit(function)(*values).weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_stage_that_reads_integers_passes_gradients_on_to_its_first_weights():
    rng = np.random.default_rng(0)
    table, w1, w2 = (rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for _ in "abc")
    tokens, gradient = np.array([1, 3]), rng.standard_normal((2, WIDTH)).astype(np.float32)

    def function(table, w1, w2, tokens, gradient):
        _, pull = jax.vjp(lambda t, a, b: jnp.tanh(t[tokens] @ a) @ b, table, w1, w2)
        of_table, of_w1, of_w2 = pull(gradient)
        return BackwardResults((), (of_table, of_w1, of_w2), of_table)

    values = [table, w1, w2, tokens, gradient]
    parts = SplitBackward(function, values, num_kept=4)
    sent, weights = run_in_parts(parts, values)
    assert sent == []
    for a, b in zip(weights, jax.jit(function)(*values).weights, strict=True):
        np.testing.assert_array_equal(a, b)
    deferred = parts.pass_on(values)[1]
    assert count(parts.compute_weights, values, deferred) == 3  # two weights and the table
    assert count(parts.pass_on, values) == 2  # the hidden layer, and the gradient of it


def test_random_keys_are_made_again_because_they_cannot_be_packed():
    values = make_inputs()

    def noisy(weights, x):
        key = jax.random.key(3)
        for n, w in enumerate(weights):
            keep = jax.random.bernoulli(jax.random.fold_in(key, n), 0.5, x.shape)
            x = jnp.where(keep, jnp.tanh(x @ w), 0)
        return x

    def whole(*values):
        return backward(*values, run=jax.checkpoint(noisy, prevent_cse=False))

    sent, weights = run_in_parts(split(whole, values), values)
    expected = jax.jit(whole)(*values)
    np.testing.assert_allclose(sent[0], expected.sent, rtol=1e-6)
    for a, b in zip(weights, expected.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_work_with_effects_is_done_once():
    values, calls = make_inputs(), []

    @jax.custom_vjp
    def layer(x, w):
        return x @ w

    def pull(kept, gradient):
        x, w = kept
        jax.debug.callback(lambda: calls.append("seen"))
        return gradient @ w.T, x.T @ gradient

    layer.defvjp(lambda x, w: (x @ w, (x, w)), pull)

    def run(weights, x):
        for w in weights:
            x = layer(x, w)
        return x

    run_in_parts(split(lambda *v: backward(*v, run=run), values), values)
    jax.effects_barrier()
    assert len(calls) == LAYERS
