"""A partitioned update computes what the whole update does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from millrace.program.partitioned_update import PartitionedUpdate, UpdateLeaf

LAYERS = ("a", "b", "c", "d")
PART = {"a": 0, "b": 0, "c": 1, "d": 1}


def make_params():
    keys = jax.random.split(jax.random.key(0), len(LAYERS))
    return {
        name: {"kernel": jax.random.normal(key, (40, 40)), "bias": jnp.ones(40)}
        for name, key in zip(LAYERS, keys, strict=True)
    }


def whole_update(optimizer):
    def update(params, gradients, state):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return update


def partition(optimizer, params):
    own = [
        UpdateLeaf(PART[path[0].key], path[0].key, output)
        for output, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))
    ]
    leaves = [*own, *(leaf._replace(output=None) for leaf in own)]
    state = optimizer.init(params)
    for output, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        # The part of a state leaf is inferred, unless the leaf never changes.
        is_constant = any(name in str(path) for name in ("params0", "init_params", "x0"))
        layer = path[-2].key if is_constant else ""
        leaves.append(UpdateLeaf(PART.get(layer), layer, len(own) + output, is_state=True))
    return PartitionedUpdate(whole_update(optimizer), (params, params, state), leaves)


def run_parts(split, params, gradients, state):
    """Run the parts of all devices one after the other."""
    flat = jax.tree.leaves((params, gradients, state))
    given = {part: [flat[i] for i in split.input_positions(part)] for part in (None, 0, 1)}
    exchanged = []
    for number in range(split.num_exchanges):
        common = split.compute_shared(given[None], exchanged)
        one, other = (split.contribution(number, p, common, given[p]) for p in (0, 1))
        exchanged.append(jax.tree.map(jnp.add, one, other))
    common = split.compute_shared(given[None], exchanged)
    structure = jax.tree.structure((params, state))
    results = [None] * structure.num_leaves
    for part in (None, 0, 1):
        found = split.compute_outputs(part, common, () if part is None else given[part])
        for position, value in zip(split.output_positions(part), found, strict=True):
            results[position] = value
    return jax.tree.unflatten(structure, results)


def clipped(norm=1.0):
    return optax.chain(optax.clip_by_global_norm(norm), optax.adamw(1e-2))


def scale_by_next_layer():
    """Scale each layer by the norm of the next."""

    def scale(updates, params):
        norms = [optax.tree.norm(updates[name]) for name in params]
        return {
            name: jax.tree.map(lambda u, norm=norm: u * norm, updates[name])
            for name, norm in zip(params, norms[1:] + norms[:1], strict=True)
        }

    return optax.stateless(scale)


OPTIMIZERS = {
    "sgd": (optax.sgd(0.1, 0.9), 0),
    "clip": (clipped(), 1),
    "clip_twice": (optax.chain(clipped(), optax.clip_by_global_norm(0.1)), 2),
    "multi_steps": (optax.MultiSteps(optax.adam(1e-2), 2), 0),
    "multi_steps_clip": (optax.MultiSteps(clipped(), 2), 1),
    "dadapt": (optax.contrib.dadapt_adamw(1.0), 1),
    "prodigy": (optax.contrib.prodigy(), 1),
    "mechanize": (optax.contrib.mechanize(optax.sgd(0.1)), 2),
    "if_finite": (optax.apply_if_finite(optax.adam(0.1), 2), 1),
    "dog": (optax.contrib.dog(1.0), 1),
    "next_layer": (scale_by_next_layer(), 1),
    "lamb": (optax.lamb(0.1), 0),
    "novograd": (optax.novograd(0.1), 0),
    "adafactor": (optax.adafactor(0.1), 0),
    "schedule_free": (optax.contrib.schedule_free_sgd(0.1), 0),
    "inject": (optax.inject_hyperparams(optax.adam)(1e-2), 0),
    "sm3": (optax.sm3(0.1), 0),
    "noise": (optax.add_noise(0.1, 0.5, 0), 0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exchanges_are_few_and_only_small_values_are_shared(name):
    optimizer, num_exchanges = OPTIMIZERS[name]
    params = make_params()
    split = partition(optimizer, params)
    assert split.num_exchanges == num_exchanges
    leaves = jax.tree.leaves((params, optimizer.init(params)))
    largest = max((leaves[i].size for i in split.output_positions(None)), default=0)
    assert largest < 40  # no array of the shape of a weight


@pytest.mark.parametrize("name", ["multi_steps_clip", "dadapt", "mechanize", "if_finite"])
def test_parts_give_the_results_of_the_whole_update(name):
    optimizer, _ = OPTIMIZERS[name]
    params = make_params()
    split = partition(optimizer, params)
    one = other = (params, optimizer.init(params))
    whole = jax.jit(whole_update(optimizer))
    parts = jax.jit(lambda *trees: run_parts(split, *trees))
    for step in range(3):
        gradients = jax.tree.map(lambda p, step=step: jnp.sin(7 * p + step), params)
        one, other = whole(one[0], gradients, one[1]), parts(other[0], gradients, other[1])
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def test_an_exchange_reports_the_inputs_it_reads():
    """So that state in host memory is fetched only if needed."""
    params = make_params()
    num_leaves = len(jax.tree.leaves(params))
    split = partition(optax.chain(clipped(), optax.clip_by_global_norm(0.1)), params)
    gradients = range(num_leaves, 2 * num_leaves)
    first, second = (split.contribution_inputs(number, 0) for number in (0, 1))
    assert first and set(first) <= set(gradients)
    assert second and max(second) >= 2 * num_leaves  # Adam's moments
