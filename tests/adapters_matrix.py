"""A network of each library, with batch norm or dropout, and a loop of its own library.

The loop computes the gradients of every micro-batch from the same weights and state,
averages gradients and state, and updates.
"""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import millrace as mr

eqx = pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")

UPDATES, MICRO_BATCH, FEATURES, HIDDEN = 3, 8, 4, 8


class Case(NamedTuple):
    """A model, adapted, and its own library's gradients."""

    model: mr.AdaptedModel
    gradients: Any
    """``(params, state, batch, key) -> (gradients, state)``, with the library's tools."""
    params: Any
    state: Any
    network: Any


def mean_error(y, batch):
    return ((y - batch["y"]) ** 2).mean()


def call_key(key):
    """Return the key of the first call of a Linen or Haiku network in a micro-batch."""
    return jax.random.fold_in(key, 0)


# --- Flax NNX ---


class NnxNet(nnx.Module):
    def __init__(self, kind, rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        if kind == "batch norm":
            self.middle = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        else:
            self.middle = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.List([nnx.Linear(HIDDEN, 1, rngs=rngs)])

    def __call__(self, x):
        return self.last[0](nnx.relu(self.middle(self.first(x))))


def nnx_case(kind):
    def loss(model, batch, key):
        return mean_error(model(batch["x"]), batch)

    net = NnxNet(kind, nnx.Rngs(0))
    model = mr.from_nnx(net, loss)
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def gradients(params, rest, batch, key):
        net = nnx.merge(graph, params, rest, copy=True)  # not to change `rest`
        for _, node in nnx.iter_graph(net):  # each stream starts from its key and ours
            if isinstance(node, nnx.RngStream):
                own = node.key[...]
                node.key[...] = jax.random.fold_in(own, jax.random.bits(key))
        found = nnx.grad(lambda net: loss(net, batch, key))(net)
        _, _, moved = nnx.split(net, nnx.Param, ...)
        averages = nnx.filter_state(moved, nnx.BatchStat)
        return found, nnx.merge_state(rest, averages)

    return Case(model, gradients, params, rest, net)


# --- Flax Linen ---


class LinenNet(linen.Module):
    kind: str

    @linen.compact
    def __call__(self, x, train):
        x = linen.Dense(HIDDEN)(x)
        if self.kind == "batch norm":
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        else:
            x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(1)(linen.relu(x))


def linen_case(kind):
    net = LinenNet(kind)
    variables = net.init(jax.random.key(0), jnp.ones((1, FEATURES)), train=False)

    def loss(model, batch, key):
        return mean_error(model(batch["x"], train=True), batch)

    def gradients(params, state, batch, key):
        name = zlib.crc32(b"dropout") & 0x7FFFFFFF
        rngs = {"dropout": jax.random.fold_in(call_key(key), name)}

        def own_loss(params):
            y, new = net.apply(
                {"params": params, **state},
                *(batch["x"], True),
                rngs=rngs,
                mutable=list(state),
            )
            return mean_error(y, batch), new

        return jax.grad(own_loss, has_aux=True)(params)

    params = variables["params"]
    state = {name: tree for name, tree in variables.items() if name != "params"}
    return Case(mr.from_linen(net, loss, variables), gradients, params, state, net)


# --- Equinox ---


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    middle: Any
    last: eqx.nn.Linear

    def __init__(self, kind, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(FEATURES, HIDDEN, key=keys[0])
        self.last = eqx.nn.Linear(HIDDEN, 1, key=keys[1])
        if kind == "dropout":
            self.middle = eqx.nn.Dropout(0.5)
        else:
            self.middle = equinox_batch_norm(EQUINOX_MODES[kind])

    def __call__(self, x, state, key):
        x = self.first(x)
        if isinstance(self.middle, eqx.nn.Dropout):
            x = self.middle(x, key=key)
        else:
            x, state = self.middle(x, state)
        return self.last(jax.nn.relu(x)), state


EQUINOX_MODES = {"batch norm": "batch", "ema batch norm": "ema", "default batch norm": None}


def equinox_batch_norm(mode):
    if mode is not None:
        return eqx.nn.BatchNorm(HIDDEN, "batch", momentum=0.9, mode=mode)
    with pytest.warns(UserWarning, match="it defaults to\\s+'ema'"):
        return eqx.nn.BatchNorm(HIDDEN, "batch", momentum=0.9)


def equinox_case(kind):
    net, state = eqx.nn.make_with_state(EquinoxNet)(kind, jax.random.key(0))

    def run(net, state, batch, key):
        call = jax.vmap(net, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        keys = jax.random.split(key, len(batch["x"]))
        return call(batch["x"], state, keys)

    def loss(net, state, batch, key):
        y, state = run(net, state, batch, key)
        return mean_error(y, batch), state

    def stateless_loss(net, batch, key):
        return mean_error(run(net, None, batch, key)[0], batch)

    params, rest = eqx.partition(net, eqx.is_inexact_array)

    def gradients(params, state, batch, key):
        net = eqx.combine(params, rest)
        return eqx.filter_grad(loss, has_aux=True)(net, state, batch, key)

    if kind == "dropout":
        model = mr.from_equinox(net, stateless_loss)
    else:
        model = mr.from_equinox(net, loss, state)
    return Case(model, gradients, params, state, net)


# --- Haiku ---


def haiku_case(kind):
    def run(x, train):
        x = hk.Linear(HIDDEN)(x)
        if kind == "batch norm":
            x = hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training=train)
        else:
            x = hk.dropout(hk.next_rng_key(), 0.5, x)
        return hk.Linear(1)(jax.nn.relu(x))

    net = hk.transform_with_state(run)
    params, state = net.init(jax.random.key(0), jnp.ones((1, FEATURES)), True)

    def loss(model, batch, key):
        return mean_error(model(batch["x"], train=True), batch)

    def gradients(params, state, batch, key):
        def own_loss(params):
            y, new = net.apply(params, state, call_key(key), batch["x"], True)
            return mean_error(y, batch), new

        return jax.grad(own_loss, has_aux=True)(params)

    return Case(mr.from_haiku(net, loss, params, state), gradients, params, state, net)


CASES = {
    "nnx": nnx_case,
    "linen": linen_case,
    "equinox": equinox_case,
    "haiku": haiku_case,
}


@functools.cache
def make_case(library, kind):
    case = CASES[library](kind)
    return case._replace(gradients=jax.jit(case.gradients))


# --- the loops ---


def make_data(count):
    """Return micro-batches: (updates, micro-batches of an update, samples, ...)."""
    rng = np.random.default_rng(0)
    shape = (UPDATES, count, MICRO_BATCH, FEATURES)
    x = rng.standard_normal(shape).astype(np.float32)
    return {"x": x, "y": np.abs(x).sum(-1, keepdims=True)}


def micro_batch_key(update, micro_batch, seed=0):
    """Return the key of a micro-batch, as a loss function gets it."""
    key = jax.random.fold_in(jax.random.key(seed), update)
    return jax.random.fold_in(jax.random.fold_in(key, 0), micro_batch)


def average(*trees):
    """Average floats; integers and keys are the same in all trees."""

    def combine(*leaves):
        is_float = jnp.issubdtype(leaves[0].dtype, jnp.floating)
        return jnp.mean(jnp.stack(leaves), 0) if is_float else leaves[0]

    return jax.tree.map(combine, *trees)


def run_own_loop(case, data, optimizer):
    params, state = case.params, case.state
    optimizer_state = optimizer.init(params)
    updates, count = data["x"].shape[:2]
    for update in range(updates):
        found = []
        for index in range(count):
            batch = {name: jnp.asarray(v[update, index]) for name, v in data.items()}
            key = micro_batch_key(update, index)
            found.append(case.gradients(params, state, batch, key))
        gradients = average(*(g for g, _ in found))
        state = average(*(s for _, s in found))
        changes, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        params = optax.apply_updates(params, changes)
    return params, state


def run_program(case, data, optimizer, **options):
    plan = mr.Plan(micro_batch_size=MICRO_BATCH, **options)
    program = mr.training_program(case.model.loss_fn, optimizer, plan)
    state = program.init(case.model.params, case.model.model_state)
    size = plan.batching.samples_per_step
    chunk = {name: v.reshape(-1, size, v.shape[-1]) for name, v in data.items()}
    state, info = program.run(state, jax.device_put(chunk, program.chunk_sharding))
    return state, info


def sorted_arrays(tree):
    """Return the floating arrays of a tree, in an order that no library decides."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree) if not is_key(x)]
    floats = [x for x in leaves if np.issubdtype(x.dtype, np.floating)]
    return sorted(floats, key=lambda x: (x.shape, x.ravel().tolist()))


def is_key(x):
    return jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)


def check_same(got, wanted):
    got, wanted = sorted_arrays(got), sorted_arrays(wanted)
    assert [x.shape for x in got] == [x.shape for x in wanted]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
